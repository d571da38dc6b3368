// The frame of the page: the head, the choice of a view and a run by the address, the keys.
"use strict";
(function (S) {
  const VIEWS = { overview: S.overview, timeline: S.timeline, trajectories: S.trajectories, compare: S.compare };
  const head = document.getElementById("head"), main = document.getElementById("main");
  let shown = null, place = 0, view = "overview", drawn = null, routing = false; // while a view waits for its data

  function address() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    return [path in VIEWS ? path : "overview", Object.fromEntries(new URLSearchParams(query || ""))];
  }
  function href(name, parameters) {
    const query = new URLSearchParams(Object.entries({ run: place || null, ...parameters }).filter(([, value]) => value !== null && value !== undefined && value !== ""));
    return `#/${name}${[...query].length ? `?${query}` : ""}`;
  }
  S.go = function (name, parameters = {}, fresh) { const next = href(name, parameters); if (location.hash === next || fresh) { history.replaceState(null, "", next); S.route(); } else location.hash = next; };
  /** Keeps parameters of the view in the address, without a new page in the history. */
  S.remember = function (parameters) { const [name, found] = address(); history.replaceState(null, "", href(name, { ...found, ...parameters })); };

  function mark() { const svg = "http://www.w3.org/2000/svg", made = document.createElementNS(svg, "svg"); made.setAttribute("viewBox", "0 0 32 32"); made.setAttribute("aria-hidden", "true"); const box = document.createElementNS(svg, "rect"); for (const [name, value] of Object.entries({ width: 32, height: 32, rx: 7, fill: "#0b5c8f" })) box.setAttribute(name, value); const path = document.createElementNS(svg, "path"); for (const [name, value] of Object.entries({ d: "M5 9h12M9 16h14M13 23h14", stroke: "#fff", "stroke-width": 4, "stroke-linecap": "round" })) path.setAttribute(name, value); made.append(box, path); return made; }

  function drawHead() {
    const run = S.runs[place], state = run && run.state;
    const condition = run && run.error ? "unreadable" : state ? state.condition : "";
    const choice = S.runs.length > 1 ? S.h("select", { "aria-label": "run", on: { change: (event) => { place = Number(event.target.value); S.go(view, { run: place || null }, true); } } }, S.listed.map((each, index) => S.h("option", { value: index, selected: index === place }, each.name))) : S.h("b", { class: "folder" }, S.listed[0].name);
    S.fill(head, S.h("div", { class: "bar" }, S.h("div", { class: "brand" }, mark(), S.h("span", {}, "stretto")), S.h("nav", { "aria-label": "views" }, Object.entries(VIEWS).map(([name, each], index) => S.h("a", { href: href(name), title: `key ${index + 1}`, "aria-current": name === view ? "page" : null }, each.title))), S.h("span", { class: "spacer" }),
      S.h("div", { class: "headline" }, view === "compare" ? S.h("span", {}, S.plural(S.runs.length, "run")) : [choice, condition ? S.h("span", { class: `pill ${condition}` }, condition) : null, state && state.updates ? [S.h("progress", { max: state.updates, value: state.updates_done, "aria-label": "updates done" }), S.h("span", { class: "count" }, `${S.integer(state.updates_done)} / ${S.integer(state.updates)}`)] : null]),
      S.report ? S.h("span", { class: "faint small" }, `report of ${S.date(S.report.made_at)}`) : null,
      S.h("button", { type: "button", class: "quiet", title: "key T", on: { click: toggle } }, S.theme() === "dark" ? "Light" : "Dark"), S.h("button", { type: "button", class: "quiet", "aria-label": "help", title: "key ?", on: { click: help } }, "?")));
    document.title = run && state && view !== "compare" ? `${state.name}: ${state.updates_done} of ${state.updates ?? "?"} · stretto` : "stretto";
  }
  function toggle() { S.theme(S.theme() === "dark" ? "light" : "dark"); S.redraw(); }
  S.redraw = function () { drawHead(); S.redrawCharts(); if (shown && shown.draw) shown.draw(); };
  function help() {
    const dialog = document.getElementById("help"), keys = [["1 … 4", "overview, timeline, trajectories, compare"], ["[ ]", "previous and next run"], ["T", "light or dark"], ["/", "search trajectories"], ["↑ ↓ Enter", "in a list: move and open"], ["Esc", "close"], ["← → + − 0", "timeline: move, zoom, whole run"], ["N P", "timeline: next and previous update"]];
    S.fill(dialog, S.h("h2", {}, "Keys"), S.h("dl", {}, keys.map(([key, words]) => [S.h("dt", {}, S.h("kbd", {}, key)), S.h("dd", {}, words)])), S.h("p", { class: "muted small" }, S.report ? `This file is a report: it holds all updates and a sample of ${S.report.runs.map((run) => S.integer(run.rows.length)).join(", ")} trajectories.` : "The page reads the run folder and changes nothing in it."), S.h("form", { method: "dialog" }, S.h("button", { class: "primary" }, "Close")));
    dialog.showModal();
  }

  function problem(message) { return S.h("div", { class: "stack" }, S.h("p", { class: "notice bad", role: "alert" }, message), S.h("p", { class: "muted" }, "The page tries again by itself.")); }
  /** Shows the view that the address names. */
  S.route = async function () {
    let parameters;
    [view, parameters] = address();
    place = Math.min(Math.max(0, Number(parameters.run) || 0), S.runs.length - 1);
    delete parameters.run;
    if (shown && shown.close) shown.close();
    shown = null;
    S.tip(null, null);
    S.dropCharts();
    S.watched = new Set([place]);
    const run = S.runs[place], mine = (drawn = {});
    drawHead();
    routing = true;
    if (view === "compare") { const made = await VIEWS.compare.show(main, () => drawn === mine); if (drawn !== mine) return; routing = false; shown = made; drawHead(); return; }
    if (!run.curves) { await run.refresh(); if (drawn !== mine) return; }
    routing = false;
    drawHead();
    if (run.error && !run.curves) { S.fill(main, problem(run.error)); return; }
    shown = VIEWS[view].show(main, run, parameters) || null;
    drawHead();
  };
  function told(run) {
    if (view !== "compare" && run.place !== place) return;
    drawHead();
    if (run.error) { if (!run.curves) S.fill(main, problem(run.error)); else banner(run.error); return; }
    banner(null);
    if (!shown) { if (!routing) S.route(); return; }
    if (shown.draw) shown.draw();
  }
  function banner(message) {
    let old = document.getElementById("banner");
    if (old) old.remove();
    if (message) main.prepend(S.h("p", { id: "banner", class: "notice bad", role: "alert", style: { marginBottom: "1rem" } }, message));
  }

  addEventListener("hashchange", S.route);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = event.target.matches && event.target.matches("input, select, textarea");
    if (typing) { if (event.key === "Escape") event.target.blur(); return; }
    const number = "1234".indexOf(event.key), key = event.key.toLowerCase();
    if (number >= 0) S.go(Object.keys(VIEWS)[number]);
    else if (key === "t") toggle();
    else if (key === "?") help();
    else if (key === "[" || key === "]") { place = (place + (key === "]" ? 1 : S.runs.length - 1)) % S.runs.length; S.go(view, { run: place || null }, true); } else if (key === "/" && view !== "trajectories") { S.go("trajectories"); setTimeout(() => S.trajectoriesView && S.trajectoriesView.form.elements.text.focus(), 300); } else if (!(shown && shown.key && event.target.tagName !== "CANVAS" && shown.key(event.key))) return;
    event.preventDefault();
  });

  (async function () {
    try {
      await S.openRuns();
      for (const run of S.runs) run.listeners.add(told);
      await S.route();
      S.poll();
      document.documentElement.dataset.ready = "1";
    } catch (error) { S.fill(main, problem(error.message)); setTimeout(() => location.reload(), 5000); }
  })();
})(window.stretto);
