// The tokens of a lineage, coloured by a value, with every value on hover. What the environment said is marked.
"use strict";
(function (S) {
  const LINE = /\n/;
  /** The ways to colour: [name, label, values of a lineage, [low, middle, high]]. */
  const WAYS = {
    none: ["no colour", () => null],
    logprob: ["log-probability", (l) => l.logprobs, () => [-4, 0, 0.01]],
    difference: ["trainer − engine", (l) => l.values && l.values.logprobs.map((value, place) => (value === null ? null : value - l.logprobs[place])), () => [-0.5, 0, 0.5]],
    ratio: ["ratio", (l) => l.values && l.values.ratios, () => [0.5, 1, 1.5]],
    advantage: ["advantage", (l) => l.values && l.values.advantages, (values) => { const most = Math.max(1e-9, ...values.map((value) => Math.abs(value ?? 0))); return [-most, 0, most]; }],
    gradient: ["gradient", (l) => l.values && l.values.gradients, (values) => { const most = Math.max(1e-12, ...values.map((value) => Math.abs(value ?? 0))); return [-most, 0, most]; }],
    version: ["version", (l) => l.versions || l.tokens.map(() => null), null],
    turn: ["turn", (l) => l.turns, null],
  };
  S.tokenWay = "logprob";
  S.tokenWays = function (lineages) {
    const several = lineages.some((l) => new Set(l.turns).size > 1), versions = lineages.some((l) => l.versions), values = lineages.some((l) => l.values);
    return Object.entries(WAYS).filter(([name]) => (name !== "turn" || several) && (name !== "version" || versions) && (!["difference", "ratio", "advantage", "gradient"].includes(name) || values)).map(([name, [label]]) => [name, label]);
  };

  /** An element with the tokens of a lineage. `about`: { version, hasPieces }. */
  S.tokens = function (lineage, about) {
    const [label, valuesOf, boundsOf] = WAYS[S.tokenWay] || WAYS.none, values = valuesOf(lineage);
    const known = values ? values.filter((value) => value !== null) : [], bounds = boundsOf && known.length ? boundsOf(known) : null;
    const box = S.h("div", { class: "tokens", role: "group", "aria-label": `tokens, coloured by ${label}` }), several = new Set(lineage.turns).size > 1;
    let turn = null, before = null;
    const parts = [], called = new Map(), begins = new Map(); // by token, and by its first token
    for (const call of lineage.calls) { if (call.start === null) continue; begins.set(call.start, [...(begins.get(call.start) || []), call.name || "unreadable"]); for (let place = call.start; place < call.end; place += 1) called.set(place, call); }
    const results = (number) => { const names = lineage.calls.filter((call) => call.turn === number).map((call) => call.name || "unreadable"); return names.length ? `environment: result of ${[...new Set(names)].join(", ")}` : "environment"; };
    lineage.tokens.forEach((token, place) => {
      const now = lineage.turns[place];
      if (several && now !== turn) { if (place) parts.push(document.createTextNode("\n")); parts.push(S.h("b", { class: "turn-mark" }, now < 0 ? results(before) : `turn ${now}`)); turn = now; if (now >= 0) before = now; }
      if (begins.has(place)) parts.push(S.h("b", { class: "turn-mark call" }, `calls ${begins.get(place).join(", ")}`));
      const piece = lineage.pieces ? lineage.pieces[place] : null;
      const span = document.createElement("span");
      span.dataset.place = place;
      if (piece === null) { span.textContent = token; span.className = "id"; } else if (LINE.test(piece)) { span.append(piece.replace(/\n+$/, ""), S.h("i", { class: "mark" }, "↵"), "\n".repeat((piece.match(/\n/g) || []).length)); } else span.textContent = piece === "" ? "·" : piece;
      if (now < 0) span.classList.add("observed");
      else if (values && values[place] !== null && values[place] !== undefined) {
        if (bounds) span.style.backgroundColor = S.shade(values[place], bounds[0], bounds[2], bounds[1]);
        else if (S.tokenWay !== "none") span.style.backgroundColor = S.mixed(values[place], 0.28);
      }
      if (called.has(place)) span.classList.add("call");
      parts.push(span);
    });
    box.append(...parts);
    box.addEventListener("pointermove", (event) => { const span = event.target.closest("span[data-place]"); S.tip(event, span ? describe(lineage, Number(span.dataset.place), about) : null); });
    box.addEventListener("pointerleave", (event) => S.tip(event, null));
    return box;
  };
  function calledAt(lineage, place) { const call = lineage.calls.find((each) => each.start !== null && place >= each.start && place < each.end); return call ? ["calls the tool", call.name || "unreadable"] : null; }
  function describe(lineage, place, about) {
    const turn = lineage.turns[place], v = lineage.values, piece = lineage.pieces ? JSON.stringify(lineage.pieces[place]) : null;
    const trained = v && v.logprobs[place] !== null;
    return [
      piece !== null ? ["text", piece] : null, ["token", `${lineage.tokens[place]}, at ${place}`],
      turn < 0 ? ["said by the environment, never trained on"] : ["log-probability", `${S.number(lineage.logprobs[place])} (${S.percent(Math.exp(lineage.logprobs[place]))})`],
      trained ? ["trainer's log-probability", S.number(v.logprobs[place])] : null, trained ? ["ratio", S.number(v.ratios[place])] : null,
      trained ? ["advantage", S.number(v.advantages[place])] : null, trained ? ["gradient", v.gradients[place] === 0 ? "0: clipped or masked" : S.number(v.gradients[place])] : null,
      turn >= 0 ? ["version", lineage.versions ? lineage.versions[place] : about.version] : null, turn >= 0 ? ["turn", turn] : null,
      calledAt(lineage, place), ["mask", turn < 0 || !lineage.train ? "not trained on" : "trained on"],
    ];
  }
  /** The scale of the colours, in words. */
  S.tokenScale = function (lineages) {
    const [, valuesOf, boundsOf] = WAYS[S.tokenWay] || WAYS.none;
    if (!boundsOf) return null;
    const known = lineages.flatMap((l) => (valuesOf(l) || []).filter((value) => value !== null));
    if (!known.length) return null;
    const [low, middle, high] = boundsOf(known), canvas = S.h("canvas", { width: 110, height: 10 }), g = canvas.getContext("2d");
    for (let x = 0; x < 110; x += 1) { g.fillStyle = S.shade(low + ((high - low) * x) / 110, low, high, middle) || "rgba(0,0,0,0)"; g.fillRect(x, 0, 1, 10); }
    return S.h("span", { class: "scale" }, S.number(low, 2), canvas, S.number(S.tokenWay === "logprob" ? 0 : high, 2));
  };
})(window.stretto);
