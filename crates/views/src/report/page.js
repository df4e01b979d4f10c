// The other sections of the page: buckets, bytes, replicas, options. Also redraws for another size, theme, or print.

// ---- Bucket plan

const NONE = "\u2013";

function bucketPlan() {
  const { parameters } = model, known = parameters.some(it => it.bucket != null), sizes = model.buckets;
  if (!parameters.length) {
    $("buckets-note").textContent = "The model is not known: the run ended before it was built.";
    return;
  }
  const colour = bucket => bucket == null ? "var(--other)" : hue(bucket), all = sum(parameters.map(it => it.bytes));
  $("buckets-note").textContent = `${plural(parameters.length, "parameter")}, ${bytes(all)}` + (known
    ? `, in ${plural(sizes.length, "bucket")}. Gradients of a bucket are averaged together, as soon as backward has ` +
      "them all: it goes through the model from its end, so bucket 0 holds the last ones."
    : ". Which bucket each is in was not settled when the run ended.");
  const shape = it => it.shape.length ? it.shape.join(" \u00d7 ") : "one number";
  const members = sizes.map((_, bucket) => parameters.filter(it => it.bucket === bucket));
  const padding = bucket => sizes[bucket] - sum(members[bucket].map(it => it.bytes));
  const strips = [strip("The model, as it is written", parameters.map(it => ({
    size: it.bytes, colour: colour(it.bucket), name: it.name,
    text: `${it.name}\n${shape(it)}, ${bytes(it.bytes)}${it.bucket == null ? "" : `, bucket ${it.bucket}`}`,
  })))];
  const between = n => n ? `\n${bytes(n)} of it between them, so that each begins at a round address` : "";
  const blocks = sizes.map((size, bucket) => ({
    size, colour: colour(bucket), name: String(bucket),
    text: `bucket ${bucket}: ${bytes(size)}, ${plural(members[bucket].length, "parameter")}${between(padding(bucket))}`,
  }));
  if (blocks.length) strips.push(strip("The buckets, in the order in which they are averaged", blocks));
  $("plan").append(...strips.flat());
  $("parameters").append(table("All parameters", ["parameter", "shape", "bytes", "of all", left("bucket")],
    parameters.map(it => [
      { class: "name", cell: it.name },
      shape(it),
      exact(it.bytes, bytes(it.bytes)),
      percent(all ? it.bytes / all : 0),
      left(it.bucket == null ? NONE : [swatch(colour(it.bucket)), ` ${it.bucket}`]),
    ]), null, "tall"));
}

/** Blocks as wide as their bytes, though none so narrow that it is not seen. */
function strip(title, blocks) {
  const all = sum(blocks.map(it => it.size)) || 1, least = Math.min(.006, .5 / blocks.length);
  const shares = blocks.map(it => Math.max(least, it.size / all)), together = sum(shares);
  const lefts = [];
  shares.reduce((left, share, i) => { lefts[i] = left; return left + share / together; }, 0);
  const spans = blocks.map((it, i) => {
    const share = shares[i] / together;
    const style = { left: `${lefts[i] * 100}%`, width: `${share * 100}%`, background: it.colour };
    return el("span", { style }, share > .035 ? it.name : "");
  });
  const label = `${title}; arrow keys go from block to block`;
  const node = el("div", { class: "plan", tabindex: 0, role: "group", "aria-label": label }, spans);
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
  const amount = !sent.length ? "How much was sent in all is counted at the end, to which this run did not come."
    : alone ? "One rank has nobody to send anything to."
    : sum(sent) ? `${bytes(sum(sent))} were sent in all.` : "Nothing was sent.";
  $("traffic-note").textContent = amount + (collectives.length
    ? " Beside each collective stand the bytes that a rank gave to it, and how often it was called." : "");
  if (!collectives.length && !sum(sent)) return;
  const told = n => n == null ? NONE : exact(n, bytes(n));
  const times = n => el("small", {}, `${count(n)}\u00d7`);
  // Each process knows only the calls of its own ranks.
  const most = Math.max(1, ...lines.map(rank => sum(collectives.map(it => it.bytes[rank] ?? 0))));
  const shares = rank => collectives.map((it, i) => ({ name: it.operation, value: it.bytes[rank] ?? 0, colour: hue(i) }));
  const called = (it, rank) => it.bytes[rank] == null ? NONE : [told(it.bytes[rank]), times(it.calls[rank])];
  const all = list => list.length ? bytes(sum(list)) : NONE;
  $("traffic-table").append(table("Bytes of each rank",
    ["rank", SHARE, "sent", "received", ...collectives.map((it, i) => [swatch(hue(i)), ` ${it.operation}`])],
    lines.map(rank => [
      String(rank),
      bar(shares(rank), most, bytes),
      told(sent[rank]),
      told(received[rank]),
      ...collectives.map(it => called(it, rank)),
    ]),
    ["all", left(""), all(sent), all(received), ...collectives.map(it => [all(it.bytes), times(sum(it.calls))])]));
}

function sameReplicas() {
  const every = replicas?.checked_every;
  const often = every ? ` They were also compared every ${plural(every, "step")} of the run.` : "";
  $("replicas-note").textContent = !replicas ? "The run ended before the ranks could compare their models."
    : alone ? "There is one rank, and so nothing to compare."
    : replicas.equal ? `After the last step all ${ranksText} hold the same model, bit for bit: the 64 bits that sum each up ` +
      `are the same.${often}`
    : `The ranks do not hold the same model: what follows from them can't be trusted.${often}`;
  if (!replicas) return;
  if (!replicas.equal) $("replicas-note").classList.add("bad");
  const votes = new Map();
  for (const hash of replicas.hashes) votes.set(hash, (votes.get(hash) ?? 0) + 1);
  const usual = [...votes].reduce((a, b) => b[1] > a[1] ? b : a)[0];
  const same = hash => hash === usual ? el("span", { class: "good" }, "the same") : el("strong", { class: "bad" }, "differs");
  $("replicas-table").append(table("Hashes of all ranks", ["rank", left("device"), left("hash"), left("")],
    replicas.hashes.map((hash, rank) => [
      String(rank), left(device(rank)), { class: "left mono", cell: hash }, left(alone ? "" : same(hash)),
    ])));
}

bucketPlan();
traffic();
sameReplicas();
facts($("option-list"), data.options.map(([name, value]) => [name, value]));
if (!data.options.length) $("options").append(el("p", { class: "lede" }, "None are known."));
$("colophon").append(`Made by ${data.program} with libtorch ${data.libtorch}. ` +
  "This page holds all it shows and asks no server for anything.");

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
