// Helpers of the page's scripts: elements, numbers, colours, tables, tips, canvases. The scripts are joined in the order
// helpers, verdict, curves, timeline, samples, page. Each draws its sections from the JSON in #data.
// Text is inserted as text, never as HTML, so a name may contain any character.
"use strict";

const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const { world, model, verdict, outcome } = data;
const redraws = []; // what is drawn in pixels is drawn again when its size or the light changes

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(2).filter(child => child != null));
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const count = n => n.toLocaleString("en");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const digits = (x, n = 3) => {
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e-4 || size >= 1e7) return x.toExponential(n - 1).replace(/\.?0+e/, "e");
  return Math.abs(x) >= 10 ** n ? count(Math.round(x)) : String(Number(x.toPrecision(n)));
};
const number = x => x == null ? "no number" : digits(x, 6);
const scaled = (x, units) => {
  const [size, unit] = units.find(([size]) => Math.abs(x) >= size * .9995) ?? units.at(-1);
  return `${digits(x / size)}\u00a0${unit}`;
};
const TIMES = [[3600e6, "h"], [60e6, "min"], [1e6, "s"], [1e3, "ms"], [1, "µs"], [1e-3, "ns"]];
const micros = us => us === 0 ? "0\u00a0µs" : scaled(us, us < 120e6 ? TIMES.slice(2) : TIMES);
const seconds = s => micros(s * 1e6);
const bytes = n => scaled(n, [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);
const percent = x => `${Math.round(x * 1000) / 10}\u00a0%`;
const sum = list => list.reduce((a, b) => a + b, 0);
/** A number to read, with the exact one for machines. */
const exact = (value, text) => el("data", { value, title: String(value) }, text);

const rankName = rank => `rank ${rank}`;
const device = rank => world.devices[rank] ?? "";
const bucketName = bucket => bucket >= 0 ? `bucket ${bucket}` : "no bucket";

// Colours are those of page.css, so that elements follow the light by themselves; a canvas has to look them up.
/** Eight hues, then the same eight half faded, then all again. */
const hue = i => i % 16 < 8 ? `var(--hue-${i % 8})` : `color-mix(in srgb, var(--hue-${i % 8}) 58%, var(--bg))`;
const PHASES = ["step", "data", "forward", "backward", "optimizer", "validation", "save"];
const tint = operation => `var(--${PHASES.includes(operation) ? operation : "other"})`;
const probe = $("colophon").appendChild(el("i", { hidden: "" }));
let resolved = new Map();
function resolve(colour) {
  if (!resolved.has(colour)) {
    probe.style.color = colour;
    const parts = getComputedStyle(probe).color;
    const rgb = parts.match(/[\d.]+/g).slice(0, 3).map(Number);
    const [r, g, b] = parts.startsWith("color(") ? rgb.map(part => part * 255) : rgb;
    resolved.set(colour, [r, g, b].map(Math.round));
  }
  return resolved.get(colour);
}
const rgb = colour => `rgb(${resolve(colour).join()})`;
/** Black or white, whichever can be read on the colour. */
function inkOn(colour) {
  const [r, g, b] = resolve(colour).map(part => part / 255)
    .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b > .179 ? "#000" : "#fff";
}
const swatch = (background, kind = "") =>
  el("span", { class: `swatch ${kind}`, style: kind === "hatched" ? {} : { background } });
const legend = (list, items) => list.replaceChildren(...items.map(([mark, text]) => el("li", {}, mark, text)));

/** Terms and what they are; `null` ones are left out. */
function facts(list, pairs) {
  const known = pairs.filter(pair => pair && pair[1] != null);
  list.replaceChildren(...known.map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))));
}

/** A table that scrolls in itself. A cell is text or an element, or of a class: {cell, class}. */
function table(label, head, rows, foot, classes = "") {
  const cell = (tag, it, attributes = {}) =>
    el(tag, { ...attributes, class: it?.class }, it?.cell !== undefined ? it.cell : it);
  const line = it => el("tr", {}, it.map((value, i) => i ? cell("td", value) : cell("th", value, { scope: "row" })));
  return el("div", { class: `scroll ${classes}`, tabindex: 0, role: "region", "aria-label": label },
    el("table", {},
      el("thead", {}, el("tr", {}, head.map(it => cell("th", it, { scope: "col" })))),
      el("tbody", {}, rows.map(line)),
      foot && el("tfoot", {}, line(foot))));
}

const left = cell => ({ class: "left", cell });
/** A cell with parts of a whole, as a bar: each part is {name, value, colour}. */
const bar = (parts, whole, format) => ({
  class: "left share",
  cell: el("div", { class: "bar" }, parts.map(({ name, value, colour }) =>
    el("i", { title: `${name}: ${format(value)}`, style: { background: colour, width: `${100 * value / whole}%` } }))),
});
const SHARE = { class: "left share", cell: "share" };

const tip = $("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8));
  const top = y + 18 + tip.offsetHeight > innerHeight ? Math.max(8, y - tip.offsetHeight - 12) : y + 18;
  tip.style.transform = `translate(${left}px, ${top}px)`;
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });
document.addEventListener("pointerdown", event => event.target.closest("[data-tips]") || hideTip());

/**
 * Tells of the parts of a drawing: of that under the mouse or finger, and, when it has the focus, of one after the
 * other with the arrow keys. `at(x, y)` finds a part, `next(part, dx, dy)` its neighbour (of null: the first),
 * `where(part)` a point of it, `text(part)` what there is to tell, `mark(part)` shows which it is.
 */
function explore(node, { at, next, where, text, mark }) {
  let chosen = null;
  const choose = (part, x, y) => {
    chosen = part;
    mark(part);
    if (part === null) return hideTip();
    const box = node.getBoundingClientRect();
    const [px, py] = x === undefined ? where(part).map((at, i) => at + (i ? box.top : box.left)) : [x, y];
    showTip(text(part), px, py);
  };
  node.dataset.tips = "";
  for (const kind of ["pointermove", "pointerdown"]) {
    node.addEventListener(kind, event => {
      const box = node.getBoundingClientRect();
      choose(at(event.clientX - box.left, event.clientY - box.top), event.clientX, event.clientY);
    });
  }
  // After a finger is lifted what it has touched is still told.
  node.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") choose(null); });
  node.addEventListener("blur", () => choose(null));
  node.addEventListener("keydown", event => {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") choose(null);
    if (!by) return;
    event.preventDefault();
    const part = next(chosen, ...by);
    if (part !== null && part !== undefined) choose(part);
  });
  return choose;
}

/** Makes a canvas as sharp as the screen is, and `height` high. */
function sized(canvas, width, height) {
  const sharp = Math.max(devicePixelRatio || 1, onPaper ? 2 : 1);
  canvas.width = Math.round(width * sharp);
  canvas.height = Math.round(height * sharp);
  const context = canvas.getContext("2d");
  context.setTransform(sharp, 0, 0, sharp, 0, 0);
  return context;
}
let onPaper = false;
// On paper a canvas can't be asked how wide it will be; and it has no width while its window has none.
const widthOf = canvas => onPaper ? 1040 : Math.max(200, canvas.parentElement.clientWidth);

/** A round number, such that about `wanted` of them make up `length`. */
function roundPart(length, wanted) {
  const rough = length / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(factor => factor * power >= rough * .999);
}
/** Round values from `from` to `to`. */
function ticks(from, to, wanted) {
  const by = roundPart(to - from, wanted);
  const found = [];
  for (let i = Math.ceil(from / by - 1e-9); i * by <= to + by * 1e-9; i++) found.push(i * by);
  return found;
}
