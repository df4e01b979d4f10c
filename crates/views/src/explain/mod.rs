//! `--explain`: explains how a run trains, with the numbers of this run.

mod layout;
mod texts;

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Language, Printer, View};
use compare::{paragraph, table};
use engine::events::{Event, Observer, Probe, ProbedStep, RankStep};
use engine::optim::OptimizerLayout;
use layout::{number, numbers, samples, shown};
use texts::{Section, Texts};

/// What is known of a run before it begins.
#[derive(Debug, Clone)]
pub struct RunInfo {
    /// Number of ranks.
    pub world_size: usize,
    /// Number of processes.
    pub processes: usize,
    /// The communication backend.
    pub backend: &'static str,
    /// The model's name.
    pub model: &'static str,
    /// The random seed.
    pub seed: u64,
    /// `true` if rank 0 loads its first parameters from a file.
    pub starts_from_file: bool,
    /// Number of training samples.
    pub samples: usize,
    /// `true` if the samples are shuffled.
    pub shuffles: bool,
    /// `true` if samples that cannot be divided evenly among the ranks are dropped. Otherwise some are used twice.
    pub drops_last: bool,
    /// Batches per step.
    pub accumulate: u64,
    /// `true` if each rank multiplies its loss so that all samples count alike.
    pub exact_mean: bool,
    /// How the ranks keep the model.
    pub optimizer_layout: OptimizerLayout,
    /// Steps per epoch.
    pub steps_per_epoch: u64,
    /// The compressed form of gradients; `None` without compression.
    pub compression: Option<&'static str>,
    /// The optimizer's name.
    pub optimizer: String,
    /// `true` if the update is `weight - lr * gradient` and nothing else.
    pub is_plain: bool,
    /// Maximum norm of the gradients; `None` without clipping.
    pub max_grad_norm: Option<f64>,
}

/// An explanation of a run on stderr, by rank 0.
#[derive(Debug)]
pub struct Explain {
    explainer: Mutex<Explainer>,
    printer: Arc<Printer>,
}

impl Explain {
    /// Creates an explanation of the run that `run_info` describes.
    pub fn new(language: Language, run_info: RunInfo, printer: Arc<Printer>) -> Self {
        let texts = language.texts("explain");
        Self { explainer: Mutex::new(Explainer { texts, run_info, parameters: 0 }), printer }
    }
}

impl Observer for Explain {
    fn event(&self, event: &Event) -> anyhow::Result<()> {
        let explainer = || self.explainer.lock();
        let sections = match event {
            Event::Start(start) => {
                explainer().parameters = start.parameters;
                Vec::new()
            }
            Event::Probe(Probe::Begin { hashes, epoch, resumed }) => {
                explainer().begin(hashes, *epoch, *resumed)
            }
            Event::Probe(Probe::Step(step)) if step.index == 0 => explainer().first_step(step),
            Event::Probe(Probe::Step(step)) => explainer().second_step(step),
            Event::Probe(Probe::End { steps, hashes }) => explainer().end(*steps, hashes),
            _ => Vec::new(),
        };
        sections.iter().for_each(|section| self.printer.report(section));
        Ok(())
    }
}

impl View for Explain {}

/// What makes the sections of the explanation.
#[derive(Debug)]
struct Explainer {
    texts: Texts,
    run_info: RunInfo,
    /// Number of trained values, when the ranks have built the model.
    parameters: usize,
}

impl Explainer {
    /// Explains how the ranks connected, and that they begin with the same parameters. `hashes` has two 64-bit hashes
    /// per rank: of the parameters that it built, and of those that it begins with. `epoch` is the first epoch.
    /// `resumed` is the step of the checkpoint, `None` without one.
    fn begin(&self, hashes: &[(u64, u64)], epoch: u64, resumed: Option<u64>) -> Vec<String> {
        let were_same = hashes.iter().all(|hash| hash.0 == hashes[0].0);
        let headings = ["column_built", "column_start"].map(|key| self.text(key));
        let of_rank = |rank: usize| vec![hex(hashes[rank].0), hex(hashes[rank].1)];
        let lines = rank_table(&headings, hashes.len(), of_rank);
        vec![
            section(self.explain_rendezvous(), Vec::new()),
            section(self.explain_start(were_same, resumed), lines),
            section(self.explain_data(epoch), Vec::new()),
        ]
    }

    /// Explains the first step: how gradients are averaged, and the update.
    fn first_step(&self, step: &ProbedStep) -> Vec<String> {
        let mut lines = self.gradients(step, 4);
        lines.push(format!("  {}{}", self.text("by_hand"), mean(&step.ranks)));
        vec![
            section(self.explain_gradients(step), lines),
            section(self.explain_update(step), self.updates(step)),
        ]
    }

    /// Explains the second step, in short.
    fn second_step(&self, step: &ProbedStep) -> Vec<String> {
        let mut lines = self.gradients(step, 5);
        lines.extend(paragraph(&self.explain_remaining_steps()));
        vec![section(self.explain_next_step(step.step), lines)]
    }

