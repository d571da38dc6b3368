// Compare: the curves of several runs over each other, the differences of their recipes, and seeds as a band.
"use strict";
(function (S) {
  const LINES = [
    ["updates", (run) => S.integer(run.state.updates_done)],
    ["training time", (run) => S.seconds((run.totals() || {}).wall_seconds)],
    ["tokens/s", (run) => { const totals = run.totals(); return totals ? S.integer(Math.round(totals.tokens_per_second)) : "-"; }],
    ["held-out score, first", (run) => S.number(scores(run)[0])],
    ["held-out score, last", (run) => S.number(scores(run).at(-1))],
    ["reward, mean of the last ten", (run) => S.number(mean(run.curves.updates.reward_mean.slice(-10)))],
    ["age, mean", (run) => S.number(mean(run.curves.updates.staleness_mean), 2)],
    ["trainer idle", (run) => S.percent((run.totals() || {}).trainer_idle_share)],
  ];
  const sum = (values) => values.reduce((a, b) => a + (b || 0), 0);
  const mean = (values) => { const known = values.filter((value) => value !== null && value !== undefined); return known.length ? sum(known) / known.length : null; };
  const scores = (run) => run.curves.evaluations.map((each) => each.score).filter((value) => value !== null);

  S.compare = {
    title: "Compare",
    /** Shows the view, unless another one was chosen while the runs were read: `wanted()` is false then. */
    async show(main, wanted) {
      if (S.runs.length < 2) { S.fill(main, S.h("div", { class: "empty stack" }, S.h("p", {}, "There is one run. To compare, name several:"), S.h("p", { class: "mono" }, "stretto view RUN RUN ..."))); return { draw() {} }; }
      S.fill(main, S.h("p", { class: "empty" }, "Reading the runs …"));
      S.watched = new Set(S.runs.map((_, place) => place));
      await Promise.all(S.runs.map((run) => (run.curves ? null : run.refresh())));
      const recipe = await S.ask("compare"), hidden = new Set();
      if (!wanted()) return null;
      let band = recipe.seeds.some((each) => each.length > 1);
      const usable = () => S.runs.filter((run) => run.curves && !run.error && !hidden.has(run.place));
      const series = (curve) => {
        const [, values] = curve.series[0], sets = band ? recipe.seeds : S.runs.map((run) => [run.place]);
        return sets.flatMap((places) => {
          const runs = usable().filter((run) => places.includes(run.place));
          if (!runs.length) return [];
          const colour = S.series(places[0]);
          if (runs.length === 1) return [{ label: runs[0].state.name, colour, ...values(runs[0]) }];
          return [{ label: S.plural(runs.length, "seed"), colour, ...merged(runs.map(values)) }];
        });
      };
      const charts = S.CURVES.map((curve) => new S.Chart({ ...curve, title: curve.series.length > 1 && curve.series[0][0] !== "score" ? `${curve.title}, ${curve.series[0][0]}` : curve.title, always: true }, () => series(curve)));
      const shade = (run) => S.series(band ? recipe.seeds.find((each) => each.includes(run.place))[0] : run.place);
      const swatches = S.runs.map(() => S.h("i", { class: "swatch" })), results = S.h("div", { class: "scroll" }), failed = S.h("div", { class: "stack" });
      const draw = () => {
        S.runs.forEach((run, place) => { swatches[place].style.background = shade(run); });
        S.fill(failed, S.runs.filter((run) => run.error).map((run) => S.h("p", { class: "notice bad" }, `${S.listed[run.place].name}: ${run.error}`)));
        failed.hidden = !failed.childElementCount;
        S.fill(results, table(S.runs.filter((run) => run.curves)));
        S.redrawCharts();
      };
      const boxes = S.runs.map((run, place) => S.h("label", { class: "check" }, S.h("input", { type: "checkbox", checked: true, on: { change: (event) => { if (event.target.checked) hidden.delete(run.place); else hidden.add(run.place); draw(); } } }), swatches[place], S.listed[run.place].name));
      S.fill(main, S.h("div", { class: "stack" }, failed,
        S.h("section", { class: "card row" }, boxes, S.h("span", { class: "spacer" }), recipe.seeds.some((each) => each.length > 1) ? S.h("label", { class: "check" }, S.h("input", { type: "checkbox", checked: band, on: { change: (event) => { band = event.target.checked; draw(); } } }), "seeds of one recipe as a band") : null),
        S.axisControls(draw), S.h("div", { class: "charts" }, charts.map((chart) => chart.element)),
        S.h("section", { class: "card" }, S.h("h2", {}, "Results"), results),
        S.h("section", { class: "card" }, S.h("h2", {}, "Recipes"), recipe.without_recipe.length ? S.h("p", { class: "notice" }, `no \`config.toml\`: ${recipe.without_recipe.join(", ")}`) : null,
          recipe.differences.length ? S.h("div", { class: "scroll" }, S.h("table", { class: "data values" }, S.h("thead", {}, S.h("tr", {}, S.h("th", {}, "key that differs"), recipe.runs.map((name) => S.h("th", { class: "num" }, name)))), S.h("tbody", {}, recipe.differences.map((each) => S.h("tr", {}, S.h("td", { class: "mono" }, each.key.split(/(?<=\.)/).map((part, index) => (index ? [S.h("wbr"), part] : part))), each.values.map((value) => S.h("td", { class: "num mono" }, value === null || value === undefined ? "-" : typeof value === "string" ? value : JSON.stringify(value)))))))) : S.h("p", { class: "muted" }, `The ${S.integer(recipe.num_keys)} keys of their recipes are the same.`))));
      draw();
      return { draw };
    },
  };
  function table(runs) {
    return S.h("table", { class: "data" }, S.h("thead", {}, S.h("tr", {}, S.h("th", {}, ""), runs.map((run) => S.h("th", { class: "num" }, run.state.name)))), S.h("tbody", {}, LINES.map(([name, value]) => S.h("tr", {}, S.h("td", { class: "muted" }, name), runs.map((run) => S.h("td", { class: "num" }, value(run)))))));
  }
  /** The mean of several runs, with the lowest and the highest, where all of them have a value. */
  function merged(parts) {
    if (S.axis === "update") {
      const found = new Map();
      for (const part of parts) part.x.forEach((x, place) => { if (part.y[place] !== null) found.set(x, [...(found.get(x) || []), part.y[place]]); });
      const xs = [...found.keys()].filter((x) => found.get(x).length === parts.length).sort((a, b) => a - b);
      return { x: xs, y: xs.map((x) => mean(found.get(x))), low: xs.map((x) => Math.min(...found.get(x))), high: xs.map((x) => Math.max(...found.get(x))), points: parts[0].points };
    }
    const from = Math.max(...parts.map((part) => part.x[0] ?? Infinity)), to = Math.min(...parts.map((part) => part.x.at(-1) ?? -Infinity)), count = 120;
    if (!(to > from)) return { x: [], y: [] };
    const xs = Array.from({ length: count }, (_, place) => from + ((to - from) * place) / (count - 1)), rows = xs.map((x) => parts.map((part) => at(part, x)));
    return { x: xs, y: rows.map(mean), low: rows.map((row) => Math.min(...row)), high: rows.map((row) => Math.max(...row)) };
  }
  function at(part, x) {
    let place = part.x.findIndex((each) => each >= x);
    if (place <= 0) return part.y[Math.max(0, place)];
    const [x0, x1] = [part.x[place - 1], part.x[place]], share = x1 > x0 ? (x - x0) / (x1 - x0) : 1, y0 = part.y[place - 1], y1 = part.y[place];
    return y0 === null ? y1 : y1 === null ? y0 : y0 + share * (y1 - y0);
  }
})(window.stretto);
