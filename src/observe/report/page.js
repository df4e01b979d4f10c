// Draws the report of a run from the JSON in #data. In the order of the page: helpers, verdict, run, curves, timeline,
// samples, buckets, bytes, replicas, options; last what happens at another size, in other light, and on paper.
// Text goes into the page as text only (never as HTML), so a name may hold any character.
"use strict";
(() => {
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const { world, model, verdict, outcome } = data;
const redraws = []; // what is drawn in pixels is drawn again when its size or the light changes

// ---- Elements, numbers, colours

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
const swatch = (background, kind = "") => el("span", { class: `swatch ${kind}`, style: kind === "hatched" ? {} : { background } });
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

// ---- Verdict

const { replicas } = data;
const alone = world.size === 1;
const ranksText = plural(world.size, "rank");
{
  const { kind, text } = outcome;
  const ran = data.steps != null && data.seconds != null;
  const how = ran ? `${plural(data.steps, "step")} on ${ranksText} in ${seconds(data.seconds)}` : `a run of ${ranksText}`;
  $("headline").textContent = kind === "done" ? how[0].toUpperCase() + how.slice(1) : kind === "failed" ? "The run failed" : "The run was stopped";
  document.title = `${kind}: ${how} - ddp-mp report`;
  $("program").textContent = data.program;
  const told = [];
  if (kind !== "done") told.push(text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : "."));
  if (kind !== "done" && ran) told.push(`By then: ${how}.`);
  if (replicas && !alone) told.push(replicas.equal ? "All replicas hold the same bits." : "The replicas do not hold the same parameters.");
  if (verdict.held_back) told.push(`Rank ${verdict.held_back.rank} held the others back.`);
  else if (kind === "done" && !alone) told.push("No rank held the others back.");
  $("subtitle").textContent = told.join(" ");
  if (kind === "failed" || replicas?.equal === false) $("subtitle").classList.add("bad");

  const held = verdict.held_back, best = data.validation.findLast(it => it.best);
  const figures = [
    verdict.efficiency != null && ["Scaling efficiency", exact(verdict.efficiency, percent(verdict.efficiency)),
      `of the speed of ${ranksText} that never wait for each other`],
    verdict.overlapped != null && ["Overlapped share", exact(verdict.overlapped, percent(verdict.overlapped)),
      "of communication passed while autograd was still at work"],
    held && ["Held back by", exact(held.rank, rankName(held.rank)),
      `${seconds(held.phase_seconds)} longer than the others ${held.phase === "step" ? "before it asked for data" : `in ${held.phase}`}; they waited ${seconds(held.seconds)} for it`],
    replicas && !alone && ["Replicas", el("span", { class: replicas.equal ? "good" : "bad" }, replicas.equal ? "equal" : "differ"),
      replicas.equal ? `all ${ranksText} hold the same bits` : "which do, is shown below"],
    (data.loss != null || kind === "done") && ["Loss", exact(data.loss, number(data.loss)), "mean of the last epoch, over all ranks"],
    best && ["Best validation", exact(best.loss, number(best.loss)),
      `at step ${count(best.step)}${best.accuracy == null ? "" : `, with ${percent(best.accuracy)} correct`}`],
    data.us_per_step != null && ["Time of a step", exact(data.us_per_step, micros(data.us_per_step)), "on average, everything included"],
  ].filter(Boolean);
  $("figures").replaceChildren(...figures.map(([term, value, note]) =>
    el("div", {}, el("dt", {}, term), el("dd", {}, value), el("dd", { class: "note" }, note))));

  $("advice").append(el("h3", {}, "What to try next"), verdict.advice.length
    ? el("ul", {}, verdict.advice.map(line => el("li", {}, line)))
    : el("p", {}, kind === "failed" ? "Look at the end of the timeline: there is what each rank was doing when the run failed." : "Nothing stands out in this run."));

  const columns = ["step", "data", "forward", "backward", "optimizer", "collectives"];
  const colour = column => column === "collectives" ? "var(--collective)" : tint(column);
  const most = Math.max(...verdict.phases.map(it => sum(columns.map(column => it[column]))));
  if (verdict.phases.length) {
    $("phases").append(el("h3", {}, "Where the time of each rank went"), table("Time of each rank in each phase",
      ["rank", { cell: "share", class: "left share" }, ...columns.map(it => [swatch(colour(it)), " ", it])],
      verdict.phases.map((it, rank) => [String(rank), { class: "left share", cell: el("div", { class: "bar" }, columns.map(column =>
        el("i", { title: `${column}: ${seconds(it[column])}`, style: { background: colour(column), width: `${100 * it[column] / most}%` } }))) },
        ...columns.map(column => exact(it[column], seconds(it[column])))])),
      el("p", { class: "hint" }, "Collectives count by themselves, with the waiting in them, wherever they began; ",
        "\u201cstep\u201d is what comes before a rank asks for data."));
  }
}

// ---- What ran

{
  const numbers = model.parameters.map(it => it.shape.reduce((a, b) => a * b, 1));
  $("command").textContent = data.command;
  facts($("facts"), [
    ["outcome", outcome.text],
    ["began", data.began.replace("T", " ").replace("Z", " UTC")],
    ["ranks", `${world.size} on ${plural(world.nnodes, "machine")}`],
    ["devices", world.devices.length > 8 ? `${world.devices.slice(0, 7).join(", ")}, \u2026` : world.devices.join(", ")],
    ["backend", world.backend],
    ["model", `${model.name}, ${plural(sum(numbers), "number")} in ${plural(numbers.length, "parameter")}`],
    ["samples", `${count(data.samples.dataset)}, ${data.samples.batch_size} a step on each rank`],
    ["libtorch", data.libtorch],
    ["parameters at the end", data.parameters_hash && el("span", { class: "mono" }, data.parameters_hash)],
  ]);
}

// ---- Curves

/**
 * A chart of lines over the steps. A line is {name, colour, points: [[step, value or null, epoch, note]], dots}; `format`
 * writes a value, and `within` is what the axis has at least. Returns the figure, whose `log(yes)` chooses the scale.
 */
function chart(title, lines, format, within) {
  const HEIGHT = 210, LEFT = 58, TOP = 10, BOTTOM = 26;
  const drawing = svg("svg", { tabindex: 0, role: "img", "aria-label": `${title} over the steps; arrow keys read the values` });
  const broken = lines.some(line => line.points.some(point => point[1] == null));
  const names = lines.map(line => [swatch(line.colour, line.dots ? "dot" : "line"), line.name]);
  if (broken) names.push([swatch("var(--bad)", "line"), "no number"]);
  const list = el("ul", { class: "legend" });
  if (names.length > 1) legend(list, names);
  const figure = el("figure", {}, el("figcaption", {}, title, list), drawing);

  const steps = [...new Set(lines.flatMap(line => line.points.map(point => point[0])))].sort((a, b) => a - b);
  const byStep = lines.map(line => new Map(line.points.map(point => [point[0], point])));
  let logarithmic = false, x = () => 0, cursor;

  function draw() {
    const width = onPaper ? 520 : figure.clientWidth || 520, right = width - 8, bottom = HEIGHT - BOTTOM;
    const shown = value => value != null && (!logarithmic || value > 0);
    const values = lines.flatMap(line => line.points.map(point => point[1]).filter(shown));
    let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const first = steps[0], last = Math.max(steps.at(-1), first + 1);
    if (!values.length) [low, high] = logarithmic ? [.1, 1] : [0, 1];
    if (low === high) [low, high] = logarithmic ? [low / 2, high * 2] : [low - Math.abs(low || 1) * .1, high + Math.abs(high || 1) * .1];
    if (!logarithmic) {
      [low, high] = [Math.min(low, ...within), Math.max(high, ...within)];
      const by = roundPart(high - low, 4);
      [low, high] = [Math.floor(low / by + 1e-6) * by, Math.ceil(high / by - 1e-6) * by];
    }
    const along = logarithmic ? Math.log10 : value => value;
    const y = value => bottom - (along(value) - along(low)) / (along(high) - along(low)) * (bottom - TOP);
    x = step => LEFT + (step - first) / (last - first) * (right - LEFT);

    let marks = ticks(low, high, 4);
    if (logarithmic && high / low > 5) {
      marks = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
        marks.push(...(high / low < 300 ? [1, 2, 5] : [1]).map(factor => factor * 10 ** power));
      }
      marks = marks.filter(mark => mark >= low && mark <= high);
    }
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.replaceChildren(
      ...marks.map(mark => svg("line", { class: "gridline", x1: LEFT, x2: right, y1: y(mark), y2: y(mark) })),
      ...marks.map(mark => svg("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, format(Number(mark.toPrecision(12))))),
      svg("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }),
      svg("text", { x: LEFT - 8, y: HEIGHT - 8, "text-anchor": "end" }, "step"),
      ...ticks(first, last, width / 110).filter(Number.isInteger)
        .map(mark => svg("text", { x: x(mark), y: HEIGHT - 8, "text-anchor": "middle" }, count(mark))));
    if (!values.length) drawing.append(svg("text", { x: (LEFT + right) / 2, y: (TOP + bottom) / 2, "text-anchor": "middle" }, "nothing that could be drawn"));
    for (const line of lines) drawing.append(...curve(line, x, y, shown, width, bottom));
    cursor = drawing.appendChild(svg("line", { class: "cursor", y1: TOP, y2: bottom, visibility: "hidden" }));
  }

  const scale = () => (drawing.clientWidth || 1) / drawing.viewBox.baseVal.width;
  explore(drawing, {
    at(px) {
      const to = px / scale();
      let best = 0;
      steps.forEach((step, i) => { if (Math.abs(x(step) - to) < Math.abs(x(steps[best]) - to)) best = i; });
      return best;
    },
    next: (part, dx, dy) => part === null ? 0 : Math.max(0, Math.min(steps.length - 1, part + dx - dy * 10)),
    where: part => [x(steps[part]) * scale(), TOP * scale()],
    text(part) {
      const points = byStep.map(points => points.get(steps[part]));
      const told = lines.map((line, i) => points[i] && `${line.name}: ${points[i][1] == null ? "no number" : format(points[i][1], true)}${points[i][3] ? ` (${points[i][3]})` : ""}`);
      return [`step ${count(steps[part])}, epoch ${points.find(Boolean)[2]}`, ...told.filter(Boolean)].join("\n");
    },
    mark(part) {
      cursor.setAttribute("visibility", part === null ? "hidden" : "visible");
      if (part !== null) for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(steps[part]));
    },
  });
  redraws.push(draw);
  return Object.assign(figure, { log(yes) { logarithmic = yes; draw(); } });
}

/** The line, torn where there is no number; of many points the least and greatest of each column stay. */
function curve(line, x, y, shown, width, bottom) {
  const drawn = [], colour = { stroke: line.colour }, solid = { fill: line.colour };
  const per = Math.ceil(line.points.length / width / 2);
  let piece = [], gap = null;
  const endPiece = () => {
    if (piece.length > 1) drawn.push(svg("polyline", { style: colour, points: piece.map(point => point.join()).join(" ") }));
    else if (piece.length && !line.dots) drawn.push(svg("circle", { style: solid, cx: piece[0][0], cy: piece[0][1], r: 2.5 }));
    piece = [];
  };
  const endGap = to => {
    if (gap !== null) drawn.push(svg("line", { style: { stroke: "var(--bad)", strokeWidth: 3 }, x1: gap, x2: Math.max(to, gap + 3), y1: bottom, y2: bottom }));
    gap = null;
  };
  for (let i = 0; i < line.points.length; i += per) {
    const some = line.points.slice(i, i + per), good = some.filter(point => shown(point[1]));
    const from = x(some[0][0]);
    if (good.length < some.length) endPiece();
    if (some.some(point => point[1] == null)) gap ??= from;
    else endGap(from);
    const least = good.reduce((a, b) => b[1] < a[1] ? b : a, good[0]), most = good.reduce((a, b) => b[1] > a[1] ? b : a, good[0]);
    const kept = good.length > 2 ? [least, most].sort((a, b) => a[0] - b[0]) : good;
    piece.push(...kept.map(point => [x(point[0]).toFixed(2), y(point[1]).toFixed(2)]));
  }
  endPiece();
  endGap(x(line.points.at(-1)?.[0] ?? 0));
  if (line.dots && line.points.length <= 200) {
    for (const point of line.points.filter(point => shown(point[1]))) {
      const best = point[3] ? { r: 4.5, style: { fill: "var(--bg)", stroke: line.colour, strokeWidth: 2 } } : { r: 3, style: solid };
      drawn.push(svg("circle", { cx: x(point[0]), cy: y(point[1]), ...best }));
    }
  }
  return drawn;
}

{
  const { train, validation } = data;
  const points = (list, field, note) => list.filter(it => it[field] !== undefined).map(it => [it.step, it[field], it.epoch, note?.(it)]);
  const best = validation.findLast(it => it.best);
  const isBest = it => it === best ? "the best" : "";
  const value = (x, full) => digits(x, full ? 6 : 4);
  const training = field => ({ name: "training", colour: "var(--hue-0)", points: points(train, field) });
  const tried = field => ({ name: "validation", colour: "var(--hue-5)", dots: true, points: points(validation, field, isBest) });
  const charts = [
    ["Loss", [training("loss"), tried("loss")], value, []],
    ["Accuracy", [tried("accuracy")], percent, [0, 1]],
    ["Time of a step", [training("step_us")], micros, [0]],
    ...(new Set(train.map(it => it.lr)).size > 1 ? [["Learning rate", [training("lr")], value, [0]]] : []),
  ].map(([title, lines, ...how]) => [title, lines.filter(line => line.points.length), ...how]).filter(it => it[1].length);
  const figures = charts.map(it => chart(...it));
  $("charts").replaceChildren(...figures);
  const loss = figures[charts.findIndex(it => it[0] === "Loss")];
  $("log-loss").addEventListener("change", event => loss.log(event.target.checked));
  if (!loss) $("log-loss").closest("p").remove();
  if (!charts.length) $("charts").append(el("p", { class: "lede" }, "There are none: the run has not come to the first step that is told of."));
}

// ---- Timeline

/** The fields of a record, by their places. */
const [OPERATION, BEGIN, DURATION, SEQUENCE, STEP, BUCKET, BYTES, BESIDE, WAITED, WAITED_FOR, PLACE] = Array(11).keys();
const COLLECTIVES = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
  "all_to_all", "send", "recv", "new_group", "barrier", "synchronize"];

function timeline() {
  const { operations, places, ranks, lost } = data.timeline;
  const total = sum(ranks.map(it => it.records.length));
  if (!total) {
    $("timeline-note").textContent = "Nothing was recorded.";
    $("timeline-body").remove();
    return;
  }
  const isCollective = operations.map(it => COLLECTIVES.includes(it)), gradient = operations.indexOf("gradient");
  let begin = Infinity, last = 0, open = false;
  for (const { records } of ranks) {
    for (const it of records) {
      begin = Math.min(begin, it[BEGIN]);
      last = Math.max(last, it[BEGIN] + (it[DURATION] ?? 0));
      open ||= it[DURATION] === null;
    }
  }
  // What has not ended goes on to the end of the picture, beyond all that has.
  const end = Math.max(last, begin + 1) + (open ? Math.max(1, (last - begin) * .04) : 0);
  const endOf = it => it[DURATION] === null ? end : it[BEGIN] + it[DURATION];

  // Styles are numbers: for each operation one, for each bucket one to work and one to wait; -1 is no bucket.
  const bucketCount = Math.max(model.buckets.length, 1 + Math.max(-1, ...model.parameters.map(it => it.bucket ?? -1)),
    ...ranks.map(({ records }) => records.reduce((most, it) => Math.max(most, it[BUCKET] + 1), 0)));
  const bucketHue = bucket => bucket >= 0 ? hue(bucket) : "var(--collective)";
  const working = bucket => operations.length + 2 * (bucket + 1), waiting = bucket => working(bucket) + 1;
  const styles = working(bucketCount);
  const faded = style => style < operations.length || (style - operations.length) % 2 === 0;
  let paints = [], inks = [];

  // A track is what lies in one row: sorted, with columns of its own, so that 20,000 slices are run through quickly.
  const compact = ranks.length > 8, HIGH = compact ? 22 : 30, LOW = compact ? 9 : 14, GAP = compact ? 6 : 12, RULER = 40, GUTTER = 56;
  const hasBeside = ranks.some(it => it.records.some(record => record[BESIDE]));
  const pitch = HIGH + (hasBeside ? LOW + 2 : 0) + GAP, height = RULER + pitch * ranks.length;
  const tracks = [];
  const lanes = ranks.map((rank, lane) => {
    const top = RULER + lane * pitch;
    const add = (name, records, top, height) => {
      records = [...records].sort((a, b) => a[BEGIN] - b[BEGIN] || endOf(b) - endOf(a));
      const starts = Float64Array.from(records, it => it[BEGIN]), ends = Float64Array.from(records, endOf);
      // How far the slices up to this one reach: this rises, and so can be searched by halving.
      const reach = ends.slice();
      for (let i = 1; i < reach.length; i++) reach[i] = Math.max(reach[i], reach[i - 1]);
      const style = Int32Array.from(records, it => isCollective[it[OPERATION]] ? working(it[BUCKET]) : it[OPERATION]);
      const waited = Float64Array.from(records, it => isCollective[it[OPERATION]] ? Math.min(it[WAITED], endOf(it) - it[BEGIN]) : 0);
      const track = { name, rank, lane, records, top, height, starts, ends, reach, style, waited };
      if (records.length) tracks.push(track);
      return track;
    };
    const own = rank.records.filter(it => !it[BESIDE] && it[OPERATION] !== gradient);
    const phases = add("phases", own.filter(it => !isCollective[it[OPERATION]]), top, HIGH);
    phases.inner = add("collectives", own.filter(it => isCollective[it[OPERATION]]), top + HIGH * .42, HIGH * .58);
    add("gradients", rank.records.filter(it => !it[BESIDE] && it[OPERATION] === gradient), top - 5, 5); // above the lane, where they hide no name
    if (hasBeside) add("beside", rank.records.filter(it => it[BESIDE]), top + HIGH + 2, LOW);
    const starts = phases.records.filter((it, i, all) => it[STEP] >= 0 && (!i || all[i - 1][STEP] !== it[STEP]));
    return { rank, top, starts };
  });
  const PER_STEP = ["step", "data", "forward", "backward", "optimizer"];
  /** From when to when a step lasted, on all ranks. */
  function span(step) {
    let from = Infinity, to = -Infinity;
    for (const { name, records } of tracks) {
      if (name !== "phases") continue;
      for (const it of records) {
        if (it[STEP] !== step || !PER_STEP.includes(operations[it[OPERATION]])) continue;
        from = Math.min(from, it[BEGIN]);
        to = Math.max(to, endOf(it));
      }
    }
    return from < to ? [from, to] : null;
  }

  const canvas = $("lanes");
  let view = { from: begin, to: end }, width = 0, selected = null;
  let onlyWaiting = false, withGradients = true;
  const scale = () => (width - GUTTER) / (view.to - view.from);
  const xOf = time => GUTTER + (time - view.from) * scale();
  const timeAt = x => view.from + (x - GUTTER) / scale();
  const visible = track => track.name !== "gradients" || withGradients;
  /** Gradients are marks without a length: where there are too many to tell apart, they would only hide what lies under. */
  const crowded = track => track.name === "gradients" &&
    (firstReaching(track, view.to) - firstReaching(track, view.from)) * 4 > width - GUTTER;
  const firstReaching = (track, time) => {
    let low = 0, high = track.reach.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (track.reach[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  };

  function mix(context) {
    const panel = rgb("var(--other)"), plain = operations.map(it => it === "gradient" ? "var(--gradient)" : tint(it));
    for (let bucket = -1; bucket < bucketCount; bucket++) plain.push(bucketHue(bucket), bucketHue(bucket));
    paints = plain.map((colour, style) => faded(style) ? (onlyWaiting ? panel : rgb(colour)) : hatch(context, rgb(colour)));
    inks = plain.map((colour, style) => onlyWaiting ? rgb("var(--muted)") : inkOn(faded(style) ? colour : "var(--bg)"));
  }
  function hatch(context, colour) {
    const tile = document.createElement("canvas"), SIZE = 12;
    tile.width = tile.height = SIZE;
    const pen = tile.getContext("2d");
    pen.fillStyle = rgb("var(--bg)");
    pen.fillRect(0, 0, SIZE, SIZE);
    pen.strokeStyle = colour;
    pen.lineWidth = 2.6;
    for (const shift of [-6, 0, 6, 12, 18]) {
      pen.beginPath();
      pen.moveTo(shift - 6, 12 + 6);
      pen.lineTo(shift + 12, 0);
      pen.stroke();
    }
    const pattern = context.createPattern(tile, "repeat"), sharp = context.getTransform().a;
    pattern.setTransform(new DOMMatrix().scale(1 / sharp * Math.max(1, sharp / 2)));
    return pattern;
  }

  let lastMix = "";
  function draw() {
    width = widthOf(canvas);
    const context = sized(canvas, width, height), light = [rgb("var(--bg)"), onlyWaiting, canvas.width].join();
    if (light !== lastMix) mix(context);
    lastMix = light;
    context.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    context.fillStyle = rgb("var(--bg)");
    context.fillRect(0, 0, width, height);
    drawRuler(context);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, height);
    context.clip();
    for (const track of tracks) if (visible(track) && !crowded(track)) drawTrack(context, track);
    drawSteps(context);
    if (selected) {
      const { track, i } = selected, x = xOf(track.starts[i]);
      context.strokeStyle = rgb("var(--select)");
      context.lineWidth = 2;
      context.strokeRect(x, track.top, Math.max(2, xOf(track.ends[i]) - x), track.height);
    }
    context.restore();
    [canvas.dataset.from, canvas.dataset.to] = [view.from, view.to]; // what is seen, for whoever asks the page
    $("range").textContent = `${micros(view.to - view.from)} of ${micros(end - begin)}`;
    $("zoom-out").disabled = $("zoom-all").disabled = view.from <= begin && view.to >= end;
  }

  function drawRuler(context) {
    const marks = ticks(view.from, view.to, (width - GUTTER) / 110), by = marks.length > 1 ? marks[1] - marks[0] : view.to - view.from;
    const [size, unit] = TIMES.find(([size]) => view.to >= size && by >= size / 1000) ?? TIMES.at(-1);
    const places = Math.max(0, Math.min(6, -Math.floor(Math.log10(by / size) + 1e-9)));
    context.fillStyle = rgb("var(--muted)");
    context.strokeStyle = rgb("var(--grid)");
    context.lineWidth = 1;
    context.textAlign = "left";
    for (const mark of marks) {
      const x = Math.round(xOf(mark)) + .5;
      context.beginPath();
      context.moveTo(x, 4);
      context.lineTo(x, height);
      context.stroke();
      const text = `${(mark / size).toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places })} ${unit}`;
      if (x + 4 + context.measureText(text).width < width) context.fillText(text, x + 4, 14);
    }
    context.textAlign = "right";
    lanes.forEach(lane => {
      context.fillStyle = rgb("var(--ink)");
      context.fillText(rankName(lane.rank.rank), GUTTER - 8, lane.top + HIGH / 2 + 4);
    });
    context.textAlign = "left";
  }

  function drawTrack(context, track) {
    const { starts, ends, style, waited, top, height } = track, perMicro = scale();
    const from = view.from, to = view.to;
    const rect = (style, x, w) => {
      context.fillStyle = paints[style];
      context.fillRect(x, top, w, height);
    };
    // Slices below a pixel are added up: it takes the colour of what took longest in it. Equal pixels are one stroke.
    const inPixel = new Float64Array(styles);
    let pixel = -1, run = -1, runFrom = 0, runTo = 0;
    const endRun = () => { if (run >= 0) rect(run, runFrom, runTo - runFrom); run = -1; };
    const endPixel = () => {
      if (pixel < 0) return;
      let most = -1, value = -1;
      for (let i = 0; i < styles; i++) {
        if (inPixel[i] > value && inPixel[i] > 0) { value = inPixel[i]; most = i; }
        inPixel[i] = 0;
      }
      if (most === run && pixel === runTo) runTo = pixel + 1;
      else { endRun(); run = most; runFrom = pixel; runTo = pixel + 1; }
      pixel = -1;
    };
    const part = (style, begin, end) => {
      const x = GUTTER + (begin - from) * perMicro, w = (end - begin) * perMicro;
      if (w >= 1) {
        endPixel();
        endRun();
        // Beyond the picture nothing is drawn, because a browser's numbers for it are not so fine.
        const left = Math.max(x, GUTTER - 2), right = Math.min(x + w, width + 2);
        if (right > left) rect(style, left, right - left);
        return;
      }
      const at = Math.floor(x);
      if (at !== pixel) { endPixel(); pixel = at; }
      inPixel[style] += w + 1e-9;
    };
    const first = firstReaching(track, from);
    let i = first;
    for (; i < starts.length && starts[i] < to; i++) {
      if (waited[i] > 0) part(style[i] + 1, starts[i], starts[i] + waited[i]);
      if (waited[i] < ends[i] - starts[i]) part(style[i], starts[i] + waited[i], ends[i]);
    }
    endPixel();
    endRun();
    if (track.name !== "gradients") drawNames(context, track, first, i);
  }

  /** The names of the slices that have room for them, and a line between two that touch. */
  function drawNames(context, track, first, beyond) {
    const { starts, ends, records, top, height, inner } = track;
    for (let i = first; i < beyond; i++) {
      if ((ends[i] - starts[i]) * scale() < 4) continue;
      const it = records[i], from = Math.max(GUTTER, xOf(starts[i])), to = Math.min(width, xOf(ends[i]));
      context.fillStyle = rgb("var(--bg)");
      if (xOf(starts[i]) > GUTTER) context.fillRect(from - .5, top, 1, height);
      if (it[DURATION] === null) {
        context.fillStyle = rgb("var(--bad)");
        context.fillRect(to - 3, top, 3, height);
      }
      if (height < 11) continue;
      // A phase with collectives in it has its name above them.
      const within = inner ? firstReaching(inner, starts[i]) : 0, covered = inner && within < inner.starts.length && inner.starts[within] < ends[i];
      const baseline = covered ? top + Math.min(12, height * .4) : top + height / 2 + (inner ? 5 : 4);
      const busy = Math.max(GUTTER, xOf(starts[i] + track.waited[i]));
      const write = (text, from, to, style) => {
        if (to - from < 30 || context.measureText(text).width > to - from - 8) return false;
        const room = context.measureText(text).width + 6;
        if ((style - operations.length) % 2 === 1 && style >= operations.length) {
          context.fillStyle = rgb("var(--bg)"); // a hatched ground can't be written on
          context.fillRect(from + 1, top + 1, room, height - 2);
        }
        context.fillStyle = inks[style];
        context.fillText(text, from + 4, baseline);
        return true;
      };
      const style = track.style[i];
      if (track.waited[i] > 0) write(it[WAITED_FOR] >= 0 ? `waits for rank ${it[WAITED_FOR]}` : "waits", from, busy, style + 1) || write("waits", from, busy, style + 1);
      const name = operations[it[OPERATION]];
      write(`${name} #${it[SEQUENCE]}`, busy, to, style) || write(name, busy, to, style);
    }
  }

  /** Where steps begin: a line in each rank's lane, and the number above. */
  function drawSteps(context) {
    const low = firstStep(lanes[0], view.from), high = firstStep(lanes[0], view.to);
    const each = (width - GUTTER) / Math.max(1, high - low);
    if (each >= 9) {
      context.fillStyle = rgb("var(--ink)");
      for (const lane of lanes) {
        let beside = -Infinity;
        for (let i = firstStep(lane, view.from); i < lane.starts.length && lane.starts[i][BEGIN] < view.to; i++) {
          const x = Math.round(xOf(lane.starts[i][BEGIN])) - .5;
          if (x < beside + 4) continue; // in a crowd of short steps a few lines do
          context.fillRect(x, lane.top, 1, HIGH);
          beside = x;
        }
      }
    }
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6].find(it => it * each >= 60) ?? 1e7;
    context.fillStyle = rgb("var(--muted)");
    const { starts } = lanes[0];
    let free = GUTTER - 1;
    for (let i = Math.max(0, low - 1); i < Math.min(starts.length, high); i++) {
      const x = xOf(starts[i][BEGIN]), step = starts[i][STEP], text = `step ${step}`;
      if (step % every || x < free || x > width - 50) continue;
      context.fillText(text, x, 29);
      free = x + context.measureText(text).width + 10;
    }
  }
  function firstStep(lane, time) {
    let low = 0, high = lane.starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.starts[middle][BEGIN] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  let asked = 0;
  const redraw = () => { asked ||= requestAnimationFrame(() => { asked = 0; draw(); }); };
  function show(from, to) {
    const length = Math.min(end - begin, Math.max(to - from, Math.min(.5, end - begin)));
    from = Math.max(begin, Math.min(end - length, from));
    view = { from, to: from + length };
    redraw();
  }
  function zoom(factor, time = (view.from + view.to) / 2) {
    const length = Math.min(end - begin, Math.max(.5, (view.to - view.from) / factor));
    const from = time - (time - view.from) / (view.to - view.from) * length;
    show(from, from + length);
  }
  const move = share => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

  // What lies under a point: the uppermost first.
  function find(x, y) {
    const slack = 2 / scale(), time = timeAt(x);
    if (x < GUTTER) return null;
    for (const track of [...tracks].reverse()) {
      if (!visible(track) || crowded(track) || y < track.top || y > track.top + track.height) continue;
      const near = track.name === "gradients" ? 2 * slack : slack;
      let best = null;
      for (let i = firstReaching(track, time - near); i < track.starts.length && track.starts[i] <= time + near; i++) {
        if (track.ends[i] < time - near) continue;
        if (best === null || track.starts[i] <= time) best = i; // of those that lie in one another the innermost
      }
      if (best !== null) return { track, i: best };
    }
    return null;
  }

  function name({ track, i }) {
    const it = track.records[i], operation = operations[it[OPERATION]];
    return operation === "gradient" ? `gradient of ${model.parameters[it[SEQUENCE]]?.name ?? `parameter ${it[SEQUENCE]}`}` : `${operation} #${it[SEQUENCE]}`;
  }
  const waitedFor = it => `${micros(it[WAITED])}${it[WAITED_FOR] >= 0 ? ` for rank ${it[WAITED_FOR]}` : ""}`;
  const ofSamples = it => operations[it[OPERATION]] === "forward"; // which takes samples, and not bytes
  const amount = it => ofSamples(it) ? plural(it[BYTES], "sample") : bytes(it[BYTES]);
  const lasted = it => it[DURATION] === null ? "had not ended" : micros(it[DURATION]);
  function tell(slice) {
    const it = slice.track.records[slice.i];
    return [`${name(slice)} on rank ${slice.track.rank.rank}`, lasted(it), it[STEP] >= 0 && `step ${it[STEP]}`,
      it[BUCKET] >= 0 && bucketName(it[BUCKET]), it[BYTES] > 0 && amount(it), it[WAITED] > 0 && `waited ${waitedFor(it)}`].filter(Boolean).join("\n");
  }
  function select(slice) {
    selected = slice;
    if (!slice) { $("slice").replaceChildren(); redraw(); return; }
    const { track, i } = slice, it = track.records[i], collective = isCollective[it[OPERATION]];
    facts($("slice"), [
      ["operation", name(slice)],
      ["rank", `${track.rank.rank} (${track.rank.device})`],
      ["step", it[STEP] >= 0 ? exact(it[STEP], String(it[STEP])) : null],
      ["bucket", it[BUCKET] >= 0 ? [swatch(bucketHue(it[BUCKET])), ` ${it[BUCKET]}`] : null],
      [ofSamples(it) ? "samples" : "bytes", it[BYTES] > 0 ? exact(it[BYTES], amount(it)) : null],
      [collective ? "arrived at" : "began at", exact(it[BEGIN], `${(it[BEGIN] / 1000).toLocaleString("en", { maximumFractionDigits: 4 })}\u00a0ms`)],
      ["took", it[DURATION] === null ? lasted(it) : exact(it[DURATION], lasted(it))],
      ["waited", it[WAITED] > 0 ? exact(it[WAITED], waitedFor(it)) : collective && it[DURATION] !== null ? "for nobody" : null],
      ["thread", it[BESIDE] ? "communication, beside the rank's own" : null],
      ["written in", it[PLACE] >= 0 ? el("code", {}, places[it[PLACE]]) : null],
    ]);
    const [from, to] = [track.starts[i], track.ends[i]], length = view.to - view.from;
    if (to < view.from || from > view.to) show((from + to - length) / 2, (from + to + length) / 2);
    redraw();
  }
  function neighbour(by) {
    if (!selected) {
      const track = tracks.find(it => visible(it));
      return select({ track, i: Math.min(track.starts.length - 1, firstReaching(track, view.from)) });
    }
    const { track, i } = selected;
    select({ track, i: Math.max(0, Math.min(track.starts.length - 1, i + by)) });
  }
  function otherTrack(by) {
    if (!selected) return neighbour(0);
    const shown = tracks.filter(visible), track = shown[shown.indexOf(selected.track) + by];
    if (track) select({ track, i: Math.min(track.starts.length - 1, firstReaching(track, selected.track.starts[selected.i])) });
  }

  // Mouse, pen and fingers: one drags, two pinch; what has not moved was a click.
  const pointers = new Map();
  let moved = 0;
  canvas.dataset.tips = "";
  const place = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("pointerdown", event => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, place(event));
    if (pointers.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", event => {
    const [x, y] = place(event), before = pointers.get(event.pointerId);
    if (!before) {
      const slice = find(x, y);
      return slice ? showTip(tell(slice), event.clientX, event.clientY) : hideTip();
    }
    const dx = x - before[0];
    moved += Math.abs(dx) + Math.abs(y - before[1]);
    if (pointers.size === 1 && moved > 4) {
      canvas.classList.add("dragging");
      hideTip();
      show(view.from - dx / scale(), view.to - dx / scale());
    } else if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const wide = Math.max(12, Math.abs(x - other[0])), was = Math.max(12, Math.abs(before[0] - other[0]));
      // The times that lay under the two fingers stay under them.
      zoom(wide / was, timeAt((before[0] + other[0]) / 2));
      show(view.from - dx / 2 / scale(), view.to - dx / 2 / scale());
    }
    pointers.set(event.pointerId, [x, y]);
  });
  const lift = event => {
    const was = pointers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    if (!was || event.type !== "pointerup" || moved > 4) return;
    const slice = find(...place(event));
    select(slice);
    if (slice) showTip(tell(slice), event.clientX, event.clientY);
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") hideTip(); });
  canvas.addEventListener("wheel", event => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    const all = view.from <= begin && view.to >= end;
    if (all && (sideways || event.deltaY > 0)) return; // there is no more to see: the page scrolls
    event.preventDefault();
    hideTip();
    const lines = event.deltaMode === 1 ? 20 : 1;
    if (sideways) move((event.deltaX || event.deltaY) * lines / width);
    else zoom(Math.exp(-event.deltaY * lines / 300), timeAt(Math.max(GUTTER, place(event)[0])));
  }, { passive: false });

  const keys = {
    "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(.5), 0: () => show(begin, end),
    ArrowLeft: () => move(-.2), ArrowRight: () => move(.2), ArrowUp: () => otherTrack(-1), ArrowDown: () => otherTrack(1),
    n: () => neighbour(1), p: () => neighbour(-1), Escape: () => { hideTip(); select(null); },
  };
  canvas.addEventListener("keydown", event => {
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  $("zoom-in").addEventListener("click", keys["+"]);
  $("zoom-out").addEventListener("click", keys["-"]);
  $("zoom-all").addEventListener("click", keys[0]);
  $("next-slice").addEventListener("click", keys.n);
  $("previous-slice").addEventListener("click", keys.p);
  $("only-waiting").addEventListener("change", event => { onlyWaiting = event.target.checked; redraw(); });
  $("show-gradients").addEventListener("change", event => { withGradients = event.target.checked; redraw(); });
  const known = lanes.flatMap(lane => lane.starts.length ? [lane.starts[0][STEP], lane.starts.at(-1)[STEP]] : []);
  $("step-form").addEventListener("submit", event => {
    event.preventDefault();
    const input = $("step-number"), step = Number(input.value.trim() || NaN), found = Number.isInteger(step) && span(step);
    const problem = found ? "" : known.length ? `Steps ${Math.min(...known)} to ${Math.max(...known)} are recorded.` : "No step is recorded.";
    input.setCustomValidity(problem);
    if (!found) return input.reportValidity();
    const margin = (found[1] - found[0]) * .04;
    show(found[0] - margin, found[1] + margin);
  });
  $("step-number").addEventListener("input", event => event.target.setCustomValidity(""));

  $("timeline-note").textContent = `${plural(total, "record")} of ${ranks.length < world.size ? `the ${plural(ranks.length, "rank")} in the process of rank 0` : ranksText}, ${micros(end - begin)} in all. ` +
    (lost ? `These are the last: ${count(lost)} older ones are no longer kept. ` : "") +
    (hasBeside ? "Under each rank lies the lane of its communication thread. " : "") + "Hatched is what a rank only waited, for the last one to arrive.";
  const used = new Set(tracks.filter(it => it.name === "phases").flatMap(it => [...new Set(it.style)]));
  const buckets = new Set(tracks.flatMap(it => [...new Set(it.style)]).filter(it => it >= operations.length).map(it => (it - operations.length) / 2 - 1));
  const shownBuckets = [...buckets].filter(it => it >= 0).sort((a, b) => a - b);
  legend($("timeline-legend"), [
    ...[...used].sort((a, b) => a - b).map(it => [swatch(tint(operations[it])), operations[it]]),
    ...shownBuckets.map(it => [swatch(bucketHue(it)), bucketName(it)]),
    ...(buckets.has(-1) ? [[swatch("var(--collective)"), "other collective"]] : []),
    ...(buckets.size ? [[swatch("", "hatched"), "waiting"]] : []),
    ...(open ? [[swatch("var(--bad)", "line"), "had not ended"]] : []),
  ]);
  if (!tracks.some(it => it.name === "gradients")) $("show-gradients").closest("label").remove();

  let before = null; // what was shown when printing began
  redraws.push(() => {
    if (onPaper && !before) { before = view; view = { from: begin, to: end }; }
    if (!onPaper && before) { view = before; before = null; }
    draw();
  });
  show(begin, end);
}
timeline();

// ---- Samples

function samplesOfEpochs() {
  const { dataset, batch_size: batch, complete, epochs } = data.samples;
  if (!epochs.length || !dataset) {
    $("samples-note").textContent = "No epoch has begun, so no rank has taken a sample.";
    $("samples-body").remove();
    return;
  }
  const canvas = $("grid"), TALLEST = 460;
  let epoch, takers, again, onlyRank = -1, chosen = null, layout;

  /** Looks through an epoch: who took each sample first, and which were taken again. */
  function choose(index) {
    epoch = epochs[index];
    takers = new Int32Array(dataset).fill(-1);
    again = new Set();
    epoch.ranks.forEach((list, rank) => {
      for (const sample of list) {
        if (!(sample >= 0 && sample < dataset)) continue;
        if (takers[sample] >= 0) again.add(sample); else takers[sample] = rank;
      }
    });
    const missing = takers.reduce((sum, rank) => sum + (rank < 0), 0), seen = dataset - missing;
    const repeated = [...again].sort((a, b) => a - b);
    const some = repeated.length > 12 ? `${repeated.slice(0, 12).join(", ")}, \u2026` : repeated.join(", ");
    $("samples-note").textContent = [
      `Epoch ${epoch.epoch}: of ${count(dataset)} samples ${seen === dataset ? "each" : count(seen)} ${seen === dataset || seen === 1 ? "was" : "were"} dealt to a rank,`,
      again.size ? `${count(seen - again.size)} to one only and ${count(again.size)} more than once (${some}).` : seen === dataset && !alone ? "and to one only." : "none of them twice.",
      missing && complete ? `${count(missing)} ${missing === 1 ? "was" : "were"} not${outcome.kind === "done" ? "" : ": the run ended before"}.` : "",
      complete ? "" : "Only the first that each rank takes are kept here.",
    ].filter(Boolean).join(" ");
    $("epoch").value = index;
    $("epoch-before").disabled = index === 0;
    $("epoch-after").disabled = index === epochs.length - 1;
    const first = list => list.length > 10 ? `${list.slice(0, 10).join(", ")}, \u2026` : list.join(", ");
    $("sample-counts").replaceChildren(table("Samples of each rank in this epoch",
      ["rank", "samples", "batches", { cell: "in this order", class: "left" }],
      epoch.ranks.map((list, rank) => [[swatch(hue(rank)), ` ${rank}`], exact(list.length, count(list.length)), count(Math.ceil(list.length / batch)), { class: "left name", cell: first(list) }])));
    chosen = null;
    $("sample").textContent = "";
    draw();
  }

  function draw() {
    const wide = widthOf(canvas);
    // The largest cells that fit; where not even the smallest do, one stands for several samples.
    let cell = 18, group = 1;
    const columnsOf = () => Math.floor(wide / cell);
    while (cell > 2 && Math.ceil(dataset / columnsOf()) * cell > TALLEST) cell--;
    while (Math.ceil(dataset / group / columnsOf()) * cell > TALLEST) group++;
    const columns = Math.min(columnsOf(), Math.ceil(dataset / group)), rows = Math.ceil(dataset / group / columns);
    layout = { cell, group, columns };
    const context = sized(canvas, wide, rows * cell);
    context.fillStyle = rgb("var(--bg)");
    context.fillRect(0, 0, wide, rows * cell);
    // One pixel a cell, then enlarged: a million are as quick as a thousand.
    const small = document.createElement("canvas");
    small.width = columns;
    small.height = rows;
    const pixels = new ImageData(columns, rows), none = resolve("var(--grid)"), colours = epoch.ranks.map((_, rank) => resolve(hue(rank)));
    for (let at = 0; at * group < dataset; at++) {
      let rank = takers[at * group];
      for (let i = 1; i < group && rank < 0; i++) rank = takers[at * group + i] ?? -1;
      pixels.data.set(rank < 0 || (onlyRank >= 0 && !tookIt(rank, at * group)) ? none : colours[onlyRank >= 0 ? onlyRank : rank], at * 4);
      pixels.data[at * 4 + 3] = 255;
    }
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, columns * cell, rows * cell);
    context.fillStyle = rgb("var(--bg)");
    for (let i = 1; cell > 4 && i <= columns; i++) context.fillRect(i * cell - 1, 0, 1, rows * cell);
    for (let i = 1; cell > 4 && i <= rows; i++) context.fillRect(0, i * cell - 1, wide, 1);
    const frame = (sample, colour, line) => {
      const at = Math.floor(sample / group), size = Math.max(cell - (cell > 4 ? 1 : 0), 5);
      context.strokeStyle = rgb(colour);
      context.lineWidth = line;
      context.strokeRect(at % columns * cell + line / 2, Math.floor(at / columns) * cell + line / 2, size - line, size - line);
    };
    if (again.size <= 5000) again.forEach(sample => frame(sample, "var(--ink)", cell > 8 ? 2 : 1.5));
    if (chosen !== null) frame(chosen, "var(--select)", 3);
  }
  const tookIt = (rank, sample) => rank === onlyRank || (again.has(sample) && epoch.ranks[onlyRank].includes(sample));

  function tell(sample) {
    const taken = epoch.ranks.flatMap((list, rank) => {
      const found = [];
      for (let at = list.indexOf(sample); at >= 0; at = list.indexOf(sample, at + 1)) {
        found.push(`rank ${rank} takes it as number ${count(at + 1)} (batch ${Math.floor(at / batch)}, place ${at % batch})`);
      }
      return found;
    });
    return [`sample ${sample}`, ...(taken.length ? taken : [complete ? "no rank takes it" : "not among those that are kept"])].join("\n");
  }
  const mark = sample => {
    if (chosen === sample) return;
    chosen = sample;
    if (sample !== null) $("sample").textContent = tell(sample).replace("\n", ": ").replaceAll("\n", "; ");
    draw();
  };
  const show = explore(canvas, {
    at(x, y) {
      const column = Math.floor(x / layout.cell), sample = (Math.floor(y / layout.cell) * layout.columns + column) * layout.group;
      return column >= 0 && column < layout.columns && sample >= 0 && sample < dataset ? sample : null;
    },
    next(sample, dx, dy) {
      if (sample === null) return 0;
      const to = sample + (dx + dy * layout.columns) * layout.group;
      return to >= 0 && to < dataset ? to : sample;
    },
    where: sample => {
      const at = Math.floor(sample / layout.group);
      return [at % layout.columns * layout.cell + layout.cell / 2, (Math.floor(at / layout.columns) + 1) * layout.cell];
    },
    text: tell,
    mark,
  });

  $("epoch").append(...epochs.map((it, i) => el("option", { value: i }, String(it.epoch))));
  $("epoch").addEventListener("change", event => choose(Number(event.target.value)));
  $("epoch-before").addEventListener("click", () => choose(epochs.indexOf(epoch) - 1));
  $("epoch-after").addEventListener("click", () => choose(epochs.indexOf(epoch) + 1));
  $("only-rank").append(el("option", { value: -1 }, "all"), ...epochs[0].ranks.map((_, rank) => el("option", { value: rank }, String(rank))));
  $("only-rank").addEventListener("change", event => { onlyRank = Number(event.target.value); draw(); });
  $("sample-form").addEventListener("submit", event => {
    event.preventDefault();
    const input = $("sample-number"), sample = Number(input.value.trim() || NaN);
    const good = Number.isInteger(sample) && sample >= 0 && sample < dataset;
    input.setCustomValidity(good ? "" : `Samples are numbered from 0 to ${dataset - 1}.`);
    if (!good) return input.reportValidity();
    show(sample);
  });
  $("sample-number").addEventListener("input", event => event.target.setCustomValidity(""));
  legend($("samples-legend"), [
    ...epochs[0].ranks.map((_, rank) => [swatch(hue(rank)), rankName(rank)]),
    [swatch("var(--grid)"), complete ? "no rank" : "not kept here"],
    [el("span", { class: "swatch", style: { border: "2px solid var(--ink)" } }), "more than once"],
  ]);
  redraws.push(() => { draw(); hideTip(); });
  choose(0);
}

// ---- Bucket plan

function bucketPlan() {
  const { parameters } = model, known = parameters.some(it => it.bucket != null), sizes = model.buckets;
  if (!parameters.length) {
    $("buckets-note").textContent = "The model is not known: the run ended before it was built.";
    return;
  }
  const colour = bucket => bucket == null ? "var(--other)" : hue(bucket), all = sum(parameters.map(it => it.bytes));
  $("buckets-note").textContent = `${plural(parameters.length, "parameter")}, ${bytes(all)}` + (known
    ? `, in ${plural(sizes.length, "bucket")}. Gradients of a bucket are averaged together, as soon as backward has them all: it goes through the model from its end, so bucket 0 holds the last ones.`
    : ". Which bucket each is in was not settled when the run ended.");
  const shape = it => it.shape.length ? it.shape.join(" \u00d7 ") : "one number";
  const members = sizes.map((_, bucket) => parameters.filter(it => it.bucket === bucket));
  const padding = bucket => sizes[bucket] - sum(members[bucket].map(it => it.bytes));
  const strips = [strip("The model, as it is written", parameters.map(it => ({
    size: it.bytes, colour: colour(it.bucket), name: it.name,
    text: `${it.name}\n${shape(it)}, ${bytes(it.bytes)}${it.bucket == null ? "" : `, bucket ${it.bucket}`}`,
  })))];
  if (sizes.length) strips.push(strip("The buckets, in the order in which they are averaged", sizes.map((size, bucket) => ({
    size, colour: colour(bucket), name: String(bucket),
    text: `bucket ${bucket}: ${bytes(size)}, ${plural(members[bucket].length, "parameter")}${padding(bucket) ? `\n${bytes(padding(bucket))} of it between them, so that each begins at a round address` : ""}`,
  }))));
  $("plan").append(...strips.flat());
  $("parameters").append(table("All parameters", ["parameter", "shape", "bytes", "of all", { cell: "bucket", class: "left" }],
    parameters.map(it => [{ class: "name", cell: it.name }, shape(it), exact(it.bytes, bytes(it.bytes)), percent(all ? it.bytes / all : 0),
      { class: "left", cell: it.bucket == null ? "\u2013" : [swatch(colour(it.bucket)), ` ${it.bucket}`] }]), null, "tall"));
}

/** Blocks as wide as their bytes, though none so narrow that it is not seen. */
function strip(title, blocks) {
  const all = sum(blocks.map(it => it.size)) || 1, least = Math.min(.006, .5 / blocks.length);
  const shares = blocks.map(it => Math.max(least, it.size / all)), together = sum(shares);
  const lefts = [];
  shares.reduce((left, share, i) => { lefts[i] = left; return left + share / together; }, 0);
  const spans = blocks.map((it, i) => el("span", { style: { left: `${lefts[i] * 100}%`, width: `${shares[i] / together * 100}%`, background: it.colour } },
    shares[i] / together > .035 ? it.name : ""));
  const node = el("div", { class: "plan", tabindex: 0, role: "group", "aria-label": `${title}; arrow keys go from block to block` }, spans);
  explore(node, {
    at: x => Math.max(0, lefts.findLastIndex(left => left * node.clientWidth <= x)),
    next: (i, dx, dy) => i === null ? 0 : Math.max(0, Math.min(blocks.length - 1, i + dx + dy)),
    where: i => [(lefts[i] + shares[i] / together / 2) * node.clientWidth, node.clientHeight],
    text: i => blocks[i].text,
    mark: chosen => spans.forEach((span, i) => span.classList.toggle("chosen", i === chosen)),
  });
  redraws.push(() => spans.forEach((span, i) => { span.style.color = inkOn(blocks[i].colour); }));
  return [el("h3", {}, title), node];
}

// ---- Bytes, replicas, options

function traffic() {
  const { sent, received, collectives } = data.traffic;
  const lines = [...Array(Math.max(sent.length, ...collectives.map(it => it.bytes.length))).keys()];
  const somewhere = !sent.length ? "How much was sent in all is counted at the end, to which this run did not come." : alone ? "One rank has nobody to send anything to." : sum(sent) ? `${bytes(sum(sent))} were sent in all.` : "Nothing was sent.";
  $("traffic-note").textContent = somewhere + (collectives.length ? " Beside each collective stand the bytes that a rank gave to it, and how often it was called." : "");
  if (!collectives.length && !sum(sent)) return;
  const told = n => n == null ? "\u2013" : exact(n, bytes(n));
  // Of several processes each knows the calls of its own ranks only.
  const most = Math.max(1, ...lines.map(rank => sum(collectives.map(it => it.bytes[rank] ?? 0))));
  const of = (it, rank) => it.bytes[rank] == null ? "\u2013" : [exact(it.bytes[rank], bytes(it.bytes[rank])), el("small", {}, `${count(it.calls[rank])}\u00d7`)];
  $("traffic-table").append(table("Bytes of each rank", ["rank", { cell: "share", class: "left share" }, "sent", "received", ...collectives.map((it, i) => [swatch(hue(i)), ` ${it.operation}`])],
    lines.map(rank => [String(rank), { class: "left share", cell: el("div", { class: "bar" }, collectives.map((it, i) =>
      el("i", { title: `${it.operation}: ${bytes(it.bytes[rank] ?? 0)}`, style: { background: hue(i), width: `${100 * (it.bytes[rank] ?? 0) / most}%` } }))) },
      told(sent[rank]), told(received[rank]), ...collectives.map(it => of(it, rank))]),
    ["all", { class: "left share", cell: "" }, sent.length ? bytes(sum(sent)) : "\u2013", received.length ? bytes(sum(received)) : "\u2013",
      ...collectives.map(it => [bytes(sum(it.bytes)), el("small", {}, `${count(sum(it.calls))}\u00d7`)])]));
}

function sameReplicas() {
  const often = replicas?.checked_every ? ` They were also compared every ${plural(replicas.checked_every, "step")} of the run.` : "";
  $("replicas-note").textContent = !replicas ? "The run ended before the ranks could compare their models." : alone ? "There is one rank, and so nothing to compare."
    : replicas.equal ? `After the last step all ${ranksText} hold the same model, bit for bit: the 64 bits that sum each up are the same.${often}`
    : `The ranks do not hold the same model: what follows from them can't be trusted.${often}`;
  if (!replicas) return;
  if (!replicas.equal) $("replicas-note").classList.add("bad");
  const votes = new Map();
  for (const hash of replicas.hashes) votes.set(hash, (votes.get(hash) ?? 0) + 1);
  const usual = [...votes].reduce((a, b) => b[1] > a[1] ? b : a)[0];
  $("replicas-table").append(table("Hashes of all ranks", ["rank", { cell: "device", class: "left" }, { cell: "hash", class: "left" }, { cell: "", class: "left" }],
    replicas.hashes.map((hash, rank) => [String(rank), { class: "left", cell: device(rank) }, { class: "left mono", cell: hash },
      { class: "left", cell: alone ? "" : hash === usual ? el("span", { class: "good" }, "the same") : el("strong", { class: "bad" }, "differs") }])));
}

samplesOfEpochs();
bucketPlan();
traffic();
sameReplicas();
facts($("option-list"), data.options.map(([name, value]) => [name, value]));
if (!data.options.length) $("options").append(el("p", { class: "lede" }, "None are known."));
$("colophon").append(`Made by ${data.program} with libtorch ${data.libtorch}. This page holds all it shows and asks no server for anything.`);

// ---- Another size, other light, paper

const drawAll = () => { resolved = new Map(); redraws.forEach(draw => draw()); };
let before = innerWidth;
addEventListener("resize", () => { if (innerWidth !== before) { before = innerWidth; drawAll(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
function toPaper(yes) {
  onPaper = yes;
  document.documentElement.classList.toggle("paper", yes);
  hideTip();
  drawAll();
}
addEventListener("beforeprint", () => toPaper(true));
addEventListener("afterprint", () => toPaper(false));
drawAll();
})();
