// The overview: the state of a run, what it waits for, the laws, and the eight curves; a ninth if there are several rewards.
"use strict";
(function (S) {
  const CONDITIONS = { running: "running", finished: "finished", stopped: "stopped", failed: "failed", killed: "killed, or its machine is gone", unreadable: "cannot be read" };
  const MOST_NOTES = 200; // that the server sends
  S.conditionWords = (condition) => CONDITIONS[condition] || condition;

  S.overview = {
    title: "Overview",
    show(main, run) {
      const parts = { about: S.h("section", { class: "card" }), now: S.h("section", { class: "card" }), laws: S.h("section", { class: "card laws-card" }), notes: S.h("div") };
      const charts = S.CURVES.map((curve) => new S.Chart(curve, () => (run.curves ? seriesOf(curve, run) : [])));
      const rewards = new S.Chart(S.REWARDS, () => (run.curves ? seriesOf({ series: S.rewardSeries(run) }, run) : []));
      rewards.element.classList.add("wraps");
      charts.push(rewards);
      S.fill(main, S.h("div", { class: "stack" }, S.h("div", { class: "top" }, parts.about, parts.now, parts.laws), S.axisControls(S.redrawCharts), S.h("div", { class: "charts" }, charts.map((chart) => chart.element)), parts.notes));
      const laws = new Laws(parts.laws, run);
      const draw = () => { rewards.element.style.display = S.rewardSeries(run).length ? "" : "none"; about(parts.about, run); now(parts.now, run); laws.draw(); notes(parts.notes, run); S.redrawCharts(); };
      draw();
      laws.follow();
      return { draw, close: () => laws.close() };
    },
  };

  /** The series of a curve: its own, and one for each task that has a label. */
  function seriesOf(curve, run) {
    const own = curve.series.map(([label, values], place) => ({ label, colour: S.series(place), dash: place ? [4, 3] : null, ...values(run) }));
    const labels = curve.byTask ? run.curves.tasks || [] : [];
    return own.concat(labels.map((label, place) => ({ label, colour: S.series(place + 2), ...curve.byTask(label)(run) })));
  }

  function facts(pairs) { return S.h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => [S.h("dt", {}, name), S.h("dd", {}, value)])); }

  function about(card, run) {
    const { state, curves } = run, f = state.facts, totals = run.totals(), stopped = state.pauses.reduce((sum, [start, end]) => sum + end - start, 0);
    const counts = state.counts, started = Object.values(counts).reduce((a, b) => a + b, 0);
    const under = ["waiting", "running", "scoring", "scored", "training"].reduce((sum, name) => sum + (counts[name] || 0), 0);
    const u = curves.updates;
    const rest = state.condition === "running" && u.cycle_seconds.length ? median(u.cycle_seconds.slice(-20)) * (state.updates - state.updates_done) : null;
    S.fill(card, S.h("h2", {}, "Run"),
      S.h("p", { class: "headcount" }, S.h("span", { class: "big" }, S.integer(state.updates_done)), S.h("span", { class: "muted" }, ` of ${S.integer(state.updates ?? 0)} updates`)),
      facts([
        ["state", S.conditionWords(state.condition) + (state.condition === "failed" && state.sessions.at(-1).error ? `: ${state.sessions.at(-1).error}` : "")],
        ["paradigm", `${f.paradigm}, K = ${f.auto ? `auto, at most ${f.staleness}` : f.staleness}`],
        ["a batch", `${S.integer(f.batch)} prompts x ${S.integer(f.group)}`],
        totals ? ["training time", S.seconds(totals.wall_seconds)] : null,
        rest !== null ? ["about left", S.seconds(rest)] : null,
        ["tokens trained on", S.integer(totals ? totals.tokens : 0)],
        totals ? ["speed, whole run", `${S.integer(Math.round(totals.tokens_per_second))} tokens/s`] : null,
        ["trajectories", `${S.integer(started)} started`],
        ["", ["trained", "failed", "filtered", "dropped"].filter((name) => counts[name] || name === "trained").map((name) => `${S.integer(counts[name] || 0)} ${name}`).join(", ") + (under ? `, ${S.integer(under)} under way` : "")],
        state.sessions.length > 1 ? ["resumed", `${state.sessions.length === 2 ? "once" : S.plural(state.sessions.length - 1, "time")}`] : null,
        stopped >= 1 ? ["stopped in between", S.seconds(stopped)] : null,
        ["seed", f.seed],
      ]));
  }
  function median(values) { const sorted = values.filter((v) => v !== null).sort((a, b) => a - b); return sorted.length ? sorted[sorted.length >> 1] : 0; }

  function now(card, run) {
    const { state } = run, lines = [], going = state.condition === "running";
    if (going) {
      const training = state.training;
      if (training) lines.push(["trainer", `trains update ${training.update}, for ${S.seconds(Math.max(0, state.now - training.since))}`]);
      for (const wait of state.status ? state.status.waits : []) { const [owner, ...words] = wait.split(": "); if (!(training && owner === "trainer")) lines.push([owner, `waits: ${words.join(": ")}`]); }
      if (state.status) {
        const versions = Object.entries(state.status.versions).map(([version, count]) => `version ${version}: ${S.integer(count)}`).join(", ");
        const generating = Object.values(state.status.versions).reduce((sum, count) => sum + count, 0); // engines also run the requests of evaluations
        lines.push(["rollout", `${S.plural(generating, "trajectory", "trajectories")}${versions ? ` (${versions})` : ""}; engines run ${S.plural(state.status.running, "request")}${state.status.queued ? ` and queue ${S.integer(state.status.queued)}` : ""}`]);
        if (state.status.num_instances > 1) lines.push(["instances", `requests: ${state.status.instances.slice(0, 8).map((each) => `${each.instance}: ${each.running}`).join(", ")}` + (state.status.num_instances > 8 ? `, and ${state.status.num_instances - 8} more` : "")]);
      } else lines.push(["run", "is starting: it loads its model, or evaluates a version"]);
    } else {
      const last = state.sessions.at(-1), again = `It continues with \`stretto train --out ${state.folder || "RUN"} --resume\`.`;
      const words = { finished: "Nothing is waited for: the run has finished.", stopped: `Nothing is waited for: the run was stopped. ${again}`, failed: `Nothing is waited for: the run failed${last && last.error ? `: ${last.error}` : ""}. ${again}`, killed: `No process runs it, and it has not ended: it was killed. ${again}` }[state.condition];
      lines.push(["", words]);
      if (last && last.ended_at) lines.push(["ended", S.date(last.ended_at)]);
      if (state.condition === "killed" && state.status) { lines.push(["last sign", S.date(state.status.at)]); for (const wait of state.status.waits) { const [owner, ...rest] = wait.split(": "); lines.push([owner, `waited: ${rest.join(": ")}`]); } }
    }
    const totals = run.totals();
    if (totals) lines.push([going ? "idle so far" : "idle", `trainer ${S.percent(totals.trainer_idle_share)} of the training time${longest(run)}`]);
    const changes = run.state.recipe_changes, most = 6;
    const phases = changes.slice(-most).map((each) => S.h("li", {}, S.h("b", {}, `update ${S.integer(each.update)}`), S.h("span", {}, each.keys.slice(0, most).map(([key, before, after]) => S.h("div", {}, `${key}: ${before} → ${after}`)), each.keys.length > most ? S.h("div", { class: "muted" }, `and ${S.plural(each.keys.length - most, "key")} more`) : null)));
    S.fill(card, S.h("h2", {}, going ? "Now" : "At the end"), S.h("ul", { class: "waits" }, lines.map(([owner, words]) => S.h("li", {}, S.h("b", {}, owner), S.h("span", { class: going ? "" : "muted" }, words)))),
      phases.length ? [S.h("h2", { style: { marginTop: "1.2rem" } }, changes.length > most ? `Recipe, the last ${most} of ${changes.length} changes` : "Changes of the recipe"), S.h("ul", { class: "waits" }, phases)] : null);
  }
  function longest(run) {
    const u = run.curves.updates;
    let best = -1;
    u.trainer_idle_seconds.forEach((value, place) => { if (value !== null && run.curves.waited_for[u.update[place]] && (best < 0 || value > u.trainer_idle_seconds[best])) best = place; });
    return best < 0 || u.trainer_idle_seconds[best] < 0.5 ? "" : `; longest ${S.seconds(u.trainer_idle_seconds[best])}, before update ${u.update[best]}`;
  }

  const LAW_WORDS = [["law 1 one voice", "every token of a trajectory is sampled from one version"], ["law 2 nothing lost", "every trajectory is trained on exactly once, or counted"], ["law 3 nothing old", "none is trained on more than K versions late"], ["exactly once", ""], ["recorded data", "digests of everything that was trained on"]];
  class Laws {
    constructor(card, run) { this.card = card; this.run = run; this.result = null; this.timer = null; }
    close() { clearTimeout(this.timer); this.closed = true; }
    async follow(method) {
      if (this.closed) return;
      try { this.result = await S.ask("verify", { run: this.run.place }, { method }); } catch (error) { this.result = { state: "failed", error: error.message }; }
      this.draw();
      clearTimeout(this.timer);
      if (this.result && this.result.state === "running") this.timer = setTimeout(() => this.follow(), 400);
    }
    draw() {
      const { result } = this, done = result && result.state === "done", running = result && result.state === "running";
      const rows = done
        ? result.findings.map((each) => { const [words, kind] = !each.holds ? [`BROKEN ${S.integer(each.broken)}`, "bad"] : each.by_paradigm !== null ? [`given up: ${S.integer(each.by_paradigm)}`, "warn"] : ["holds", "good"]; return S.h("tr", {}, S.h("td", {}, S.h("b", {}, each.name), S.h("div", { class: "small muted" }, each.counts), each.details.map((line) => S.h("div", { class: "small verdict bad" }, line))), S.h("td", { class: "num" }, S.h("span", { class: `verdict ${kind}` }, words))); })
        : LAW_WORDS.map(([name, words]) => S.h("tr", {}, S.h("td", {}, S.h("b", {}, name), words ? S.h("div", { class: "small muted" }, words) : null), S.h("td", { class: "num" }, S.h("span", { class: "faint" }, running ? "…" : "not checked"))));
      const button = S.report ? null : S.h("button", { type: "button", class: done ? "" : "primary", disabled: Boolean(running), on: { click: () => this.follow("POST") } }, done ? (result.changed ? "Verify again" : "Verified") : running ? "Verifying" : "Verify");
      if (done && !result.changed && button) button.disabled = true;
      S.fill(this.card, S.h("div", { class: "row" }, S.h("h2", {}, "Laws"), S.h("span", { class: "spacer" }), button), S.h("table", { class: "laws" }, S.h("tbody", {}, rows)),
        running ? S.h("p", { class: "small muted" }, S.h("progress", { max: 1, value: result.share, style: { width: "100%" }, "aria-label": "progress of verify" }), ` ${result.words}`) : null,
        done && result.changed ? S.h("p", { class: "small muted" }, "The run has gone on since.") : null,
        result && result.state === "failed" ? S.h("p", { class: "notice bad" }, result.error) : null);
    }
  }

  function notes(element, run) {
    const { state, curves } = run, warnings = Object.entries(curves.warnings).flatMap(([update, lines]) => lines.map((line) => [update, line]));
    const kinds = state.notes.map((each) => `${each.kind}: ${S.plural(each.count, "time")}, last at ${S.clock(each.at)}`);
    if (state.num_failures) kinds.push(`${S.plural(state.num_failures, "failed attempt")} to generate or to score`);
    if (!warnings.length && !kinds.length) { S.fill(element); return; }
    if (element.childElementCount && element.dataset.kinds === kinds.join() + warnings.length) return;
    element.dataset.kinds = kinds.join() + warnings.length;
    const list = S.h("div", { class: "scroll" }), number = state.num_failures + state.notes.reduce((sum, each) => sum + each.count, 0);
    S.fill(element, S.h("section", { class: "card stack" }, S.h("h2", {}, "Notes"), warnings.slice(-5).map(([, line]) => S.h("p", { class: "notice" }, line)), kinds.map((line) => S.h("p", {}, line)),
      S.h("details", { on: { toggle: async (event) => { if (!event.target.open) return; const found = await S.ask("notes", { run: run.place }); S.fill(list, S.h("table", { class: "data" }, S.h("tbody", {}, found.map((each) => S.h("tr", {}, S.h("td", { class: "num muted" }, S.clock(each.at)), S.h("td", {}, each.kind), S.h("td", {}, each.text)))))); } } }, S.h("summary", {}, number > MOST_NOTES ? `the last ${MOST_NOTES}` : number === 1 ? "show it" : `show all ${number}`), list)));
  }
})(window.stretto);
