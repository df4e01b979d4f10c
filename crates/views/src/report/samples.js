// The samples of each rank: one cell for each sample.

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
    const were = n => n === dataset ? "each was" : n === 1 ? "1 was" : `${count(n)} were`;
    $("samples-note").textContent = [
      `Epoch ${epoch.epoch}: of ${count(dataset)} samples ${were(seen)} dealt to a rank,`,
      again.size ? `${count(seen - again.size)} to one only and ${count(again.size)} more than once (${some}).`
        : seen === dataset && !alone ? "and to one only." : "none of them twice.",
      missing && complete ? `${were(missing)} not${outcome.kind === "done" ? "" : ": the run ended before"}.` : "",
      complete ? "" : "Only the first that each rank takes are kept here.",
    ].filter(Boolean).join(" ");
    $("epoch").value = index;
    $("epoch-before").disabled = index === 0;
    $("epoch-after").disabled = index === epochs.length - 1;
    const first = list => list.length > 10 ? `${list.slice(0, 10).join(", ")}, \u2026` : list.join(", ");
    $("sample-counts").replaceChildren(table("Samples of each rank in this epoch",
      ["rank", "samples", "batches", { cell: "in this order", class: "left" }],
      epoch.ranks.map((list, rank) => [
        [swatch(hue(rank)), ` ${rank}`],
        exact(list.length, count(list.length)),
        count(Math.ceil(list.length / batch)),
        { class: "left name", cell: first(list) },
      ])));
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
    const pixels = new ImageData(columns, rows);
    const none = resolve("var(--grid)"), colours = epoch.ranks.map((_, rank) => resolve(hue(rank)));
    for (let at = 0; at * group < dataset; at++) {
      let rank = takers[at * group];
      for (let i = 1; i < group && rank < 0; i++) rank = takers[at * group + i] ?? -1;
      if (onlyRank >= 0 && rank >= 0) rank = tookIt(rank, at * group) ? onlyRank : -1;
      pixels.data.set(rank < 0 ? none : colours[rank], at * 4);
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
    if (!taken.length) taken.push(complete ? "no rank takes it" : "not among those that are kept");
    return [`sample ${sample}`, ...taken].join("\n");
  }
  const mark = sample => {
    if (chosen === sample) return;
    chosen = sample;
    if (sample !== null) $("sample").textContent = tell(sample).replace("\n", ": ").replaceAll("\n", "; ");
    draw();
  };
  const show = explore(canvas, {
    at(x, y) {
      const column = Math.floor(x / layout.cell), row = Math.floor(y / layout.cell);
      const sample = (row * layout.columns + column) * layout.group;
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
  const ranks = epochs[0].ranks.map((_, rank) => el("option", { value: rank }, String(rank)));
  $("only-rank").append(el("option", { value: -1 }, "all"), ...ranks);
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
samplesOfEpochs();
