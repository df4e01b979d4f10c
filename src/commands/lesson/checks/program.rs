//! The lessons that run `ddp-mp`: the demo, the first steps, the report, and a fault.

use anyhow::{Context, bail};

use super::{Found, on_ranks, ranks, whole};
use crate::commands::lesson::answer::Answer;
use crate::config::Config;
use crate::data::DistributedSampler;
use crate::launch::SpawnError;
use crate::operation::Operation;
use crate::process_group::Backend;
use crate::session::{StartPoint, Training, open_data};
use crate::trainer::Trainer;

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
        let Training { ddp, optimizer, schedule, generator, loader, .. } =
            Training::new(rank, &group, &config, &data.training, &StartPoint::default())?;
        let explained = |tensors: &[(String, tch::Tensor)]| {
            let weight = tensors.iter().find(|(name, _)| name == "weight");
            weight.map(|(_, weight)| weight.double_value(&[0, EXPLAINED])).context("no weight")
        };
        let before = explained(&ddp.state_dict())?;
        let mut trainer = Trainer::new(ddp, optimizer, schedule, loader, config.training.loss)?
            .generator(generator)
            .check_replicas(config.ddp.check_replicas_every)?
            .max_steps(config.training.max_steps);
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
    train(count, config)??.into_iter().next().context("there is no rank 0")
}

/// `--nproc-per-node=3`: the steps of each rank.
pub(in super::super) fn demo() -> anyhow::Result<Found> {
    const RANKS: usize = 3;
    let config = Config::default();
    let batch_size = config.training.batch_size;
    let trained = train_rank_0(RANKS, config)?;
    let samples = DistributedSampler::new(trained.dataset_len, RANKS, 0)?.num_samples();
    let last = (samples - 1) % batch_size + 1;
    let numbers = [samples as u64, trained.steps, last as u64].map(|number| number.to_string());
    Ok(whole([trained.steps], &numbers))
}

/// `--world-size=4` for 6 samples: how many are dealt twice.
pub(in super::super) fn shards() -> anyhow::Result<Found> {
    const LEN: usize = 6;
    const RANKS: usize = 4;
    let dealt = on_ranks(RANKS, |rank, group| {
        let mine = DistributedSampler::new(LEN, RANKS, rank.rank())?.indices(0)?;
        Ok(group.all_gather_object(&mine)?)
    })?;
    let shards = dealt.into_iter().next().context("there is no rank 0")?;
    let count: usize = shards.iter().map(Vec::len).sum();
    let mut seen: Vec<usize> = shards.concat();
    seen.sort_unstable();
    seen.dedup();
    let padding = (count - seen.len()) as u64;
    let numbers = [count as u64, padding, shards[0].len() as u64].map(|number| number.to_string());
    Ok(whole([padding], &numbers))
}

/// `--lr=0.01`: the explained weight after a step.
pub(in super::super) fn update() -> anyhow::Result<Found> {
    let mut config = Config::default();
    (config.optimization.lr, config.training.max_steps) = (0.01, Some(1));
    let lr = config.optimization.lr;
    let trained = train_rank_0(2, config)?;
    let [before, after] = trained.weight;
    let gradient = format!("{:.6}", trained.gradient(lr));
    let numbers = [format!("{before:.8}"), gradient, format!("{after:.8}")];
    Ok(Found { answer: Answer::Decimal(after), numbers: numbers.to_vec() })
}

/// One rank with the batch of two: whether the parameters have the same bits.
pub(in super::super) fn batch() -> anyhow::Result<Found> {
    let two = train_rank_0(2, Config::default())?;
    let mut config = Config::default();
    config.training.batch_size *= 2;
    let one = train_rank_0(1, config)?;
    let hashes = [&two, &one].map(|trained| format!("{:016x}", trained.hash));
    let losses = [&two, &one].map(|trained| format!("{:.6}", trained.loss));
    let answer = Answer::YesNo(two.hash == one.hash);
    Ok(Found { answer, numbers: [losses, hashes].concat() })
}

/// A slow rank 1: the rank that spends more time in all-reduces.
pub(in super::super) fn straggler() -> anyhow::Result<Found> {
    let mut config = Config::default();
    config.launch.inject_fault = Some("slow=20ms:rank=1,at=step".parse()?);
    let trained = train(2, config)??;
    let seconds: Vec<f64> = trained.iter().map(|rank| rank.communication_seconds).collect();
    let [rank_0, rank_1] = seconds[..] else { bail!("there are not two ranks") };
    let numbers = [rank_0, rank_1].map(|seconds| format!("{seconds:.2}"));
    Ok(whole([u64::from(rank_1 > rank_0)], &numbers))
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
    Ok(whole([step], &[step.to_string(), failure.rank.to_string(), (step + 1).to_string()]))
}