    /// Explains the end, after `steps` steps of the whole run. `hashes` has a 64-bit hash of each rank's parameters.
    fn end(&self, steps: u64, hashes: &[u64]) -> Vec<String> {
        let mut lines = rank_table(&[], hashes.len(), |rank| vec![hex(hashes[rank])]);
        let are_same = hashes.iter().all(|hash| hash == &hashes[0]);
        lines.extend(paragraph(&self.explain_hashes(are_same)));
        vec![section(self.explain_end(steps), lines)]
    }

    /// Returns a table with a row per rank, and the first `columns` of: samples, loss, gradient, mean, new weight.
    fn gradients(&self, step: &ProbedStep, columns: usize) -> Vec<String> {
        let ranks = &step.ranks;
        let all = |value: fn(&RankStep) -> f64| ranks.iter().map(value).collect::<Vec<_>>();
        let losses = numbers(&all(|rank| rank.loss), 6);
        let gradients = [all(|rank| rank.local), all(|rank| rank.averaged)].concat();
        let gradients = numbers(&gradients, 6);
        let (locals, means) = gradients.split_at(ranks.len());
        let weights = numbers(&all(|rank| rank.after), 8);
        let count = ranks[0].num_samples;
        let count = ranks.iter().all(|rank| rank.num_samples == count).then_some(count);
        let of_rank = |rank: usize| {
            let mine = ranks[rank].num_samples;
            let listed = samples(&ranks[rank].samples, mine);
            let (listed, loss) = match (mine, count) {
                (0, _) => (NONE.into(), NONE.into()),
                (_, Some(_)) => (listed, losses[rank].clone()),
                (_, None) => (format!("{mine}: {listed}"), losses[rank].clone()),
            };
            let cells =
                [listed, loss, locals[rank].clone(), means[rank].clone(), weights[rank].clone()];
            cells[..columns].to_vec()
        };
        rank_table(&self.columns(count)[..columns], ranks.len(), of_rank)
    }

    /// Returns the factors of the losses of the first few ranks, such as `17 * 2 / 33, 16 * 2 / 33`; `None` without any.
    fn factors(&self, step: &ProbedStep) -> Option<String> {
        let ranks = step.ranks.len();
        let all: usize = step.ranks.iter().map(|rank| rank.count).sum();
        let factor = |rank: &RankStep| format!("{} * {ranks} / {all}", rank.count);
        let factors = step.ranks.iter().take(MAX_LISTED_RANKS).map(factor);
        let factors = factors.chain((ranks > MAX_LISTED_RANKS).then(|| "...".into()));
        (self.run_info.exact_mean && ranks > 1).then(|| factors.collect::<Vec<_>>().join(", "))
    }

    /// Returns a table of each rank's update.
    fn updates(&self, step: &ProbedStep) -> Vec<String> {
        let weights = step.ranks.iter().flat_map(|rank| [rank.before, rank.after]);
        let weights = numbers(&weights.collect::<Vec<_>>(), 8);
        let gradients: Vec<f64> = step.ranks.iter().map(|rank| rank.stepped_by).collect();
        let gradients = numbers(&gradients, 6);
        let lr = number(step.lr);
        let of_rank = |rank: usize| {
            let [before, after] = [&weights[2 * rank], &weights[2 * rank + 1]];
            let gradient = &gradients[rank];
            vec![match (self.run_info.is_plain, gradient.starts_with('-')) {
                (false, _) => format!("{before} -> {after}"),
                (true, false) => format!("{before} - {lr} * {gradient} = {after}"),
                (true, true) => format!("{before} - {lr} * ({gradient}) = {after}"),
            }]
        };
        rank_table(&[self.update_column()], step.ranks.len(), of_rank)
    }
}

/// Returns a section with its heading, its text, and the lines below that.
fn section([heading, text]: Section, lines: Vec<String>) -> String {
    [vec![heading], paragraph(&text), lines].concat().join("\n")
}

/// Formats the mean of the ranks' gradients as `(a + b) / 2 = c`; shortened for many ranks.
fn mean(ranks: &[RankStep]) -> String {
    let mut values: Vec<f64> = ranks.iter().map(|rank| rank.local).collect();
    values.push(values.iter().sum::<f64>() / ranks.len() as f64);
    let texts = numbers(&values, 6);
    let Some((mean, texts)) = texts.split_last() else { return String::new() };
    let sum = match texts {
        [one] => one.clone(),
        few if few.len() <= MAX_LISTED_RANKS => {
            format!("({})", few.join(" + ").replace("+ -", "- "))
        }
        _ => "(rank 0 + rank 1 + ...)".into(),
    };
    format!("{sum} / {} = {mean}", ranks.len())
}

/// The cell of a rank without samples.
const NONE: &str = "-";

/// Maximum number of ranks whose gradients fit into a line.
const MAX_LISTED_RANKS: usize = 4;

fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

/// Returns a table of the rows `rank 0` and so on, each with its cells; shortened for many ranks. There are no `headings`, or
/// one for each column.
fn rank_table(
    headings: &[String],
    ranks: usize,
    cells: impl Fn(usize) -> Vec<String>,
) -> Vec<String> {
    let header = (!headings.is_empty()).then(|| [&[String::new()][..], headings].concat());
    let rows = shown(ranks).into_iter().map(|rank| match rank {
        Some(rank) => [vec![format!("rank {rank}")], cells(rank)].concat(),
        None => vec!["...".into()],
    });
    table(&header.into_iter().chain(rows).collect::<Vec<_>>())
}
