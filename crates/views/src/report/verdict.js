// The verdict at the top of the page: how the run went, what to try next, and which run it was.

// ---- Verdict

const { replicas } = data;
const alone = world.size === 1;
const ranksText = plural(world.size, "rank");
{
  const { kind, text } = outcome;
  const ran = data.steps != null && data.seconds != null;
  const how = ran ? `${plural(data.steps, "step")} on ${ranksText} in ${seconds(data.seconds)}` : `a run of ${ranksText}`;
  const titles = { done: how[0].toUpperCase() + how.slice(1), failed: "The run failed", stopped: "The run was stopped" };
  $("headline").textContent = titles[kind];
  document.title = `${kind}: ${how} - ddp-mp report`;
  $("program").textContent = data.program;
  const told = [];
  if (kind !== "done") told.push(text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : "."));
  if (kind !== "done" && ran) told.push(`By then: ${how}.`);
  if (replicas && !alone) {
    told.push(replicas.equal ? "All replicas hold the same bits." : "The replicas do not hold the same parameters.");
  }
  if (verdict.straggler) told.push(`Rank ${verdict.straggler.rank} was the straggler.`);
  $("subtitle").textContent = told.join(" ");
  if (kind === "failed" || replicas?.equal === false) $("subtitle").classList.add("bad");

  const straggler = verdict.straggler, best = data.validation.findLast(it => it.best);
  const where = { step: "before it asked for data", outside: "outside of its steps" }[straggler?.phase] ?? `in ${straggler?.phase}`;
  const figures = [
    verdict.outside_collectives != null && ["Time outside collectives",
      exact(verdict.outside_collectives, percent(verdict.outside_collectives)),
      `of the steps of ${ranksText}; the rest is communication and waiting`],
    verdict.overlapped != null && ["Overlapped share", exact(verdict.overlapped, percent(verdict.overlapped)),
      "of communication ran while autograd computed"],
    straggler && ["Straggler", exact(straggler.rank, rankName(straggler.rank)),
      `${seconds(straggler.phase_seconds)} longer than the others ${where}; they waited ${seconds(straggler.seconds)} for it`],
    replicas && !alone && ["Replicas",
      el("span", { class: replicas.equal ? "good" : "bad" }, replicas.equal ? "equal" : "differ"),
      replicas.equal ? `all ${ranksText} hold the same bits` : "which do, is shown below"],
    (data.loss != null || kind === "done") && ["Loss", exact(data.loss, number(data.loss)),
      "mean of the last epoch, over all ranks"],
    best && ["Best validation", exact(best.loss, number(best.loss)),
      `at step ${count(best.step)}${best.accuracy == null ? "" : `, with ${percent(best.accuracy)} correct`}`],
    data.us_per_step != null && ["Time of a step", exact(data.us_per_step, micros(data.us_per_step)),
      "on average, everything included"],
  ].filter(Boolean);
  $("figures").replaceChildren(...figures.map(([term, value, note]) =>
    el("div", {}, el("dt", {}, term), el("dd", {}, value), el("dd", { class: "note" }, note))));

  $("advice").append(el("h3", {}, "What to try next"), verdict.advice.length
    ? el("ul", {}, verdict.advice.map(line => el("li", {}, line)))
    : el("p", {}, kind === "failed"
      ? "Look at the end of the timeline: there is what each rank was doing when the run failed."
      : "Nothing stands out in this run."));

  const columns = ["step", "data", "forward", "backward", "optimizer", "save", "collectives"];
  const colour = column => column === "collectives" ? "var(--collective)" : tint(column);
  const most = Math.max(...verdict.phases.map(it => sum(columns.map(column => it[column]))));
  if (verdict.phases.length) {
    $("phases").append(el("h3", {}, "Where the time of each rank went"), table("Time of each rank in each phase",
      ["rank", SHARE, ...columns.map(it => [swatch(colour(it)), " ", it])],
      verdict.phases.map((it, rank) => [
        String(rank),
        bar(columns.map(name => ({ name, value: it[name], colour: colour(name) })), most, seconds),
        ...columns.map(column => exact(it[column], seconds(it[column]))),
      ])),
      el("p", { class: "hint" }, "Collectives, including waiting, are counted separately from the phase they started in. ",
        "\u201cstep\u201d is the time before a rank requests data."));
  }
}

// ---- What ran

{
  const numbers = model.parameters.map(it => it.shape.reduce((a, b) => a * b, 1));
  $("command").textContent = data.command;
  facts($("facts"), [
    ["outcome", outcome.kind],
    ["began", data.began.replace("T", " ").replace("Z", " UTC")],
    ["ranks", `${world.size} on ${plural(world.nnodes, "machine")}`],
    [world.devices.length < world.size ? "devices of rank 0's process" : "devices", [...world.devices.slice(0, 8), ...(world.devices.length > 8 ? ["\u2026"] : [])].join(", ")],
    ["backend", world.backend],
    ["model", `${model.name}, ${plural(sum(numbers), "number")} in ${plural(numbers.length, "parameter")}`],
    ["samples", `${count(data.samples.dataset)}, ${data.samples.batch_size} a step on each rank`],
    ["libtorch", data.libtorch],
    ["parameters at the end", data.parameters_hash && el("span", { class: "mono" }, data.parameters_hash)],
  ]);
}
