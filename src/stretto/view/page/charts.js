// Line charts on a canvas: several series, bands, three axes to choose from, and one shared pointer for all charts.
"use strict";
(function (S) {
  const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 20;
  S.axis = "update"; // or "seconds", "tokens"
  S.smoothing = 0; // of the exponential mean: 0 is none
  let pointer = null; // { axis value, chart }
  const charts = new Set();
  S.redrawCharts = () => { for (const chart of charts) chart.draw(); };
  S.dropCharts = () => charts.clear();

  /** Round numbers between two values, about `count` of them. */
  S.ticks = function (low, high, count) {
    const step0 = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(step0 || 1));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= step0) || power * 10;
    const found = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
    return found;
  };
  const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  /** Moments between two numbers of seconds, about `count` of them, round in the unit that `S.moment` shows: returns the moments and their step. */
  S.timeTicks = function (low, high, count) {
    const least = (high - low) / Math.max(1, count);
    if (least <= 1 || least > 86400) { const unit = least > 86400 ? 86400 : 1, found = S.ticks(low / unit, high / unit, count).map((value) => value * unit); return [found, found.length > 1 ? found[1] - found[0] : least]; }
    const step = TIME_STEPS.find((each) => each >= least), found = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + 1e-9; value += step) found.push(value);
    return [found, step];
  };
  /** A moment of a run for an axis whose marks are `step` seconds apart: `12.5 s`, `33 min 27 s`, `2 h 10 min`. */
  S.moment = function (value, step) {
    const digits = step < 1 ? Math.min(6, Math.ceil(-Math.log10(step) - 1e-9) + (/^[125]0*$/.test(String(Math.round(step * 1e6))) ? 0 : 1)) : 0;
    const rounded = Number(value.toFixed(digits)), hours = Math.floor(rounded / 3600), minutes = Math.floor((rounded % 3600) / 60), seconds = rounded % 60, parts = [];
    if (hours) parts.push(`${hours} h`);
    if (minutes && (step < 3600 || !hours)) parts.push(`${minutes} min`);
    if ((step < 60 && (seconds > 0 || step < 1)) || !parts.length) parts.push(`${seconds.toFixed(digits)} s`);
    return parts.join(" ");
  };
  S.compact = function (value) {
    const size = Math.abs(value);
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)} M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)} k`;
    if (size !== 0 && size < 1e-3) return value.toExponential(0);
    return String(+value.toPrecision(4));
  };
  S.smooth = function (values, weight) {
    if (!weight) return values;
    let mean = null, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = mean === null ? (1 - weight) * value : weight * mean + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return mean / norm;
    });
  };
  S.canvas = function (canvas, height) {
    const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = `${height}px`; }
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    g.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    return [g, width, height];
  };

  /**
   * A chart. `series()` returns [{ label, colour, x, y, faint?, low?, high?, points?, dash? }], `x` in the chosen axis.
   * `options`: title, unit, log, least (lower values are drawn at the bottom: they are rounding), from (a value that is always shown),
   * empty (words), format, axes (false: `x` is fixed).
   */
  S.Chart = class {
    constructor(options, series) {
      this.options = options; this.series = series;
      this.value = S.h("div", { class: "value" });
      this.plot = S.h("canvas", { role: "img", "aria-label": `${options.title}${options.unit ? `, ${options.unit}` : ""}` });
      this.words = S.h("p", { class: "empty", hidden: true });
      this.element = S.h("section", { class: "card" }, S.h("div", { class: "chart-head" }, S.h("h3", {}, options.title), S.h("span", { class: "unit" }, options.unit || ""), this.value), S.h("div", { class: "chart" }, this.plot, this.words));
      this.plot.addEventListener("pointermove", (event) => { if (!this.scale) return; pointer = this.scale.back(event.offsetX); S.redrawCharts(); });
      this.plot.addEventListener("pointerleave", () => { pointer = null; S.redrawCharts(); });
      charts.add(this);
      new ResizeObserver(() => this.draw()).observe(this.plot);
    }
    draw() {
      if (!this.plot.isConnected || !this.plot.clientWidth) return;
      const [g, width, height] = S.canvas(this.plot, 176), { options } = this;
      const usable = (value) => value !== null && value !== undefined && (!options.log || value > 0);
      const all = this.series().filter((each) => each.x.length);
      const values = all.flatMap((each) => [each.y, each.low, each.high].filter(Boolean).flat()).filter(usable);
      this.words.hidden = values.length > 0;
      this.words.textContent = options.empty || "Nothing yet";
      S.fill(this.value);
      this.scale = null;
      if (!values.length) return;
      const xs = all.flatMap((each) => [each.x[0], each.x.at(-1)]);
      let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
      const only = x0 === x1 ? x0 : null;
      if (only !== null) { x0 -= 1; x1 += 1; }
      let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
      if (options.from !== undefined && !options.log) { low = Math.min(low, options.from); high = Math.max(high, options.from); }
      if (options.least) { low = Math.max(low, options.least); high = Math.max(high, 10 * options.least); }
      const change = options.log ? Math.log10 : (value) => value;
      [low, high] = [change(low), change(high)];
      const slack = (high - low || Math.abs(high) || 1) * 0.06;
      if (options.log) { low -= slack; high += slack; } else { if (options.from !== low) low -= slack; high += slack; }
      const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
      const py = (y) => height - BOTTOM - Math.max(0, (change(y) - low) / (high - low)) * (height - TOP - BOTTOM);
      this.scale = { back: (x) => x0 + ((x - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0) };
      this.grid(g, width, height, { x0, x1, only, low, high, px, log: options.log });
      g.save();
      g.beginPath(); g.rect(LEFT, 0, width - LEFT - RIGHT + 4, height - BOTTOM + 2); g.clip();
      for (const each of all) this.line(g, each, px, py, usable);
      g.restore();
      this.readout(g, all, px, py, height, usable);
    }
    grid(g, width, height, { x0, x1, only, low, high, px, log }) {
      g.strokeStyle = S.colour("line-soft"); g.fillStyle = S.colour("faint"); g.lineWidth = 1; g.textBaseline = "middle"; g.textAlign = "right";
      const rows = log ? S.ticks(low, high, 4).filter((each) => Number.isInteger(each)) : S.ticks(low, high, 4);
      for (const value of log && rows.length < 2 ? [low, high] : rows) {
        const y = Math.round(height - BOTTOM - ((value - low) / (high - low)) * (height - TOP - BOTTOM)) + 0.5;
        g.beginPath(); g.moveTo(LEFT, y); g.lineTo(width - RIGHT, y); g.stroke();
        g.fillText(log ? (10 ** value).toExponential(0).replace("e+", "e") : S.compact(value), LEFT - 7, y);
      }
      g.textBaseline = "alphabetic"; g.textAlign = "center";
      const number = Math.max(3, Math.floor((width - LEFT) / 85)), [columns, step] = only !== null ? [[only], 1] : this.bySeconds() ? S.timeTicks(x0, x1, number) : [S.ticks(x0, x1, number), 1];
      for (const value of columns) {
        const label = this.bySeconds() ? S.moment(value, step) : S.compact(value), half = g.measureText(label).width / 2;
        g.fillText(label, Math.min(Math.max(px(value), LEFT + half - 10), width - half - 2), height - 5);
      }
    }
    bySeconds() { return this.options.axes !== false && S.axis === "seconds"; }
    line(g, each, px, py, usable) {
      const weight = each.points ? 0 : S.smoothing;
      if (each.low) {
        g.fillStyle = each.fill || `${each.colour}30`; g.beginPath();
        let begun = false;
        each.x.forEach((x, place) => { if (usable(each.high[place])) { g[begun ? "lineTo" : "moveTo"](px(x), py(each.high[place])); begun = true; } });
        for (let place = each.x.length - 1; place >= 0; place -= 1) if (usable(each.low[place])) g.lineTo(px(each.x[place]), py(each.low[place]));
        g.fill();
      }
      const draw = (values, alpha, thick) => {
        g.strokeStyle = each.colour; g.globalAlpha = alpha; g.lineWidth = thick; g.lineJoin = "round"; g.setLineDash(each.dash || []);
        g.beginPath();
        let open = false;
        values.forEach((value, place) => { if (!usable(value)) { open = open && each.points; return; } g[open ? "lineTo" : "moveTo"](px(each.x[place]), py(value)); open = true; });
        g.stroke(); g.setLineDash([]);
      };
      if (weight) { draw(each.y, 0.28, 1); draw(S.smooth(each.y.map((value) => (usable(value) ? value : null)), weight), 1, 1.8); } else draw(each.y, each.faint ? 0.55 : 1, each.faint ? 1.2 : 1.7);
      // A value without neighbours has no line: it is drawn as a point.
      const alone = (place) => !usable(each.y[place - 1]) && !usable(each.y[place + 1]);
      g.fillStyle = each.colour;
      each.y.forEach((value, place) => { if (usable(value) && (each.points || alone(place))) { g.beginPath(); g.arc(px(each.x[place]), py(value), each.points ? 3 : 1.8, 0, 7); g.fill(); } });
      g.globalAlpha = 1;
    }
    readout(g, all, px, py, height, usable) {
      const format = this.options.format || S.number;
      if (pointer !== null) { const x = Math.round(px(pointer)) + 0.5; g.strokeStyle = S.colour("faint"); g.lineWidth = 1; g.beginPath(); g.moveTo(x, TOP); g.lineTo(x, height - BOTTOM); g.stroke(); }
      const shown = [];
      let where = null;
      for (const each of all) {
        const places = each.x.map((_, place) => place).filter((place) => usable(each.y[place]));
        if (!places.length) continue;
        let place = places.at(-1);
        if (pointer !== null) { place = places[0]; for (const other of places) if (Math.abs(each.x[other] - pointer) < Math.abs(each.x[place] - pointer)) place = other; where = each.x[place]; g.fillStyle = each.colour; g.beginPath(); g.arc(px(each.x[place]), py(each.y[place]), 3.4, 0, 7); g.fill(); }
        shown.push(S.h("span", {}, all.length > 1 || this.options.always ? S.h("i", { class: "swatch", style: { background: each.colour } }) : null, each.label && all.length > 1 && !this.options.always ? S.h("span", { class: "muted" }, each.label) : null, format(each.y[place])));
      }
      S.fill(this.value, where !== null ? S.h("span", { class: "faint" }, `at ${this.bySeconds() ? S.seconds(where) : S.compact(where)}`) : null, shown.slice(0, 8));
    }
  };

  /** The values of the chosen axis at each update of a run. */
  S.axisOf = function (run, axis = S.axis) {
    const u = run.curves.updates;
    if (axis === "seconds") return u.elapsed_seconds;
    if (axis === "tokens") { let sum = 0; return u.tokens.map((count) => (sum += count || 0)); }
    return u.update;
  };
  /** The value of the chosen axis when version `version` was evaluated. */
  S.axisAtVersion = function (run, version, axis = S.axis) {
    if (axis === "update") return version;
    const u = run.curves.updates;
    if (axis === "seconds") return u.elapsed_seconds[u.update.findLastIndex((update) => update < version)] ?? 0;
    let sum = 0;
    for (let place = 0; place < u.update.length && u.update[place] < version; place += 1) sum += u.tokens[place] || 0;
    return sum;
  };

  const pick = (name) => (run) => ({ x: S.axisOf(run), y: run.curves.updates[name] });
  /** The eight curves: title, unit, and series by name. The first series of each is the one that `compare` shows; `byTask` adds one for each task that has a label. */
  S.CURVES = [
    { title: "Reward", unit: "mean of the batch", series: [["mean", pick("reward_mean")]], byTask: (label) => pick(`task/${label}/reward`) },
    { title: "Held-out score", unit: "by version", points: true, empty: "No evaluation yet", series: [["score", (run) => heldOut(run, "score")], ["greedy", (run) => heldOut(run, "greedy")]], byTask: (label) => (run) => heldOut(run, (each) => (each.tasks || {})[label]) },
    { title: "Speed", unit: "tokens/s trained on", from: 0, series: [["tokens/s", pick("tokens_per_second")]] },
    { title: "Age", unit: "updates since sampling", from: 0, series: [["mean", pick("staleness_mean")], ["oldest", pick("staleness_max")]] },
    { title: "Entropy", unit: "nats a token", from: 0, series: [["entropy", pick("entropy")]] },
    { title: "Gradient norm", unit: "before clipping", from: 0, series: [["norm", pick("grad_norm")]] },
    { title: "Mismatch", unit: "KL, log", log: true, least: 1e-9, empty: "No token of an update's own version, and none scored again", series: [["older", pick("staleness_kl")], ["engine", (run) => ({ x: S.axisOf(run), y: run.curves.updates.mismatch_kl.map((value, place) => (run.curves.updates.mismatch_tokens[place] ? value : null)) })]] },
    { title: "Length", unit: "tokens of a completion", from: 0, series: [["mean", pick("length_mean")], ["longest", pick("length_max")]] },
  ];
  /** A ninth curve, of a task with several rewards: the mean of each, without its weight. */
  S.REWARDS = { title: "Rewards", unit: "mean of each, without weights" };
  S.rewardSeries = (run) => (run.curves?.rewards || []).map((name) => [name, pick(`reward/${name}`)]);
  function heldOut(run, name) {
    const value = typeof name === "string" ? (each) => each[name] : name;
    const made = run.curves.evaluations.filter((each) => value(each) !== null && value(each) !== undefined);
    return { x: made.map((each) => S.axisAtVersion(run, each.version)), y: made.map(value), points: true };
  }
  S.axisControls = function (change) {
    return S.h("div", { class: "row" }, S.choice("Horizontal axis", [["update", "by update"], ["seconds", "by second"], ["tokens", "by token"]], S.axis, (axis) => { S.axis = axis; change(); }),
      S.choice("Smoothing", [[0, "raw"], [0.7, "smooth"], [0.92, "smoother"]], S.smoothing, (weight) => { S.smoothing = weight; change(); }));
  };
})(window.stretto);
