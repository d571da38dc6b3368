// The timeline: a lane for each version and instance, the trainer's updates and waits, publishes, evaluations and moves.
"use strict";
(function (S) {
  const LEFT = 118, RIGHT = 12, AXIS = 26, GAP = 18, TRAINER = 30, EVALUATION = 14, MOVES = 14, CLOSED = 12, LEAST = 5; // pixels; of a lane at least
  const STATES = ["waiting", "running", "scoring", "scored", "training", "trained", "failed", "filtered", "dropped"];

  class Timeline {
    constructor(run, card, words) {
      this.run = run; this.card = card; this.words = words;
      this.canvas = S.h("canvas", { tabindex: 0, role: "img", "aria-label": "timeline; arrow keys move, plus and minus zoom, 0 shows the whole run, N and P go to the next and previous update" });
      this.window = null; this.follow = true; this.answer = null; this.versions = null; this.instances = null; this.areas = [];
      this.pending = null; this.drag = null; this.select = null;
      this.listen();
      this.width = 0; // as it was asked for: a drawing changes the height alone, and needs no other answer
      this.observer = new ResizeObserver(() => { if (this.canvas.clientWidth === this.width) return; this.width = this.canvas.clientWidth; this.draw(); this.ask(); });
      this.observer.observe(this.canvas);
    }
    span() { const [begin, end] = this.run.span(); const slack = (this.clock(end) - this.clock(begin)) * 0.01; return [begin - slack, end + slack]; }
    /** A time on the clock of the axis, on which pauses are short; and back. Windows, updates and trajectories have usual times. */
    clock(at) { return S.squeezed(at, this.run.state.pauses); }
    unclock(time) { return S.stretched(time, this.run.state.pauses); }
    /** The window, or what it is in whole, on the clock of the axis. */
    clocked() { return this.range().map((at) => this.clock(at)); }
    setClocked(from, to) { this.set(this.unclock(from), this.unclock(to)); }
    range() { return this.window || this.span(); }
    set(from, to) {
      const [begin, end] = this.span().map((at) => this.clock(at)), least = 0.02;
      const width = Math.max(least, this.clock(to) - this.clock(from));
      if (width >= end - begin) { this.window = null; this.follow = true; this.changed(); return; }
      const start = Math.min(Math.max(this.clock(from), begin), end - width);
      this.follow = start + width >= end - 1e-6;
      this.window = [this.unclock(start), this.unclock(start + width)];
      this.changed();
    }
    changed() { this.draw(); this.ask(); this.describe(); S.remember(this.window ? { from: this.window[0].toFixed(3), to: this.window[1].toFixed(3) } : { from: null, to: null }); }
    zoom(factor, at) { const [from, to] = this.clocked(), middle = at === undefined ? (from + to) / 2 : this.clock(at); this.setClocked(middle - (middle - from) * factor, middle + (to - middle) * factor); }
    pan(share) { const [from, to] = this.clocked(), by = (to - from) * share; this.setClocked(from + by, to + by); }
    toUpdate(update) {
      const u = this.run.curves.updates, place = u.update.indexOf(update);
      if (place < 0) return;
      const before = place ? u.finished_at[place - 1] : u.taken_at[0] - (u.finished_at[0] - u.taken_at[0]);
      const [start, end] = [Math.max(before, ...this.run.state.pauses.map((pause) => pause[1]).filter((at) => at <= u.taken_at[place])), u.finished_at[place]].map((at) => this.clock(at)), width = end - start;
      this.setClocked(start - 0.15 * width, end + 0.15 * width);
    }
    current() { const u = this.run.curves.updates, [from, to] = this.clocked(), middle = this.unclock((from + to) / 2); let best = -1; u.finished_at.forEach((at, place) => { if (best < 0 || Math.abs((u.taken_at[place] + at) / 2 - middle) < Math.abs((u.taken_at[best] + u.finished_at[best]) / 2 - middle)) best = place; }); return best < 0 ? null : u.update[best]; }

    // -- data ---------------------------------------------------------------------------------------------------------
    /** Asks for the lanes of the window; at most one question at a time, and the newest last. */
    ask() {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.askNow(), 60);
    }
    async askNow() {
      if (this.busy) { this.again = true; return; }
      const width = this.canvas.clientWidth - LEFT - RIGHT;
      if (width < 50 || this.closed) return;
      this.busy = true;
      const [from, to] = this.range(), [, end] = this.run.span();
      try {
        this.answer = await S.ask("timeline", { run: this.run.place, from, to, now: end, bins: Math.min(1600, Math.max(100, Math.round(width / (this.run.active(from, to) > 3600 ? 2 : 1.5)))), version_rows: this.rows(0.55), instance_rows: this.rows(0.42), versions: this.versions, instances: this.instances });
        this.error = null;
      } catch (error) { this.error = error.message; }
      this.busy = false;
      this.draw(); this.describe();
      if (this.again || (this.answer && this.answer.read < this.answer.all)) { this.again = false; this.ask(); }
    }
    /** Rows that fit in a share of the room. */
    rows(share) { return Math.max(20, Math.min(120, Math.floor((this.room() * share) / LEAST))); }
    describe() {
      const [from, to] = this.range(), [begin] = this.run.span(), a = this.answer;
      const parts = [`${S.seconds(Math.max(0, this.run.active(begin, from)))} to ${S.seconds(this.run.active(begin, to))} (${S.seconds(this.run.active(from, to))})`];
      const lanes = (each, word) => `${each.at_most ? "at most " : ""}${S.plural(each.lanes, word)}`;
      if (a) {
        parts.push(`${S.plural(a.count, "trajectory", "trajectories")}, ${lanes(a.versions, "version")}, ${lanes(a.instances, "instance")}, ${S.plural(a.moves.count, "move")}`);
        if (a.read < a.all) parts.push(`reading: ${S.integer(a.read)} of ${S.integer(a.all)} trajectories`);
      }
      this.words.textContent = this.error || parts.join("  ·  ");
    }

    // -- drawing ------------------------------------------------------------------------------------------------------
    /** The place of a time, as of the last drawing: `frame` has what every place needs. */
    x(at) { return this.clockedX(this.clock(at)); }
    clockedX(time) { const { from, scale } = this.frame; return LEFT + (time - from) * scale; }
    time(x) { const { from, scale } = this.frame; return this.unclock(from + (x - LEFT) / scale); }
    setFrame() { const [from, to] = this.clocked(); this.frame = { from, scale: (this.canvas.clientWidth - LEFT - RIGHT) / (to - from) }; }
    /** Pixels for the lanes of versions and instances: what is left of the window. */
    room() { return Math.max(220, innerHeight - 330); }
    heights() {
      const a = this.answer, rows = a ? a.versions.rows.length : 0, instances = a ? a.instances.rows.length : 0;
      const room = this.room(), share = instances > 1 ? 0.55 : Math.min(0.8, Math.max(0.5, rows / (rows + instances + 1e-9)));
      const lane = (count, part, most) => (count ? Math.max(LEAST, Math.min(most, Math.floor((room * part) / count))) : 0);
      // Few lanes may be high. Trajectories one by one need no more lines than there are.
      const most = (kind) => (a && a.bars ? Math.max(34, Math.ceil((9.5 * a.bars.length) / Math.max(1, a[kind].rows.length) + 4)) : 90);
      const version = lane(rows, share, most("versions")), instance = lane(instances, 1 - (version * rows) / room, most("instances"));
      return { version, instance, rows, instances };
    }
    draw() {
      if (!this.canvas.isConnected || !this.canvas.clientWidth) return;
      const h = this.heights(), moves = this.answer && this.answer.moves.count ? MOVES + 6 : 0, evaluations = this.run.curves.evaluations.some((each) => each.seconds > 0) ? EVALUATION + 6 : 0, closed = this.answer && this.answer.closed ? CLOSED + 6 : 0;
      const height = AXIS + TRAINER + closed + evaluations + moves + GAP + h.version * h.rows + (h.rows ? GAP : 0) + h.instance * h.instances + 16 + (h.rows ? 0 : 60);
      const [g, width] = S.canvas(this.canvas, height);
      this.setFrame();
      this.areas = [];
      this.axis(g, width, height);
      g.save(); g.beginPath(); g.rect(LEFT, 0, width - LEFT - RIGHT, height); g.clip();
      this.publishes(g, height);
      g.restore();
      let y = this.trainer(g, width, AXIS);
      if (closed) y = this.withoutAdmission(g, width, y + 6);
      if (evaluations) y = this.evaluations(g, width, y + 6);
      if (moves) y = this.moves(g, width, y + 6);
      y += GAP;
      if (!this.answer) { this.label(g, "", y + 20); g.fillStyle = S.colour("muted"); g.fillText("reading …", LEFT + 10, y + 24); return; }
      if (!h.rows) { g.fillStyle = S.colour("muted"); g.textAlign = "left"; g.fillText("No trajectory ran in this window.", LEFT + 10, y + 24); return; }
      y = this.lanes(g, width, y, h.version, "versions");
      this.lanes(g, width, y + GAP, h.instance, "instances");
      this.breaks(g, width, height);
      if (this.select) { const [a, b] = [this.x(this.select[0]), this.x(this.select[1])]; g.fillStyle = `${S.colour("accent")}26`; g.fillRect(Math.min(a, b), AXIS, Math.abs(b - a), height - AXIS); }
    }
    axis(g, width, height) {
      const [from, to] = this.range(), [begin] = this.run.span();
      g.fillStyle = S.colour("faint"); g.strokeStyle = S.colour("line-soft"); g.textAlign = "center"; g.textBaseline = "alphabetic"; g.lineWidth = 1;
      const none = this.run.state.pauses.map(([start, end]) => [start, end, 0]);
      const [marks, step] = S.timeTicks(this.run.active(begin, from), this.run.active(begin, to), Math.max(2, Math.floor((width - LEFT) / 110)));
      for (const value of marks) {
        const x = Math.round(this.x(S.stretched(begin + value, none))) + 0.5, label = S.moment(value, step), half = g.measureText(label).width / 2;
        if (value < 0 || x < LEFT || x > width - RIGHT) continue;
        g.beginPath(); g.moveTo(x, AXIS - 6); g.lineTo(x, height); g.stroke();
        g.fillText(label, Math.min(Math.max(x, LEFT + half), width - half - 2), AXIS - 10);
      }
    }
    /** Pauses between sessions, as narrow breaks across all lanes. */
    breaks(g, width, height) {
      for (const [start, end] of this.run.state.pauses) {
        const x0 = Math.max(LEFT, this.x(start)), x1 = Math.min(width - RIGHT, this.x(end)), words = `stopped for ${S.seconds(end - start)}`;
        if (x1 <= x0) continue;
        g.fillStyle = S.colour("card"); g.fillRect(x0, AXIS, Math.max(1.5, x1 - x0), height - AXIS);
        g.strokeStyle = S.colour("faint"); g.lineWidth = 1; g.setLineDash([4, 3]);
        for (const x of [x0, x1]) { g.beginPath(); g.moveTo(Math.round(x) + 0.5, AXIS); g.lineTo(Math.round(x) + 0.5, height); g.stroke(); }
        g.setLineDash([]);
        if (x1 - x0 >= 12 && g.measureText(words).width < height - AXIS - 8) { g.save(); g.translate((x0 + x1) / 2, (AXIS + height) / 2); g.rotate(-Math.PI / 2); g.fillStyle = S.colour("muted"); g.textAlign = "center"; g.textBaseline = "middle"; g.fillText(words, 0, 0); g.restore(); }
        this.areas.push({ x: x0 - 1, y: AXIS, w: Math.max(3, x1 - x0 + 2), h: height - AXIS, tip: () => [[words], ["from", S.date(start)], ["to", S.date(end)]] });
      }
    }
    label(g, words, y, strong) { g.fillStyle = S.colour(strong ? "text" : "muted"); g.textAlign = "right"; g.textBaseline = "middle"; g.fillText(words, LEFT - 10, y); }
    publishes(g, height) {
      const { versions } = this.run.curves, [from, to] = this.range(), seen = versions.filter(([, at]) => at >= from && at <= to);
      if (seen.length > 80) return;
      g.strokeStyle = `${S.colour("s2")}66`; g.setLineDash([2, 3]); g.lineWidth = 1;
      for (const [, at] of seen) { const x = Math.round(this.x(at)) + 0.5; g.beginPath(); g.moveTo(x, AXIS); g.lineTo(x, height); g.stroke(); }
      g.setLineDash([]);
    }
    trainer(g, width, y) {
      const u = this.run.curves.updates, [from, to] = this.range();
      this.label(g, "trainer", y + TRAINER / 2, true);
      g.save(); g.beginPath(); g.rect(LEFT, y, width - LEFT - RIGHT, TRAINER); g.clip();
      g.fillStyle = S.colour("sunk"); g.fillRect(LEFT, y, width - LEFT - RIGHT, TRAINER);
      g.textAlign = "center"; g.textBaseline = "middle";
      const last = (a) => Math.max(a, 0);
      u.update.forEach((update, place) => {
        const start = u.taken_at[place], end = u.finished_at[place];
        if (end < from || start > to) { if (!(start - last(u.trainer_idle_seconds[place] || 0) <= to && start >= from)) return; }
        const idle = u.trainer_idle_seconds[place] || 0, x0 = this.x(start), x1 = this.x(end);
        if (idle > 0 && this.x(start) - this.x(start - idle) >= 1) { this.hatch(g, this.x(start - idle), y, x0 - this.x(start - idle), TRAINER); this.areas.push({ x: this.x(start - idle), y, w: x0 - this.x(start - idle), h: TRAINER, tip: () => [["trainer idle", S.seconds(idle)], ["before update", update], [this.run.curves.waited_for[update] || "no reason was noted: it was shorter than the half second between two looks"]] }); }
        g.fillStyle = S.series(update % 2 ? 5 : 0); g.globalAlpha = update % 2 ? 0.75 : 0.95;
        g.fillRect(x0, y + 2, Math.max(0.75, x1 - x0 - 0.5), TRAINER - 4); g.globalAlpha = 1;
        const [left, right] = [Math.max(x0, LEFT), Math.min(x1, width - RIGHT)];
        if (right - left > 24) { g.fillStyle = S.colour("on-accent"); g.fillText(right - left > 64 ? `update ${update}` : update, (left + right) / 2, y + TRAINER / 2); }
        this.areas.push({ x: x0, y, w: Math.max(2, x1 - x0), h: TRAINER, update, tip: () => [["update", update], ["took", S.seconds(u.update_seconds[place] ?? end - start)], ["reward", S.number(u.reward_mean[place])], ["tokens", S.integer(u.tokens[place])], ["age, mean and oldest", `${S.number(u.staleness_mean[place], 2)}, ${S.number(u.staleness_max[place])}`], ["trainer idle before", S.seconds(u.trainer_idle_seconds[place])]] });
      });
      const { training } = this.run.state, t = training && [training.update, training.since];
      if (t && this.run.state.condition === "running") { const x0 = this.x(t[1]), x1 = this.x(this.run.span()[1]); g.fillStyle = S.series(1); g.globalAlpha = 0.8; g.fillRect(x0, y + 2, Math.max(1, x1 - x0), TRAINER - 4); g.globalAlpha = 1; this.areas.push({ x: x0, y, w: Math.max(2, x1 - x0), h: TRAINER, tip: () => [["update", t[0]], ["trains since", S.clock(t[1])]] }); }
      g.restore();
      return y + TRAINER;
    }
    hatch(g, x, y, w, h) {
      g.save(); g.beginPath(); g.rect(x, y + 2, w, h - 4); g.clip(); g.strokeStyle = S.colour("faint"); g.globalAlpha = 0.65; g.lineWidth = 1;
      const left = Math.max(x, LEFT - h), right = Math.min(x + w, this.canvas.clientWidth);
      for (let at = left - (left % 6) - h; at < right; at += 6) { g.beginPath(); g.moveTo(at, y + h); g.lineTo(at + h, y); g.stroke(); }
      g.restore();
    }
    /** The times in which no group could start, with the reason that the run recorded. */
    withoutAdmission(g, width, y) {
      this.label(g, "no new groups", y + CLOSED / 2);
      g.fillStyle = S.colour("faint");
      let before = LEFT - 1;
      for (const [start, end, reason] of this.answer.closed) {
        const x0 = Math.max(LEFT, this.x(start)), x1 = Math.min(width - RIGHT, this.x(end));
        if (x1 <= x0 || x1 < before + 0.5) continue;
        g.globalAlpha = 0.55; g.fillRect(x0, y + 2, Math.max(0.75, x1 - x0 - 0.5), CLOSED - 4);
        before = x1;
        this.areas.push({ x: x0, y, w: Math.max(2, x1 - x0), h: CLOSED, tip: () => [["no group could start for", S.seconds(end - start)], [reason], ["the run looks twice a second"]] });
      }
      g.globalAlpha = 1;
      return y + CLOSED;
    }
    evaluations(g, width, y) {
      this.label(g, "evaluations", y + EVALUATION / 2);
      for (const each of this.run.curves.evaluations) {
        if (!each.seconds) continue;
        const x0 = Math.max(LEFT, this.x(each.at - each.seconds)), x1 = Math.min(width - RIGHT, this.x(each.at));
        if (x1 < LEFT || x0 > width - RIGHT) continue;
        g.fillStyle = S.series(3); g.globalAlpha = 0.8; g.fillRect(x0, y + 2, Math.max(1.5, x1 - x0), EVALUATION - 4); g.globalAlpha = 1;
        this.areas.push({ x: x0, y, w: Math.max(4, x1 - x0), h: EVALUATION, tip: () => [[`evaluation of version`, each.version], ["score", S.number(each.score)], ["prompts", S.integer(each.num)], ["took", S.seconds(each.seconds)]] });
      }
      return y + EVALUATION;
    }
    moves(g, width, y) {
      const { moves } = this.answer;
      this.label(g, "moves", y + MOVES / 2);
      g.fillStyle = S.series(1);
      if (moves.moves) for (const [at, trajectory, version, source, target, context, bytes, prefilled, reason] of moves.moves) {
        const x = this.x(at);
        if (x < LEFT || x > width - RIGHT) continue;
        g.fillRect(x - 0.75, y, 1.5, MOVES);
        this.areas.push({ x: x - 3, y, w: 6, h: MOVES, trajectory, tip: () => [["trajectory", trajectory], ["version", version], ["instance", `${source ?? "none"} to ${target}`], ["context", `${S.integer(context)} tokens`], bytes ? ["KV taken along", S.bytes(bytes)] : ["prefilled again", `${S.integer(prefilled)} tokens`], [reason]] });
      } else {
        const peak = moves.bins.reduce((most, [, count]) => Math.max(most, count), 1), begin = this.clock(this.answer.from), w = (this.clock(this.answer.to) - begin) / this.answer.bins;
        for (const [bin, count, wide = 1] of moves.bins) { const size = MOVES * (0.2 + 0.8 * count / peak), left = Math.max(LEFT, this.clockedX(begin + bin * w)), right = Math.min(width - RIGHT, this.clockedX(begin + (bin + wide) * w)); if (right > left) g.fillRect(left, y + MOVES - size, Math.max(1, right - left), size); }
      }
      return y + MOVES;
    }
    lanes(g, width, y, height, kind) {
      const a = this.answer, { rows, peak } = a[kind], begin = this.clock(a.from), scale = (this.clock(a.to) - begin) / a.bins, version = kind === "versions";
      if (!rows.length) return y;
      const top = y;
      g.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      const every = Math.max(1, Math.ceil(13 / height));
      rows.forEach((row, place) => {
        const name = row.from === row.to ? `${version ? "version" : "instance"} ${row.from}` : `${version ? "v" : "i"} ${row.from}–${row.to}`;
        if (place % every === 0) this.label(g, name, y + Math.max(height, 10) / 2, version && row.from === this.run.state.newest);
        g.save(); g.beginPath(); g.rect(LEFT, y, width - LEFT - RIGHT, height); g.clip();
        if (height > 8) { g.fillStyle = S.colour("sunk"); g.globalAlpha = 0.6; g.fillRect(LEFT, y + 0.5, width - LEFT - RIGHT, height - 1); g.globalAlpha = 1; }
        const colour = version ? S.series([0, 2, 4, 3][(row.from === row.to ? row.from : place) % 4]) : S.series(6);
        const bars = a.bars && height >= 14 ? a.bars.filter((bar) => bar[version ? 1 : 2] >= row.from && bar[version ? 1 : 2] <= row.to) : null;
        if (bars) this.bars(g, bars, y, height, colour, version); else {
          g.fillStyle = colour;
          const own = Math.max(...row.values, 1e-9), most = version ? peak : own;
          row.values.forEach((value, offset) => {
            if (value <= 0) return;
            const at = begin + (row.first + offset) * scale, x0 = this.clockedX(at), x1 = this.clockedX(at + scale);
            if (x1 < LEFT || x0 > width) return;
            const share = Math.max(0.06, value / most), size = height > 8 ? Math.max(1.5, (height - 3) * share) : height - 0.6;
            g.globalAlpha = height > 8 ? 0.85 : 0.25 + 0.75 * share;
            g.fillRect(x0, y + height - size - (height > 8 ? 1 : 0), Math.max(1, x1 - x0 + 0.4), size);
          });
          g.globalAlpha = 1;
        }
        g.restore();
        this.areas.push({ x: LEFT, y, w: width - LEFT - RIGHT, h: height, back: true, row, kind, tip: (at) => this.laneTip(row, kind, name, at, scale) });
        this.areas.push({ x: 0, y, w: LEFT, h: height, back: true, row, kind, narrow: row.from !== row.to && !S.report, tip: () => (row.from !== row.to && !S.report ? `${name}: click to see these lanes alone` : row.count === null ? name : `${name}: ${S.plural(row.count, "trajectory", "trajectories")} in this window`) });
        y += height;
      });
      g.strokeStyle = S.colour("line"); g.beginPath(); g.moveTo(LEFT - 0.5, top); g.lineTo(LEFT - 0.5, y); g.stroke();
      return y;
    }
    /** Draws trajectories one by one, each on the first line of its lane that is free. */
    bars(g, bars, y, height, colour, version) {
      const free = [], placed = [];
      for (const bar of [...bars].sort((a, b) => a[3] - b[3])) { let line = free.findIndex((end) => end <= bar[3]); if (line < 0) { line = free.length; free.push(0); } free[line] = bar[4]; placed.push([bar, line]); }
      const thick = Math.min(9, (height - 3) / Math.max(1, free.length));
      for (const [bar, line] of placed) {
        const [id, v, instance, start, end, reward, state] = bar, x0 = this.x(start), x1 = this.x(end);
        g.fillStyle = STATES[state] === "failed" || STATES[state] === "dropped" ? S.colour("bad") : version ? colour : S.series([0, 2, 4, 3][v % 4]);
        g.globalAlpha = STATES[state] === "running" ? 0.5 : 0.85;
        g.fillRect(x0, y + 1.5 + line * thick, Math.max(1, x1 - x0), Math.max(0.8, thick - (thick > 2.5 ? 1 : 0.2)));
        this.areas.push({ x: x0 - 1, y: y + 1 + line * thick, w: Math.max(3, x1 - x0 + 2), h: Math.max(2, thick), trajectory: id, tip: () => [["trajectory", id], ["version", v], ["instance", instance < 0 ? "-" : instance], ["generated for", S.seconds(end - start)], ["reward", S.number(reward)], ["state", STATES[state]], ["click to read it"]] });
      }
      g.globalAlpha = 1;
    }
    laneTip(row, kind, name, at, scale) {
      const bin = Math.floor((this.clock(at) - this.clock(this.answer.from)) / scale) - row.first, value = row.values[bin] || 0;
      const lines = [[name], ["running here", `${S.number(value, 2)} on average`], row.count === null ? null : ["in this window", S.plural(row.count, "trajectory", "trajectories")]];
      if (kind === "instances" && !value) lines.push(...this.idle(at));
      return lines;
    }
    /** Why an instance has nothing to do at a moment: what the run recorded, else what happened at the same time, which may be the reason. */
    idle(at) {
      if (this.run.state.pauses.some(([start, end]) => at > start && at < end)) return [["idle", "the run was stopped"]];
      const closed = (this.answer.closed || []).find(([start, end]) => at >= start && at <= end);
      if (closed) return [["idle", "no group could start"], [closed[2]]];
      const u = this.run.curves.updates, evaluation = this.run.curves.evaluations.find((each) => each.seconds && at >= each.at - each.seconds && at <= each.at);
      const place = u.taken_at.findIndex((start, index) => at >= start && at <= u.finished_at[index]);
      const meanwhile = evaluation ? `version ${evaluation.version} was evaluated` : place >= 0 ? `update ${u.update[place]} was training` : null;
      return [["idle", this.answer.closed ? "groups could start; none was placed here" : "no reason is recorded"], meanwhile ? ["meanwhile", meanwhile] : null];
    }

    // -- the pointer and the keys ---------------------------------------------------------------------------------------
    hit(x, y) {
      const inside = this.areas.filter((each) => x >= each.x && x <= each.x + each.w && y >= each.y && y <= each.y + each.h);
      return inside.filter((each) => !each.back).at(-1) || inside.at(-1);
    }
    listen() {
      const { canvas } = this;
      canvas.addEventListener("wheel", (event) => { event.preventDefault(); if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / 900); else this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), this.time(Math.max(LEFT, event.offsetX))); }, { passive: false });
      canvas.addEventListener("pointerdown", (event) => { if (event.button) return; canvas.setPointerCapture(event.pointerId); this.drag = { x: event.offsetX, range: this.clocked(), moved: false, select: event.shiftKey }; canvas.focus({ preventScroll: true }); });
      canvas.addEventListener("pointermove", (event) => {
        if (this.drag) {
          const by = event.offsetX - this.drag.x;
          if (Math.abs(by) > 3) this.drag.moved = true;
          if (!this.drag.moved) return;
          S.tip(event, null);
          if (this.drag.select) { canvas.classList.add("selecting"); this.select = [this.time(this.drag.x), this.time(event.offsetX)]; this.draw(); return; }
          canvas.classList.add("dragging");
          const [from, to] = this.drag.range, step = ((to - from) * by) / (canvas.clientWidth - LEFT - RIGHT);
          if (this.window) this.setClocked(from - step, to - step);
          return;
        }
        const area = this.hit(event.offsetX, event.offsetY);
        canvas.style.cursor = area && (area.trajectory !== undefined || area.narrow || area.update !== undefined) ? "pointer" : "";
        S.tip(event, area ? area.tip(this.time(event.offsetX)) : null);
      });
      canvas.addEventListener("pointerup", (event) => {
        const { drag } = this;
        this.drag = null;
        canvas.classList.remove("dragging", "selecting");
        if (this.select) { const [a, b] = this.select; this.select = null; this.set(Math.min(a, b), Math.max(a, b)); return; }
        if (!drag || drag.moved) return;
        const area = this.hit(event.offsetX, event.offsetY);
        if (!area) return;
        if (area.trajectory !== undefined) { S.tip(event, null); S.go("trajectories", { id: area.trajectory }); } else if (area.update !== undefined) this.toUpdate(area.update); else if (area.narrow) { this[area.kind] = `${area.row.from}..${area.row.to}`; this.ask(); }
      });
      canvas.addEventListener("pointerleave", (event) => S.tip(event, null));
      canvas.addEventListener("keydown", (event) => { if (this.key(event.key)) event.preventDefault(); });
    }
    key(key) {
      const step = { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), 0: () => this.whole(), Home: () => this.whole(), n: () => this.toUpdate((this.current() ?? -1) + 1), p: () => this.toUpdate((this.current() ?? 1) - 1) }[key];
      if (!step) return false;
      step();
      return true;
    }
    whole() { this.versions = this.instances = null; this.window = null; this.follow = true; this.changed(); }
    /** New data has come: keeps the end of the run in sight if it was. */
    updated() {
      if (this.window && this.follow) { const [from, to] = this.clocked(), end = this.clock(this.span()[1]); this.window = [this.unclock(end - (to - from)), this.unclock(end)]; }
      this.draw(); this.describe(); this.ask();
    }
  }

  S.timeline = {
    title: "Timeline",
    show(main, run, parameters) {
      if (!run.curves.updates.update.length && !run.curves.versions.length) { S.fill(main, S.h("p", { class: "empty" }, "The run has done nothing yet. Its lanes appear with its first group.")); return { draw() { if (run.curves.versions.length) S.route(); } }; }
      const words = S.h("p", { class: "muted small", role: "status" }), card = S.h("section", { class: "card lanes" });
      const view = new Timeline(run, card, words);
      if (parameters.from && parameters.to) view.window = [Number(parameters.from), Number(parameters.to)];
      const wanted = S.h("input", { type: "text", inputMode: "numeric", size: 6, placeholder: "update", "aria-label": "go to update", on: { keydown: (event) => { if (event.key === "Enter") view.toUpdate(Number(event.target.value)); } } });
      const legend = S.h("div", { class: "legend" },
        [[0, "update"], [3, "evaluation"], [1, "move"]].map(([place, text]) => S.h("span", {}, S.h("i", { class: "swatch", style: { background: S.series(place) } }), text)),
        S.h("span", {}, "hatched: trainer idle"), S.h("span", {}, "dotted line: a version is published"), S.h("span", {}, "height of a lane: trajectories running"));
      const last = (share) => { const [begin, end] = view.span().map((at) => view.clock(at)); view.setClocked(end - (end - begin) * share, end); };
      S.fill(main, S.h("div", { class: "stack" },
        S.h("div", { class: "row" }, S.h("button", { type: "button", on: { click: () => view.whole() } }, "Whole run"), S.h("button", { type: "button", on: { click: () => last(0.1) } }, "Last tenth"),
          S.h("button", { type: "button", "aria-label": "zoom in", on: { click: () => view.zoom(0.5) } }, "+"), S.h("button", { type: "button", "aria-label": "zoom out", on: { click: () => view.zoom(2) } }, "−"), wanted,
          S.h("button", { type: "button", on: { click: () => view.toUpdate((view.current() ?? 1) - 1) } }, "‹ Update"), S.h("button", { type: "button", on: { click: () => view.toUpdate((view.current() ?? -1) + 1) } }, "Update ›"), words),
        S.fill(card, view.canvas), legend, S.h("p", { class: "small faint" }, "Wheel zooms, drag moves, shift and drag selects. Click an update to zoom to it, a trajectory to read it, a name that stands for several lanes to see these alone. Keys: arrows, +, −, 0, N, P.")));
      view.draw(); view.ask(); view.describe();
      S.timelineView = view;
      return { draw: () => view.updated(), key: (key) => view.key(key), close: () => { view.closed = true; view.observer.disconnect(); S.timelineView = null; } };
    },
  };
})(window.stretto);
