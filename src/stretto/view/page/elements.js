// Elements, numbers and words. Text always becomes text nodes, never markup: models may write anything.
"use strict";
window.stretto = {};
(function (S) {
  /** Makes an element. `options`: `class`, `on` (listeners), `data`, properties and attributes. Children may be text. */
  S.h = function (tag, options, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(options || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "class") made.className = value;
      else if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
      else if (name === "data") Object.assign(made.dataset, value);
      else if (name === "style") Object.assign(made.style, value);
      else if (name in made && name !== "list") made[name] = value;
      else made.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      made.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return made;
  };
  S.fill = function (element, ...children) { element.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false)); return element; };

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  /** A number for people: `-` for none, three to four significant digits, thousands apart. */
  S.number = function (value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "-";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(digits - 2).replace("e+", "e");
    if (Number.isInteger(value) || size >= 1000) return whole.format(value);
    return size >= 100 ? value.toFixed(1) : size >= 10 ? value.toFixed(2) : value.toFixed(digits);
  };
  S.integer = (value) => (value === null || value === undefined ? "-" : whole.format(value));
  S.percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);
  S.seconds = function (value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "-";
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${(1e6 * value).toFixed(0)} µs`;
    if (size < 1) return `${(1e3 * value).toFixed(0)} ms`;
    if (size < 100) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
    if (size < 3600) return `${Math.floor(value / 60)} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
    return `${Math.floor(value / 3600)} h ${String(Math.floor((value % 3600) / 60)).padStart(2, "0")} min`;
  };
  S.bytes = function (value) {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (value < 1024 || unit === "GiB") return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`; value /= 1024; }
  };
  S.clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
  S.date = (at) => new Date(1000 * at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  S.plural = (count, word, words) => `${S.integer(count)} ${count === 1 ? word : words || `${word}s`}`;

  /** The value of a colour variable, such as `s0`. */
  const colours = new Map();
  S.colour = function (name) { if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()); return colours.get(name); };
  S.series = (place) => S.colour(`s${place % 8}`);
  S.mixed = (place, alpha) => { const c = S.series(place); return `${c}${Math.round(255 * alpha).toString(16).padStart(2, "0")}`; };

  const media = window.matchMedia("(prefers-color-scheme: dark)");
  S.theme = function (choice) {
    if (choice !== undefined) { try { localStorage.setItem("stretto-theme", choice); } catch { /* private mode */ } }
    let kept = null;
    try { kept = localStorage.getItem("stretto-theme"); } catch { /* private mode, or a file */ }
    const shown = kept === "light" || kept === "dark" ? kept : media.matches ? "dark" : "light";
    document.documentElement.dataset.theme = shown;
    colours.clear();
    return shown;
  };
  media.addEventListener("change", () => { S.theme(); if (S.redraw) S.redraw(); });
  S.theme();

  const tip = document.getElementById("tip");
  /** Shows a tip beside the pointer: text, or rows of [name, value]. */
  S.tip = function (event, content) {
    if (!content) { tip.hidden = true; return; }
    if (Array.isArray(content)) {
      S.fill(tip, S.h("table", {}, S.h("tbody", {}, content.filter(Boolean).map(([name, value]) => value === undefined ? S.h("tr", {}, S.h("td", { colSpan: 2 }, name)) : S.h("tr", {}, S.h("td", {}, name), S.h("td", {}, value))))));
    } else tip.textContent = content;
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), gap = 14;
    const x = event.clientX + gap + box.width > innerWidth ? Math.max(4, event.clientX - gap - box.width) : event.clientX + gap;
    const y = event.clientY + gap + box.height > innerHeight ? Math.max(4, event.clientY - gap - box.height) : event.clientY + gap;
    tip.style.left = `${x}px`; tip.style.top = `${y}px`;
  };

  /** Buttons of which one is pressed. `choices`: [value, label]. */
  S.choice = function (label, choices, value, change) {
    const group = S.h("div", { class: "choice", role: "group", "aria-label": label });
    for (const [each, words] of choices) {
      const button = S.h("button", { type: "button", "aria-pressed": String(each === value) }, words);
      button.addEventListener("click", () => {
        for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
        change(each);
      });
      group.append(button);
    }
    return group;
  };
  /** The colour behind a value between `low` and `high`, with 0 or `middle` uncoloured. */
  S.shade = function (value, low, high, middle = 0, most = 0.62) {
    if (value === null || value === undefined || Number.isNaN(value)) return "";
    const side = value < middle ? "low" : "high";
    const range = side === "low" ? middle - low : high - middle;
    const share = range > 0 ? Math.min(1, Math.abs(value - middle) / range) : 0;
    return share < 0.02 ? "" : `rgba(${S.colour(side)}, ${(0.08 + most * share).toFixed(3)})`;
  };
})(window.stretto);
