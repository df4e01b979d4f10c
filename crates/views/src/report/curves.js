// Loss, accuracy, time of a step and learning rate over the steps, as SVG.

/**
 * A chart of lines over the steps. A line is {name, colour, points: [[step, value or null, epoch, note]], dots}; `format`
 * writes a value, and `within` is what the axis has at least. Returns the figure, whose `log(yes)` chooses the scale.
 */
function chart(title, lines, format, within) {
  const HEIGHT = 210, LEFT = 58, TOP = 10, BOTTOM = 26;
  const label = `${title} over the steps; arrow keys read the values`;
  const drawing = svg("svg", { tabindex: 0, role: "img", "aria-label": label });
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
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const first = steps[0], last = Math.max(steps.at(-1), first + 1);
    if (!values.length) [low, high] = logarithmic ? [.1, 1] : [0, 1];
    if (low === high) {
      const room = Math.abs(low || 1) * .1;
      [low, high] = logarithmic ? [low / 2, high * 2] : [low - room, high + room];
    }
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
    const write = (x, y, anchor, text) => svg("text", { x, y, "text-anchor": anchor }, text);
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.replaceChildren(
      ...marks.map(mark => svg("line", { class: "gridline", x1: LEFT, x2: right, y1: y(mark), y2: y(mark) })),
      ...marks.map(mark => write(LEFT - 8, y(mark) + 4, "end", format(Number(mark.toPrecision(12))))),
      svg("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }),
      write(LEFT - 22, HEIGHT - 8, "end", "step"),
      ...ticks(first, last, width / 110).filter(Number.isInteger)
        .map(mark => write(x(mark), HEIGHT - 8, "middle", count(mark))));
    if (!values.length) drawing.append(write((LEFT + right) / 2, bottom / 2, "middle", "nothing that could be drawn"));
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
      const told = [`step ${count(steps[part])}, epoch ${points.find(Boolean)[2]}`];
      points.forEach((point, i) => {
        if (!point) return;
        const [, value, , note] = point;
        told.push(`${lines[i].name}: ${value == null ? "no number" : format(value, true)}${note ? ` (${note})` : ""}`);
      });
      return told.join("\n");
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
    if (piece.length > 1) drawn.push(svg("polyline", { style: colour, points: piece.join(" ") }));
    else if (piece.length && !line.dots) drawn.push(svg("circle", { style: solid, cx: piece[0][0], cy: piece[0][1], r: 2.5 }));
    piece = [];
  };
  const endGap = to => {
    const style = { stroke: "var(--bad)", strokeWidth: 3 };
    if (gap !== null) drawn.push(svg("line", { style, x1: gap, x2: Math.max(to, gap + 3), y1: bottom, y2: bottom }));
    gap = null;
  };
  for (let i = 0; i < line.points.length; i += per) {
    const some = line.points.slice(i, i + per), good = some.filter(point => shown(point[1]));
    const from = x(some[0][0]);
    if (good.length < some.length) endPiece();
    if (some.some(point => point[1] == null)) gap ??= from;
    else endGap(from);
    const least = good.reduce((a, b) => b[1] < a[1] ? b : a, good[0]);
    const most = good.reduce((a, b) => b[1] > a[1] ? b : a, good[0]);
    const kept = good.length > 2 ? [least, most].sort((a, b) => a[0] - b[0]) : good;
    piece.push(...kept.map(point => [x(point[0]).toFixed(2), y(point[1]).toFixed(2)]));
  }
  endPiece();
  endGap(x(line.points.at(-1)?.[0] ?? 0));
  if (line.dots && line.points.length <= 200) {
    for (const point of line.points.filter(point => shown(point[1]))) {
      const ring = { fill: "var(--bg)", stroke: line.colour, strokeWidth: 2 };
      const best = point[3] ? { r: 4.5, style: ring } : { r: 3, style: solid };
      drawn.push(svg("circle", { cx: x(point[0]), cy: y(point[1]), ...best }));
    }
  }
  return drawn;
}

{
  const { train } = data, metric = name => `metric ${name}`;
  const validation = data.validation.map(it => ({ ...it, ...Object.fromEntries(
    Object.entries(it.metrics ?? {}).map(([name, value]) => [metric(name), value])) }));
  const points = (list, field, note) => list.filter(it => it[field] !== undefined)
    .map(it => [it.step, it[field], it.epoch, note?.(it)]);
  const best = validation.findLast(it => it.best);
  const isBest = it => it === best ? "the best" : "";
  const value = (x, full) => digits(x, full ? 6 : 4);
  const training = field => ({ name: "training", colour: "var(--hue-0)", points: points(train, field) });
  const tried = field =>
    ({ name: "validation", colour: "var(--hue-5)", dots: true, points: points(validation, field, isBest) });
  const names = new Set(validation.flatMap(it => Object.keys(it.metrics ?? {})));
  const charts = [
    ["Loss", [training("loss"), tried("loss")], value, []],
    ["Accuracy", [tried("accuracy")], percent, [0, 1]],
    ...[...names].map(name => [name, [tried(metric(name))], value, []]),
    ["Time of a step", [training("step_us")], micros, [0]],
    ...(new Set(train.map(it => it.lr)).size > 1 ? [["Learning rate", [training("lr")], value, [0]]] : []),
  ].map(([title, lines, ...how]) => [title, lines.filter(line => line.points.length), ...how])
    .filter(([, lines]) => lines.length);
  const figures = charts.map(it => chart(...it));
  $("charts").replaceChildren(...figures);
  const loss = figures[charts.findIndex(it => it[0] === "Loss")];
  $("log-loss").addEventListener("change", event => loss.log(event.target.checked));
  if (!loss) $("log-loss").closest("p").remove();
  if (!charts.length) {
    const why = "There are none: the run has not come to the first step that is told of.";
    $("charts").append(el("p", { class: "lede" }, why));
  }
}
