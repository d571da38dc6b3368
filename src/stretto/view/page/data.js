// Where the page's data comes from: the server, or what a report has embedded. Runs are polled while they go on.
"use strict";
(function (S) {
  const embedded = document.getElementById("embedded");
  S.report = embedded ? JSON.parse(embedded.textContent) : null;

  let spentMs = 0; // by answers that come again and again, since the last poll
  class AskError extends Error {}
  /** Answers a question of the page. Rejects with an error whose message is for people. */
  S.ask = async function (name, parameters = {}, options = {}) {
    if (S.report) return fromReport(name, parameters);
    const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== ""));
    let response;
    const began = performance.now();
    try {
      response = await fetch(`/api/${name}?${query}`, { cache: "no-store", signal: options.signal, method: options.method || "GET", headers: options.method ? { "X-Stretto": "1" } : {} });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new AskError("The server does not answer: it was stopped. Start it again with `stretto view`.");
    }
    if (name === "poll" || name === "timeline") spentMs += performance.now() - began;
    const value = await response.json().catch(() => ({ error: `the server answered with status ${response.status}` }));
    if (!response.ok) throw new AskError(value.error || `status ${response.status}`);
    return value;
  };

  // -- the clock without pauses: as `pauses.py` ----------------------------------------------------------------------
  /** A time on a clock on which each pause, `[start, end, shown]`, takes `shown` seconds. */
  S.squeezed = (at, pauses) => pauses.reduce((found, [start, end, shown]) => found - Math.min(Math.max(at - start, 0), end - start) * (1 - shown / (end - start)), at);
  /** The time that `squeezed` gives this one for. */
  S.stretched = function (time, pauses) {
    let hidden = 0; // of the pauses before
    for (const [start, end, shown] of pauses) {
      const at = time + hidden;
      if (at <= start) return at;
      if (at < start + shown) return start + ((at - start) * (end - start)) / shown;
      hidden += end - start - shown;
    }
    return time + hidden;
  };

  // -- a report: everything was asked ahead of time -------------------------------------------------------------------
  function fromReport(name, p) {
    const data = S.report, run = data.runs[p.run || 0];
    switch (name) {
      case "runs": return data.runs.map((each) => ({ name: each.state.name, folder: "", condition: each.state.condition, error: null }));
      case "poll": return { seen: "", state: run.state, curves: run.curves };
      case "curves": return run.curves;
      case "notes": return run.notes;
      case "recipe": return run.recipe;
      case "verify": return run.verify;
      case "compare": return data.comparison;
      case "timeline": return S.reportTimeline(run, p);
      case "trajectories": return S.reportSearch(run, p);
      case "trajectory": return found(run.trajectories.find((each) => each.trajectory === Number(p.id)), `trajectory ${p.id}`);
      case "group": return found(run.groups[p.id], `group ${p.id}`);
      case "answers": return S.reportAnswers(run, p);
      case "answer": return found(run.answers.find((each) => each.evaluation === Number(p.evaluation) && each.index === Number(p.index) && each.greedy === (p.greedy === "1")), `prompt ${p.index}`);
      default: throw new AskError(`a report has no ${name}`);
    }
  }
  function found(value, what) { if (!value) throw new AskError(`This report has a sample of the run, and ${what} is not in it.`); return value; }
  function between(value, text) {
    if (!text) return true;
    if (value === null || value === undefined) return false;
    const [low, high] = text.includes("..") ? text.split("..") : [text, text];
    return (low.trim() === "" || value >= Number(low)) && (high.trim() === "" || value <= Number(high));
  }
  function calls(run, id, tool) { const t = run.trajectories.find((each) => each.trajectory === id); return Boolean(t) && t.lineages.some((each) => each.calls.some((call) => tool === "*" || call.name === tool)); }
  S.reportSearch = function (run, p) {
    const wanted = (p.text || "").toLowerCase();
    const rows = run.rows.filter((row) =>
      ["update", "version", "group", "reward", "length", "age"].every((name) => between(row[name], p[name])) &&
      (!p.finish || row.finish === p.finish) && (!p.state || row.state === p.state) && (p.failed !== "1" || row.failures > 0 || row.error) && (!p.task || row.task === p.task) &&
      (!p.tool || calls(run, row.trajectory, p.tool)) && (!wanted || `${row.prompt}\n${row.text || ""}`.toLowerCase().includes(wanted)));
    const sort = p.sort || "newest", key = sort.replace("-", ""), sign = sort.startsWith("-") ? -1 : 1;
    rows.sort(sort === "newest" ? (a, b) => b.trajectory - a.trajectory : sort === "oldest" ? (a, b) => a.trajectory - b.trajectory : (a, b) => sign * ((a[key] ?? Infinity) - (b[key] ?? Infinity)));
    return { rows, cursor: null, matching: rows.length, looked_at: rows.length, page_is_full: false, read: rows.length, all: rows.length };
  };
  S.reportAnswers = function (run, p) {
    const wanted = (p.text || "").toLowerCase();
    const rows = run.answers.filter((each) => each.evaluation === Number(p.evaluation) && between(each.reward, p.reward) && (!p.task || each.task === p.task) &&
      (!wanted || `${each.prompt}\n${each.lineages[0] ? each.lineages[0].text : ""}`.toLowerCase().includes(wanted)))
      .map((each) => ({ ...each, greedy: each.greedy ? 1 : 0, length: each.lineages.reduce((sum, one) => sum + one.num_sampled, 0), finish: each.lineages[0] ? each.lineages[0].finish : null, text: each.lineages[0] ? each.lineages[0].text.slice(0, 160) : "", prompt: each.prompt.slice(-160), lineages: each.lineages.length }));
    return { rows, matching: rows.length, cursor: null };
  };
  /**
   * Cuts the embedded timeline, which has one resolution, to a window. Numbers of trajectories and moves are exact to a bin of it. Lanes
   * that share a row cannot be told apart, so their number is an upper bound (`at_most`), and a row does not count its trajectories.
   */
  S.reportTimeline = function (run, p) {
    const whole = run.timeline, from = Number(p.from), to = Number(p.to), bins = Number(p.bins);
    const { pauses } = run.state, begin = S.squeezed(whole.from, pauses), first = S.squeezed(from, pauses), last = S.squeezed(to, pauses);
    const width = (S.squeezed(whole.to, pauses) - begin) / whole.bins, step = (last - first) / bins;
    const low = Math.max(0, Math.floor((first - begin) / width + 1e-9)), high = Math.min(whole.bins, Math.ceil((last - begin) / width - 1e-9)), all = low === 0 && high === whole.bins;
    const places = Array.from({ length: bins }, (_, bin) => Math.floor((first + (bin + 0.5) * step - begin) / width));
    const cut = (lanes, range) => {
      const [least, most] = range ? range.split("..").map(Number) : [0, Infinity], rows = [];
      let peak = 0;
      for (const row of lanes.rows) {
        if (row.to < least || row.from > most || row.first >= high || row.first + row.values.length <= low) continue;
        const values = places.map((place) => row.values[place - row.first] || 0), own = Math.max(...values);
        if (own > 0) { rows.push({ ...row, first: 0, values, count: all ? row.count : null }); peak = Math.max(peak, own); }
      }
      return { rows, peak, lanes: rows.reduce((sum, row) => sum + row.lanes, 0), at_most: !all && rows.some((row) => row.lanes > 1) };
    };
    const sum = (values, start, end) => { let found = 0; for (let place = start; place < end; place += 1) found += values[place]; return found; };
    const count = sum(whole.starts, 0, high) - sum(whole.ends, 0, low), { moves } = whole;
    let own;
    if (moves.moves) { const inside = moves.moves.filter((move) => move[0] >= from && move[0] <= to); own = { count: inside.length, bins: null, moves: inside }; } else {
      const inside = moves.bins.filter(([place]) => place >= low && place < high), scale = width / step;
      own = { count: inside.reduce((total, [, number]) => total + number, 0), bins: inside.map(([place, number]) => [((place * width + begin - first) / step), number, scale]), moves: null };
    }
    return { ...whole, from, to, bins, count, versions: cut(whole.versions, p.versions), instances: cut(whole.instances, p.instances), bars: null, moves: own, closed: whole.closed && whole.closed.filter(([start, end]) => start < to && end > from) };
  };

  // -- runs, kept up to date ------------------------------------------------------------------------------------------
  // A busy machine answers slowly; the page then asks less often, so that the server takes about a hundredth of its time.
  const EVERY_MS = 2000, HIDDEN_MS = 10000, ENDED_MS = 5000, MOST_MS = 15000, SHARE = 0.01;
  class Run {
    constructor(place) { this.place = place; this.state = null; this.curves = null; this.error = null; this.seen = ""; this.listeners = new Set(); this.busy = null; this.bounds = null; }
    /** Reads what is new. Tells the listeners if anything changed. */
    refresh() { this.busy = this.busy || this.read().finally(() => { this.busy = null; }); return this.busy; }
    async read() {
      try {
        const last = this.curves && this.curves.updates.update.length ? this.curves.updates.update.at(-1) : -1;
        const found = await S.ask("poll", { run: this.place, after: last, seen: this.error ? "" : this.seen });
        const failed = this.error !== null;
        this.error = null;
        this.seen = found.seen;
        if (found.state) { this.state = found.state; this.merge(found.curves); this.bounds = null; }
        if (found.state || failed) this.tell();
      } catch (error) {
        const changed = this.error !== error.message;
        this.error = error.message;
        if (changed) this.tell();
      }
    }
    merge(found) {
      if (!this.curves || S.report) { this.curves = found; return; }
      const before = this.curves.updates, done = before.update.length;
      for (const [name, values] of Object.entries(found.updates)) (before[name] ??= Array(done).fill(null)).push(...values); // a reward may be new
      this.curves = { ...found, updates: this.curves.updates, waited_for: { ...this.curves.waited_for, ...found.waited_for }, warnings: { ...this.curves.warnings, ...found.warnings } };
    }
    /** Seconds from one moment to another in which a process ran the run: pauses between sessions do not count. */
    active(from, to) { return this.state.pauses.reduce((sum, [start, end]) => sum - Math.max(0, Math.min(end, to) - Math.max(start, from)), to - from); }
    /** The figures of the run as its summary has them: `tokens`, `wall_seconds`, `tokens_per_second`, `trainer_idle_share`; null before the first update. */
    totals() {
      if (this.state.totals) return this.state.totals;
      const u = this.curves.updates, sum = (values) => values.reduce((a, b) => a + (b || 0), 0), wall = sum(u.cycle_seconds), tokens = sum(u.tokens);
      return wall > 0 ? { tokens, wall_seconds: wall, tokens_per_second: tokens / wall, trainer_idle_share: Math.min(1, sum(u.trainer_idle_seconds) / wall) } : null;
    }
    tell() { for (const listener of this.listeners) listener(this); }
    /** Where the run begins and ends, in seconds since 1970. Computed once for each state: drawings ask for it at every turn. */
    span() { this.bounds = this.bounds || this.findSpan(); return this.bounds; }
    findSpan() {
      const { state, curves } = this;
      let first = Infinity, last = -Infinity;
      const seen = (at) => { if (at === null || at === undefined) return; if (at < first) first = at; if (at > last) last = at; };
      for (const session of state.sessions) { seen(session.started_at); seen(session.ended_at); }
      if (curves) {
        for (const each of curves.evaluations) { seen(each.at); seen(each.at - each.seconds); }
        seen(curves.updates.taken_at[0]); seen(curves.updates.finished_at.at(-1));
        for (const each of curves.versions) seen(each[1]);
      }
      if (state.status) seen(state.status.at);
      if (first === Infinity) return [0, 1];
      return [first, Math.max(state.condition === "running" ? state.now : last, first + 1)];
    }
  }
  S.runs = [];
  S.openRuns = async function () {
    S.listed = await S.ask("runs");
    S.runs = S.listed.map((_, place) => new Run(place));
  };
  /** The runs whose data a view needs; the others are not polled. */
  S.watched = new Set([0]);
  S.poll = function () {
    if (S.report) return;
    const again = async () => {
      const places = [...S.watched].filter((place) => S.runs[place]);
      await Promise.all(places.map((place) => S.runs[place].refresh()));
      const going = places.some((place) => S.runs[place].error || !S.runs[place].state || S.runs[place].state.condition === "running");
      const wait = Math.min(MOST_MS, Math.max(EVERY_MS, spentMs / SHARE));
      spentMs = 0;
      setTimeout(again, document.hidden ? HIDDEN_MS : going ? wait : ENDED_MS);
    };
    setTimeout(again, EVERY_MS);
  };
})(window.stretto);
