// Trajectories: search, one of them token by token, a group's members side by side, and the answers of evaluations.
"use strict";
(function (S) {
  const NAMES = ["update", "reward", "length", "age", "version", "group", "finish", "state", "failed", "task", "tool", "text", "sort"];
  const ENDS = new Set(["trained", "failed", "filtered", "dropped"]);
  const HINTS = { update: "7 or 5..9", reward: "0.5..", length: "100..", age: "2", version: "3", group: "12", tool: "name, or *" };
  const pressed = (element, act) => ({ click: act, keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(event); } else if (event.key === "ArrowDown" || event.key === "ArrowUp") { const next = event.key === "ArrowDown" ? event.currentTarget.nextElementSibling : event.currentTarget.previousElementSibling; if (next) { event.preventDefault(); next.focus(); } } void element; } });

  class Trajectories {
    constructor(main, run, parameters) {
      this.run = run; this.parameters = { ...parameters }; this.generation = 0; this.listed = { rows: [], cursor: null };
      this.results = S.h("section", { class: "card list", tabindex: -1 }); this.details = S.h("section", { class: "details stack" }); this.status = S.h("div", { class: "row", role: "status" });
      this.split = S.h("div", { class: "split" }, this.results, this.details);
      this.form = S.h("form", { class: "card filters", on: { submit: (event) => { event.preventDefault(); this.submit(); } } });
      S.fill(main, S.h("div", { class: "stack" }, this.form, this.status, this.split));
      this.fields(); this.search();
      if (parameters.id !== undefined) this.open(Number(parameters.id)); else if (parameters.group_of !== undefined) this.openGroup(Number(parameters.group_of)); else if (parameters.answer !== undefined) this.openAnswer(Number(parameters.answer), parameters.greedy === "1");
    }
    get source() { return this.parameters.evaluation || ""; }
    fields() {
      const p = this.parameters, made = this.run.curves.evaluations.filter((each) => each.kind !== "skipped");
      const field = (label, control, wide) => S.h("label", { class: `field${wide ? " wide" : ""}` }, label, control);
      const text = (name) => S.h("input", { type: "text", name, value: p[name] || "", placeholder: HINTS[name], autocomplete: "off", spellcheck: false });
      const options = (name, choices) => S.h("select", { name, on: { change: () => this.submit() } }, choices.map(([value, label]) => S.h("option", { value, selected: (p[name] || "") === value }, label)));
      const source = field("look at", options("evaluation", [["", "training"], ...made.map((each) => [String(each.id), `evaluation of version ${each.version}${each.score === null ? "" : ` (${S.number(each.score)})`}`])]), true);
      const search = field("text of prompt or completion", S.h("input", { type: "search", name: "text", value: p.text || "", placeholder: "press / to search", spellcheck: false }), true);
      const byTask = (this.run.curves.tasks || []).length > 1 ? field("task", options("task", [["", "any"], ...this.run.curves.tasks.map((each) => [each, each])])) : null;
      const training = this.source ? [] : [
        ...["update", "reward", "length", "age", "version", "group"].map((name) => field(name, text(name))),
        field("finish", options("finish", [["", "any"], ["stop", "stopped"], ["length", "cut at the limit"]])),
        field("state", options("state", [["", "any"], ..."running scoring scored training trained failed filtered dropped waiting".split(" ").map((each) => [each, each])])),
        byTask,
        field("calls the tool", text("tool")),
        field("attempts", options("failed", [["", "any"], ["1", "one failed"]])),
        field("order", options("sort", [["", "newest first"], ["oldest", "oldest first"], ["-reward", "best reward"], ["reward", "worst reward"], ["-length", "longest"], ["length", "shortest"], ["-age", "oldest data"]])),
      ];
      const ending = this.source ? [field("reward", text("reward")), byTask] : [];
      S.fill(this.form, source, search, training, ending, S.h("div", { class: "row wide" }, S.h("button", { class: "primary" }, "Search"), S.h("button", { type: "button", class: "quiet", on: { click: () => S.go("trajectories", { evaluation: this.source || null }, true) } }, "Clear")));
    }
    submit() {
      const found = Object.fromEntries([...new FormData(this.form)].map(([name, value]) => [name, value.trim()]));
      const changed = (found.evaluation || "") !== this.source;
      for (const name of [...NAMES, "evaluation"]) { if (found[name]) this.parameters[name] = found[name]; else delete this.parameters[name]; }
      if (changed) { delete this.parameters.id; delete this.parameters.answer; this.fields(); this.close(); }
      S.remember(Object.fromEntries([...NAMES, "evaluation"].map((name) => [name, this.parameters[name] || null])));
      this.search();
    }
    async search(cursor = 0, rows = []) {
      const mine = (this.generation += 1), { run } = this, limit = 100;
      const query = this.source ? { run: run.place, evaluation: this.source, text: this.parameters.text, reward: this.parameters.reward, task: this.parameters.task, limit } : { run: run.place, limit, ...Object.fromEntries(NAMES.map((name) => [name, this.parameters[name]])) };
      if (!cursor) this.table(rows, true);
      const first = rows.length;
      try {
        for (;;) {
          const found = await S.ask(this.source ? "answers" : "trajectories", { ...query, cursor, limit: limit - (rows.length - first) || limit });
          if (mine !== this.generation || this.gone) return;
          rows = rows.concat(found.rows);
          const reads = this.parameters.text || this.parameters.tool, looking = reads && !this.source && found.cursor !== null && rows.length - first < limit, reading = !this.source && found.read < found.all;
          this.say(found, rows, looking, reading);
          if (looking) { cursor = found.cursor; this.table(rows, false, null, true); continue; }
          if (reading && !reads && !first) { rows = []; cursor = 0; this.table(found.rows, false, null, true); continue; }
          this.table(rows, false, found.cursor);
          return;
        }
      } catch (error) { if (mine === this.generation) S.fill(this.status, S.h("p", { class: "notice bad" }, error.message)); }
    }
    say(found, rows, looking, reading) {
      const share = looking ? found.looked_at / Math.max(1, found.matching) : reading ? found.read / found.all : null;
      const words = looking ? `searching: ${S.integer(found.looked_at)} of ${S.integer(found.matching)} read, ${S.integer(rows.length)} found` : reading ? `reading the journal: ${S.integer(found.read)} of ${S.integer(found.all)}` : (this.parameters.text || this.parameters.tool) && !this.source ? `${S.plural(rows.length, "trajectory", "trajectories")} found${found.cursor !== null ? " so far" : ""}` : `${S.plural(found.matching, this.source ? "answer" : "trajectory", this.source ? "answers" : "trajectories")}`;
      S.fill(this.status, share !== null ? S.h("progress", { max: 1, value: share, "aria-label": "progress" }) : null, S.h("span", { class: "muted" }, words, S.report ? ` (a sample of the run, ${S.integer(this.run.sampleOf || S.report.runs[this.run.place].num_trajectories)} in all)` : ""),
        looking || reading ? S.h("button", { type: "button", class: "quiet", on: { click: () => { this.generation += 1; S.fill(this.status, S.h("span", { class: "muted" }, "stopped")); } } }, "Stop") : null);
    }
    /** Reads the rows again that had not ended as they were listed. The list keeps its order. */
    async refresh() {
      const { rows, cursor } = this.listed, open = this.source || S.report ? [] : rows.filter((row) => !ENDS.has(row.state)), mine = this.generation;
      if (!open.length || this.refreshing) return;
      this.refreshing = true;
      try {
        const groups = open.map((row) => row.group), found = await S.ask("trajectories", { run: this.run.place, group: `${Math.min(...groups)}..${Math.max(...groups)}`, sort: "oldest", limit: 500 });
        if (mine !== this.generation || this.gone) return;
        const now = new Map(found.rows.map((row) => [row.trajectory, row])), focused = document.activeElement, id = this.results.contains(focused) && focused.dataset.id, { scrollTop } = this.results;
        this.table(rows.map((row) => now.get(row.trajectory) || row), false, cursor);
        this.results.scrollTop = scrollTop;
        if (id) { const row = this.results.querySelector(`tr[data-id="${id}"]`); if (row) row.focus({ preventScroll: true }); }
      } catch { /* the next poll says what is wrong */ } finally { this.refreshing = false; }
    }
    table(rows, waiting, cursor, more) {
      this.listed = { rows: waiting || more ? [] : rows, cursor };
      if (!rows.length) { S.fill(this.results, S.h("p", { class: "empty" }, waiting || more ? "Searching …" : this.source && !S.report ? "No answer fits. Runs that began with an older version of stretto kept no answers." : this.run.state.counts && Object.keys(this.run.state.counts).length ? "No trajectory fits these filters." : "No trajectory has started yet.")); return; }
      const [low, high] = S.rewardBounds(rows.map((row) => row.reward)), training = !this.source;
      const head = training ? [["", "trajectory"], ["num", "update"], ["num hide-open", "version"], ["num hide-narrow", "age"], ["num", "reward"], ["num", "length"], ["hide-narrow hide-open", "state"], ["hide-open hide-narrow", "end of the prompt"], ["", "completion"]] : [["num", "prompt"], ["", "how"], ["num", "reward"], ["num", "length"], ["hide-open hide-narrow", "end of the prompt"], ["", "answer"]];
      const reward = (value) => S.h("td", { class: "num" }, S.h("span", { class: "reward", style: { background: S.shade(value, low, high, (low + high) / 2, 0.3) } }, S.number(value)));
      const line = (row) => {
        const act = () => (training ? this.open(row.trajectory) : this.openAnswer(row.index, Boolean(row.greedy)));
        const selected = training ? row.trajectory === Number(this.parameters.id) : String(row.index) === this.parameters.answer;
        const text = S.h("td", {}, S.h("div", { class: "excerpt mono small" }, row.text || (row.error ? "" : "")), row.error ? S.h("div", { class: "small verdict bad" }, row.error) : null);
        const prompt = S.h("td", { class: "hide-open hide-narrow" }, S.h("div", { class: "excerpt mono small muted" }, row.prompt));
        return S.h("tr", { tabindex: 0, "aria-selected": String(selected), data: { id: training ? row.trajectory : row.index }, on: pressed(null, act) }, training
          ? [S.h("td", {}, row.trajectory), S.h("td", { class: "num" }, row.update ?? "-"), S.h("td", { class: "num hide-open" }, row.version), S.h("td", { class: "num hide-narrow" }, row.age ?? "-"), reward(row.reward), S.h("td", { class: "num" }, `${S.integer(row.length)}${row.finish === "length" ? " cut" : ""}`), S.h("td", { class: "hide-narrow hide-open" }, row.state, row.lineages > 1 ? S.h("div", { class: "small muted" }, `${row.lineages} lineages`) : null), prompt, text]
          : [S.h("td", { class: "num" }, row.index), S.h("td", {}, row.greedy ? "greedy" : "sampled"), reward(row.reward), S.h("td", { class: "num" }, S.integer(row.length)), prompt, text]);
      };
      S.fill(this.results, S.h("table", { class: "data" }, S.h("thead", {}, S.h("tr", {}, head.map(([kind, name]) => S.h("th", { class: kind, scope: "col" }, name)))), S.h("tbody", {}, rows.map(line))),
        cursor !== null && cursor !== undefined ? S.h("p", { class: "row", style: { padding: ".7rem 1rem" } }, S.h("button", { type: "button", on: { click: () => this.search(cursor, rows) } }, "Show more")) : null);
    }
    mark(id) { for (const row of this.results.querySelectorAll("tr[data-id]")) row.setAttribute("aria-selected", String(row.dataset.id === String(id))); }
    close() { S.tip(null, null); this.split.classList.remove("open"); S.fill(this.details); for (const name of ["id", "group_of", "answer", "greedy"]) delete this.parameters[name]; S.remember({ id: null, group_of: null, answer: null, greedy: null }); this.mark(null); }
    async show(kind, parameters, draw) {
      this.split.classList.add("open");
      S.tip(null, null);
      const mine = (this.opening = (this.opening || 0) + 1);
      try { const found = await S.ask(kind, { run: this.run.place, ...parameters }); if (mine !== this.opening || this.gone) return; draw(found); } catch (error) { if (mine === this.opening) S.fill(this.details, S.h("p", { class: "notice bad" }, error.message)); }
      if (innerWidth <= 1180) this.details.scrollIntoView({ block: "start" });
    }
    open(id) { this.parameters.id = id; S.remember({ id, group_of: null, answer: null, greedy: null }); this.mark(id); return this.show("trajectory", { id }, (found) => this.drawTrajectory(found)); }
    openGroup(id) { S.remember({ group_of: id, id: null }); return this.show("group", { id }, (found) => this.drawGroup(found)); }
    openAnswer(index, greedy) { this.parameters.answer = String(index); S.remember({ answer: index, greedy: greedy ? "1" : null, id: null }); this.mark(index); return this.show("answer", { evaluation: this.source, index, greedy: greedy ? "1" : "" }, (found) => this.drawTrajectory(found)); }

    drawTrajectory(t) {
      const answer = t.trajectory === undefined, tokens = S.h("div", { class: "stack" }), scale = S.h("span");
      const ways = S.tokenWays(t.lineages);
      if (!ways.some(([name]) => name === S.tokenWay)) S.tokenWay = "logprob";
      const redraw = () => {
        S.fill(scale, S.tokenScale(t.lineages));
        S.fill(tokens, t.lineages.map((lineage) => S.h("div", { class: "stack", style: { gap: ".5rem" } },
          t.lineages.length > 1 || lineage.context !== null ? S.h("h3", {}, `lineage ${lineage.lineage}: ${S.plural(lineage.num_sampled, "token")}, ${lineage.finish === "length" ? "cut at the limit" : "stopped"}${lineage.train ? "" : ", not trained on"}`) : null,
          lineage.context !== null ? S.h("details", { open: lineage.context.length < 1200 }, S.h("summary", {}, `its own context (${S.plural(lineage.num_context_tokens, "token")})`), S.h("pre", { class: "text" }, lineage.context)) : null,
          S.tokens(lineage, { version: t.version }), lineage.num_tokens > lineage.tokens.length ? S.h("p", { class: "muted small" }, `the first ${S.integer(lineage.tokens.length)} of ${S.integer(lineage.num_tokens)} tokens`) : null)));
      };
      const length = t.lineages.reduce((sum, each) => sum + each.num_sampled, 0), turns = new Set(t.lineages.flatMap((each) => each.turns).filter((turn) => turn >= 0)).size;
      const calls = t.lineages.flatMap((lineage) => lineage.calls.map((call) => [lineage, call])), tools = calls.length ? ["tools", countNames(calls.map(([, call]) => call.name || "unreadable"))] : null;
      const facts = answer ? [["version", t.version], ["reward", S.number(t.reward) + summed(t)], ["length", S.plural(length, "token")], turns > 1 ? ["turns", turns] : null, tools] : [
        ["state", t.state], ["reward", S.number(t.reward) + (t.turn_rewards ? ` = ${t.turn_rewards.map((each) => S.number(each)).join(" + ")}` : summed(t))], ["version", t.version], ["trained at update", t.update === null ? "-" : `${t.update} (age ${t.update - t.version})${t.uses > 1 ? `, and ${S.plural(t.uses - 1, "time")} again` : ""}`],
        ["length", `${S.plural(length, "token")}${t.lineages.some((each) => each.finish === "length") ? ", cut at the limit" : ""}`], turns > 1 ? ["turns", turns] : null, tools, ["instance", t.instance ?? "-"], t.limit ? ["limit reached", t.limit] : null, t.spent !== null ? ["spent", S.number(t.spent)] : null];
      const start = t.admitted_at;
      S.fill(this.details, S.h("div", { class: "card stack" },
        S.h("div", { class: "row title" }, S.h("h2", {}, answer ? `Answer to held-out prompt ${t.index}${t.greedy ? ", greedy" : ""}` : `Trajectory ${t.trajectory}`), S.h("span", { class: "spacer" }),
          answer ? null : S.h("button", { type: "button", on: { click: () => this.openGroup(t.group) } }, `Group ${t.group} side by side`), S.h("button", { type: "button", class: "quiet", "aria-label": "close", on: { click: () => this.close() } }, "✕")),
        S.h("dl", { class: "facts pairs" }, facts.filter(Boolean).map(([name, value]) => [S.h("dt", {}, name), S.h("dd", {}, value)])),
        t.error ? S.h("p", { class: "notice bad" }, t.error) : null,
        S.h("div", {}, S.h("h3", {}, `Prompt (${S.plural(t.num_prompt_tokens, "token")})`), S.h("pre", { class: "text" }, t.prompt)),
        calls.length ? this.calls(calls, t.lineages.length > 1) : null,
        t.lineages.length ? [S.h("div", { class: "row" }, S.h("h3", {}, "Completion"), S.choice("Colour of tokens", ways, S.tokenWay, (way) => { S.tokenWay = way; redraw(); }), scale), tokens] : S.h("p", { class: "empty" }, "It has no tokens yet."),
        !t.has_pieces && t.lineages.length ? S.h("p", { class: "small muted" }, "Tokens are shown by their ids: the run's tokenizer was not found. Name it with `stretto view --tokenizer FOLDER`.", S.h("details", {}, S.h("summary", {}, "text"), S.h("pre", { class: "text" }, t.lineages.map((each) => each.text).join("\n")))) : null,
        !answer && t.lineages.length && !t.lineages.some((each) => each.values) ? S.h("p", { class: "small faint" }, t.update === null ? "It was not trained on yet, so the trainer has no values for it." : "The trainer's values are not recorded: the recipe did not set `observe.tokens`, or the sample had no gradient.") : null,
        answer ? null : S.h("details", {}, S.h("summary", {}, `its life: ${S.plural(t.transitions.length, "change")} of state${t.failures.length ? `, ${S.plural(t.failures.length, "failed attempt")}` : ""}`), S.h("ol", { class: "steps" },
          [...t.transitions.map((each) => [each.at, `${each.from ? `${each.from} → ` : ""}${each.to}${each.reason ? `: ${each.reason}` : ""}`]), ...t.failures.map((each) => [each.at, `${each.kind} failed: ${each.reason}`])].sort((a, b) => a[0] - b[0]).map(([at, words]) => S.h("li", {}, S.h("time", {}, `+${S.seconds(Math.max(0, at - start))}`), S.h("span", {}, words))))),
        S.h("details", {}, S.h("summary", {}, "row of the data set"), S.h("pre", { class: "text" }, pretty(t.row)))));
      redraw();
    }
    /** The tools that a trajectory called: arguments, and what came back. */
    calls(calls, several) {
      const where = (lineage, call) => `${several ? `lineage ${lineage.lineage}, ` : ""}${call.turn === null ? "" : `turn ${call.turn}`}`;
      return S.h("details", { open: calls.length <= 6 }, S.h("summary", {}, S.plural(calls.length, "tool call")), S.h("ol", { class: "calls" }, calls.map(([lineage, call]) => S.h("li", {},
        S.h("div", { class: "row" }, S.h("b", { class: "mono" }, call.name || "unreadable"), S.h("span", { class: "small muted" }, where(lineage, call))),
        S.h("pre", { class: "text" }, call.arguments), call.error ? S.h("p", { class: "small verdict bad" }, call.error) : null,
        call.result !== null ? [S.h("p", { class: "small muted" }, "returned"), S.h("pre", { class: "text" }, call.result)] : null))));
    }
    drawGroup(found) {
      const rewards = found.members.map((each) => each.reward), [low, high] = S.rewardBounds(rewards), known = rewards.filter((each) => each !== null);
      const mean = known.reduce((a, b) => a + b, 0) / Math.max(1, known.length);
      S.fill(this.details, S.h("div", { class: "card stack" },
        S.h("div", { class: "row title" }, S.h("h2", {}, `Group ${found.group}`), S.h("span", { class: "muted" }, `${found.task ? `task ${found.task}, ` : ""}version ${found.version}, due by update ${found.deadline}, mean reward ${known.length ? S.number(mean) : "-"}`), S.h("span", { class: "spacer" }), S.h("button", { type: "button", class: "quiet", "aria-label": "close", on: { click: () => this.close() } }, "✕")),
        S.h("pre", { class: "text" }, found.prompt),
        S.h("div", { class: "members" }, found.members.map((each) => S.h("article", {}, S.h("div", { class: "row" }, S.h("a", { href: "#", on: { click: (event) => { event.preventDefault(); this.open(each.trajectory); } } }, `Trajectory ${each.trajectory}`), S.h("span", { class: "spacer" }), S.h("span", { class: "reward", style: { background: S.shade(each.reward, low, high, (low + high) / 2, 0.3) } }, S.number(each.reward))),
          S.h("div", { class: "small muted" }, `${each.state}, ${S.plural(each.length, "token")}${each.finish === "length" ? ", cut" : ""}${each.update !== null ? `, update ${each.update}` : ""}${each.reward_parts ? `; reward${summed(each)}` : ""}`), each.error ? S.h("p", { class: "small verdict bad" }, each.error) : null,
          each.texts.length ? each.texts.map((text) => S.h("pre", { class: "text" }, text)) : S.h("p", { class: "muted small" }, "no tokens yet")))),
        found.num_members > found.members.length ? S.h("p", { class: "muted small" }, `the first ${found.members.length} of ${found.num_members}`) : null));
    }
  }
  /** The weighted sum that a reward of several parts is. */
  function summed(t) { return t.reward_parts ? ` = ${t.reward_parts.map(({ name, weight, value }) => (value === null ? `${name} (does not apply)` : `${S.number(weight)} · ${name} ${S.number(value)}`)).join(" + ")}` : ""; }
  function countNames(names) { const counts = new Map(); for (const name of names) counts.set(name, (counts.get(name) || 0) + 1); return [...counts].map(([name, count]) => (count > 1 ? `${name} x ${count}` : name)).join(", "); }
  function pretty(text) { try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return String(text); } }
  S.rewardBounds = function (rewards) { const known = rewards.filter((value) => value !== null && value !== undefined); return known.length ? [Math.min(...known, 0), Math.max(...known, 1)] : [0, 1]; };

  S.trajectories = {
    title: "Trajectories",
    show(main, run, parameters) { const view = new Trajectories(main, run, parameters); S.trajectoriesView = view; return { draw: () => view.refresh(), key: (key) => { if (key === "/") { view.form.elements.text.focus(); return true; } if (key === "Escape") { view.close(); return true; } return false; }, close: () => { view.gone = true; } }; },
  };
})(window.stretto);
