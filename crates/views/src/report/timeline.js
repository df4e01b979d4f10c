// The timeline: the operations of each rank on a canvas. The user can zoom and move it, and point at an operation.

/** The fields of an entry, by their index. */
const [OPERATION, BEGIN, DURATION, SEQUENCE, STEP, BUCKET, BYTES, TRACK, WAITED, WAITED_FOR, PLACE] = Array(11).keys();

function timeline() {
  const { operations, may_wait: isCollective, places, ranks, lost } = data.timeline;
  const total = sum(ranks.map(it => it.entries.length));
  if (!total) {
    $("timeline-note").textContent = "Nothing was recorded.";
    $("timeline-body").remove();
    return;
  }
  const gradient = operations.indexOf("gradient");
  let begin = Infinity, last = 0, open = false;
  for (const { entries } of ranks) {
    for (const it of entries) {
      begin = Math.min(begin, it[BEGIN]);
      last = Math.max(last, it[BEGIN] + (it[DURATION] ?? 0));
      open ||= it[DURATION] === null;
    }
  }
  // An unfinished operation extends to the end of the run.
  const beyond = Math.max(data.timeline.end ?? 0, last + Math.max(1, (last - begin) * .04));
  const end = open ? beyond : Math.max(last, begin + 1);
  const endOf = it => it[DURATION] === null ? end : it[BEGIN] + it[DURATION];

  // Styles are numbers: for each operation one, for each bucket one to work and one to wait; -1 is no bucket.
  const bucketCount = Math.max(model.buckets.length, 1 + Math.max(-1, ...model.parameters.map(it => it.bucket ?? -1)),
    ...ranks.map(({ entries }) => entries.reduce((most, it) => Math.max(most, it[BUCKET] + 1), 0)));
  const bucketHue = bucket => bucket >= 0 ? hue(bucket) : "var(--collective)";
  const working = bucket => operations.length + 2 * (bucket + 1), waiting = bucket => working(bucket) + 1;
  const styles = working(bucketCount);
  const faded = style => style < operations.length || (style - operations.length) % 2 === 0;
  let paints = [], inks = [];

  // A track is what lies in one row: sorted, with columns of its own, so that 20,000 slices are run through quickly.
  const [HIGH, LOW, GAP] = ranks.length > 8 ? [22, 9, 6] : [34, 14, 12], RULER = 40, GUTTER = 56;
  // Operations that overlap the rank's own work have tracks of their own. The last track has all that do not fit.
  const trackOf = it => Math.min(it[TRACK], 6);
  const extraTracks = Math.max(0, ...ranks.map(it => it.entries.reduce((most, entry) => Math.max(most, trackOf(entry)), 0)));
  const pitch = HIGH + extraTracks * (LOW + 2) + GAP, height = RULER + pitch * ranks.length;
  const tracks = [];
  const lanes = ranks.map((rank, lane) => {
    const top = RULER + lane * pitch;
    const add = (name, entries, top, height) => {
      entries = [...entries].sort((a, b) => a[BEGIN] - b[BEGIN] || endOf(b) - endOf(a));
      const starts = Float64Array.from(entries, it => it[BEGIN]), ends = Float64Array.from(entries, endOf);
      // How far the slices up to this one reach: this rises, and so can be searched by halving.
      const reach = ends.slice();
      for (let i = 1; i < reach.length; i++) reach[i] = Math.max(reach[i], reach[i - 1]);
      const style = Int32Array.from(entries, it => isCollective[it[OPERATION]] ? working(it[BUCKET]) : it[OPERATION]);
      const waited = Float64Array.from(entries, it =>
        isCollective[it[OPERATION]] ? Math.min(it[WAITED], endOf(it) - it[BEGIN]) : 0);
      const track = { name, rank, lane, entries, top, height, starts, ends, reach, style, waited };
      if (entries.length) tracks.push(track);
      return track;
    };
    const own = rank.entries.filter(it => !it[TRACK] && it[OPERATION] !== gradient);
    const phases = add("phases", own.filter(it => !isCollective[it[OPERATION]]), top, HIGH);
    phases.inner = add("collectives", own.filter(it => isCollective[it[OPERATION]]), top + HIGH * .42, HIGH * .58);
    // Above the lane, where they hide no name.
    add("gradients", rank.entries.filter(it => !it[TRACK] && it[OPERATION] === gradient), top - 5, 5);
    for (let n = 1; n <= extraTracks; n++) {
      add(`track ${n}`, rank.entries.filter(it => trackOf(it) === n), top + HIGH + 2 + (n - 1) * (LOW + 2), LOW);
    }
    const starts = phases.entries.filter((it, i, all) => it[STEP] >= 0 && (!i || all[i - 1][STEP] !== it[STEP]));
    return { rank, top, starts };
  });
  const PER_STEP = ["step", "data", "forward", "backward", "optimizer"];
  /** From when to when a step lasted, on all ranks. */
  function span(step) {
    let from = Infinity, to = -Infinity;
    for (const { name, entries } of tracks) {
      if (name !== "phases") continue;
      for (const it of entries) {
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
  /** Gradients are marks without a length: too many of them would tell nothing. */
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
    const marks = ticks(view.from, view.to, (width - GUTTER) / 110);
    const by = marks.length > 1 ? marks[1] - marks[0] : view.to - view.from;
    const [size, unit] = TIMES.find(([size]) => view.to >= size && by >= size / 1000) ?? TIMES.at(-1);
    const places = Math.max(0, Math.min(6, -Math.floor(Math.log10(by / size) + 1e-9)));
    const exactly = { minimumFractionDigits: places, maximumFractionDigits: places };
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
      const text = `${(mark / size).toLocaleString("en", exactly)} ${unit}`;
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
    const { starts, ends, entries, top, height, inner } = track;
    for (let i = first; i < beyond; i++) {
      if ((ends[i] - starts[i]) * scale() < 4) continue;
      const it = entries[i], from = Math.max(GUTTER, xOf(starts[i])), to = Math.min(width, xOf(ends[i]));
      context.fillStyle = rgb("var(--bg)");
      if (xOf(starts[i]) > GUTTER) context.fillRect(from - .5, top, 1, height);
      if (it[DURATION] === null) {
        context.fillStyle = rgb("var(--bad)");
        context.fillRect(to - 3, top, 3, height);
      }
      if (height < 11) continue;
      // A phase with collectives in it has its name above them.
      const covered = inner?.starts[firstReaching(inner, starts[i])] < ends[i];
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
      if (track.waited[i] > 0) {
        const whom = it[WAITED_FOR] >= 0 ? ` for rank ${it[WAITED_FOR]}` : "";
        write(`waits${whom}`, from, busy, style + 1) || write("waits", from, busy, style + 1);
      }
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
        let last = -Infinity;
        for (let i = firstStep(lane, view.from); i < lane.starts.length && lane.starts[i][BEGIN] < view.to; i++) {
          const x = Math.round(xOf(lane.starts[i][BEGIN])) - .5;
          if (x < last + 4) continue; // in a crowd of short steps a few lines do
          context.fillRect(x, lane.top, 1, HIGH);
          last = x;
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

  // Returns the entries under a point, the uppermost first.
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
    const it = track.entries[i], operation = operations[it[OPERATION]];
    if (operation !== "gradient") return `${operation} #${it[SEQUENCE]}`;
    return `gradient of ${model.parameters[it[SEQUENCE]]?.name ?? `parameter ${it[SEQUENCE]}`}`;
  }
  const waitedFor = it => `${micros(it[WAITED])}${it[WAITED_FOR] >= 0 ? ` for rank ${it[WAITED_FOR]}` : ""}`;
  const ofSamples = it => operations[it[OPERATION]] === "forward"; // which takes samples, and not bytes
  const amount = it => ofSamples(it) ? plural(it[BYTES], "sample") : bytes(it[BYTES]);
  const lasted = it => it[DURATION] === null ? "had not ended" : micros(it[DURATION]);
  function tell(slice) {
    const it = slice.track.entries[slice.i];
    return [
      `${name(slice)} on rank ${slice.track.rank.rank}`,
      lasted(it),
      it[STEP] >= 0 && `step ${it[STEP]}`,
      it[BUCKET] >= 0 && bucketName(it[BUCKET]),
      it[BYTES] > 0 && amount(it),
      it[WAITED] > 0 && `waited ${waitedFor(it)}`,
    ].filter(Boolean).join("\n");
  }
  function select(slice) {
    selected = slice;
    if (!slice) { $("slice").replaceChildren(); redraw(); return; }
    const { track, i } = slice, it = track.entries[i], collective = isCollective[it[OPERATION]];
    const since = (it[BEGIN] / 1000).toLocaleString("en", { maximumFractionDigits: 4 });
    facts($("slice"), [
      ["operation", name(slice)],
      ["rank", `${track.rank.rank} (${track.rank.device})`],
      ["step", it[STEP] >= 0 ? exact(it[STEP], String(it[STEP])) : null],
      ["bucket", it[BUCKET] >= 0 ? [swatch(bucketHue(it[BUCKET])), ` ${it[BUCKET]}`] : null],
      [ofSamples(it) ? "samples" : "bytes", it[BYTES] > 0 ? exact(it[BYTES], amount(it)) : null],
      [collective ? "arrived at" : "began at", exact(it[BEGIN], `${since}\u00a0ms`)],
      ["took", it[DURATION] === null ? lasted(it) : exact(it[DURATION], lasted(it))],
      ["waited", it[WAITED] > 0 ? exact(it[WAITED], waitedFor(it)) : collective && it[DURATION] !== null ? "for nobody" : null],
      ["thread", !it[TRACK] ? null : track.rank.on_gpu && it[TRACK] === 1 ? "the GPU" : "communication, beside the rank's own"],
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
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
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
    const input = $("step-number"), step = Number(input.value.trim() || NaN);
    const found = Number.isInteger(step) && span(step);
    const range = known.length
      ? `Steps ${Math.min(...known)} to ${Math.max(...known)} are recorded.`
      : "No step is recorded.";
    input.setCustomValidity(found ? "" : range);
    if (!found) return input.reportValidity();
    const margin = (found[1] - found[0]) * .04;
    show(found[0] - margin, found[1] + margin);
  });
  $("step-number").addEventListener("input", event => event.target.setCustomValidity(""));

  const whose = ranks.length < world.size ? `the ${plural(ranks.length, "rank")} in the process of rank 0` : ranksText;
  $("timeline-note").textContent = `${plural(total, "operation")} of ${whose}, ${micros(end - begin)} in all. ` +
    (lost ? `These are the last: ${count(lost)} older ones are no longer kept. ` : "") +
    (ranks.some(it => it.on_gpu) ? "The track under each rank is its GPU. "
      : extraTracks ? "The track under each rank is its communication thread. " : "") +
    "Hatched: waiting for the last rank to arrive.";
  const used = new Set(tracks.filter(it => it.name === "phases").flatMap(it => [...new Set(it.style)]));
  const buckets = new Set(tracks.flatMap(it => [...new Set(it.style)])
    .filter(it => it >= operations.length).map(it => (it - operations.length) / 2 - 1));
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
