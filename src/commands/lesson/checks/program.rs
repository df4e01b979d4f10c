//! The lessons that run `ddp-mp`: the demo, the first steps, the report, and a fault.

use std::collections::BTreeSet;

use anyhow::{Context, bail};

use super::{Found, first, on_rank_0, ranks};
use crate::commands::lesson::answer::Answer;
use crate::config::Config;
use crate::data::DistributedSampler;
use crate::launch::SpawnError;
use crate::operation::Operation;
use crate::process_group::Backend;
use crate::session::{StartPoint, Training, open_data};

/// The index of `weight[0][18]`, which `--explain` shows in the demo: the one with the largest gradient.
const EXPLAINED: i64 = 18;

/// What one rank has after training.
struct Trained {
    /// The samples of all ranks together.
    dataset_len: usize,
    steps: u64,
    loss: f64,
    hash: u64,
    /// The explained weight before and after.
    weight: [f64; 2],
    /// Time in which this rank reduced gradients or waited for others to.
    communication_seconds: f64,
}

impl Trained {
    /// Returns the mean of the gradients, which follows from the update of one step.
    fn gradient(&self, lr: f64) -> f64 {
        (self.weight[0] - self.weight[1]) / lr
    }
}

/// Trains the demo on `count` ranks, as `ddp-mp` with the flags in `config` does. Returns what each rank has.
fn train(count: usize, config: Config) -> anyhow::Result<Result<Vec<Trained>, Box<SpawnError>>> {
    let (config, data) = open_data(config)?;
    let spawn = ranks(count).fault(config.launch.inject_fault);
    Ok(spawn.run(move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let training =
            Training::new(rank, &group, &config, &data.training, &StartPoint::default())?;
        let explained = |tensors: &[(String, tch::Tensor)]| {
            let weight = tensors.iter().find(|(name, _)| name == "weight");
            weight.map(|(_, weight)| weight.double_value(&[0, EXPLAINED])).context("no weight")
        };
        let before = explained(&training.ddp.state_dict())?;
        let mut trainer = training.trainer(&config, config.trainer_options())?;
        let summary = trainer.train(config.training.max_epochs)?;
        let ddp = trainer.ddp();
        let backwards = summary.steps_now as f64;
        Ok(Trained {
            dataset_len: data.training.len(),
            steps: summary.steps,
            loss: summary.last_loss,
            hash: ddp.parameters_hash()?,
            weight: [before, explained(&ddp.state_dict())?],
            communication_seconds: ddp.statistics().communication_us * backwards / 1e6,
        })
    }))
}

/// Trains the demo, which must succeed, and returns what rank 0 has.
fn train_rank_0(count: usize, config: Config) -> anyhow::Result<Trained> {
    first(train(count, config)??)
}

/// `--nproc-per-node=3`: the steps of each rank.
pub(in super::super) fn demo() -> anyhow::Result<Found> {
    const RANKS: usize = 3;
    let config = Config::default();
    let batch_size = config.training.batch_size;
    let trained = train_rank_0(RANKS, config)?;
    let samples = DistributedSampler::new(trained.dataset_len, RANKS, 0)?.num_samples();
    let last = (samples - 1) % batch_size + 1;
    Ok(Found::new(
        Answer::Whole(vec![trained.steps]),
        &[("samples", &samples), ("steps", &trained.steps), ("last_batch", &last)],
    ))
}

/// `--world-size=4` for 6 samples: how many are dealt twice.
pub(in super::super) fn shards() -> anyhow::Result<Found> {
    const LEN: usize = 6;
    const RANKS: usize = 4;
    let shards = on_rank_0(RANKS, |rank, group| {
        let mine = DistributedSampler::new(LEN, RANKS, rank.rank())?.indices(0)?;
        Ok(group.all_gather_object(&mine)?)
    })?;
    let dealt = shards.concat();
    let distinct: BTreeSet<&usize> = dealt.iter().collect();
    let repeated = dealt.len() - distinct.len();
    Ok(Found::new(
        Answer::Whole(vec![repeated as u64]),
        &[("dealt", &dealt.len()), ("repeated", &repeated), ("each", &shards[0].len())],
    ))
}

/// `--lr=0.01`: the explained weight after a step.
pub(in super::super) fn update() -> anyhow::Result<Found> {
    let mut config = Config::default();
    let lr = 0.01;
    config.optimization.lr = lr;
    config.training.max_steps = Some(1);
    let trained = train_rank_0(2, config)?;
    let [before, after] = trained.weight;
    Ok(Found::new(
        Answer::Decimal(after),
        &[
            ("before", &format_args!("{before:.8}")),
            ("gradient", &format_args!("{:.6}", trained.gradient(lr))),
            ("after", &format_args!("{after:.8}")),
        ],
    ))
}

/// One rank with the batch of two: whether the parameters have the same bits.
pub(in super::super) fn batch() -> anyhow::Result<Found> {
    let two = train_rank_0(2, Config::default())?;
    let mut config = Config::default();
    config.training.batch_size *= 2;
    let one = train_rank_0(1, config)?;
    Ok(Found::new(
        Answer::YesNo(two.hash == one.hash),
        &[
            ("loss_of_two", &format_args!("{:.6}", two.loss)),
            ("loss_of_one", &format_args!("{:.6}", one.loss)),
            ("hash_of_two", &format_args!("{:016x}", two.hash)),
            ("hash_of_one", &format_args!("{:016x}", one.hash)),
        ],
    ))
}

/// A slow rank 1: the rank that spends more time in all-reduces.
pub(in super::super) fn straggler() -> anyhow::Result<Found> {
    let mut config = Config::default();
    config.launch.inject_fault = Some("slow=20ms:rank=1,at=step".parse()?);
    let trained = train(2, config)??;
    let seconds: Vec<f64> = trained.iter().map(|rank| rank.communication_seconds).collect();
    let [rank_0, rank_1] = seconds[..] else { bail!("there are not two ranks") };
    Ok(Found::new(
        Answer::Whole(vec![u64::from(rank_1 > rank_0)]),
        &[
            ("seconds_of_0", &format_args!("{rank_0:.2}")),
            ("seconds_of_1", &format_args!("{rank_1:.2}")),
        ],
    ))
}

/// `--check-replicas-every=4`: the step after which the difference is found.
pub(in super::super) fn desync() -> anyhow::Result<Found> {
    let mut config = Config::default();
    config.launch.inject_fault = Some("desync:rank=1,at=step,step=5".parse()?);
    config.ddp.check_replicas_every = Some(4);
    let Err(error) = train(3, config)? else { bail!("no rank has noticed the difference") };
    let failure = error.failure;
    if failure.at.operation != Operation::Step {
        bail!("the run failed in another way: {failure}");
    }
    let step = failure.at.sequence;
    Ok(Found::new(
        Answer::Whole(vec![step]),
        &[("step", &step), ("rank", &failure.rank), ("steps", &(step + 1))],
    ))
}
