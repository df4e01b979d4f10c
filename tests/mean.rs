//! The exact mean: gradients that count by the samples of each rank, so that N ranks are one on all their samples.

use std::rc::Rc;

use ddp_mp::ddp::{
    self, Averaged, BackwardOptions, Compress, JoinOptions, PowerSgd, PowerSgdOptions, hook_fn,
};
use ddp_mp::process_group::functional;
use ddp_mp::{
    CommHook, DdpOptions, DistributedDataParallel, Optimizer, ProcessGroup, ReduceOp, Sgd,
    SgdOptions, SyncBatchNorm,
};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::Value;
use tch::nn::{self, Module, ModuleT, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

use crate::harness::{linear, ranks, run, some_of, try_ranks};
use crate::processes;

/// Sizes of the batches of a step by rank, each rank's in their order.
type Step = Vec<Vec<i64>>;

/// Inputs of 3 numbers and targets of 2, the same for the same number; of size 1.
fn samples(first: i64, len: i64) -> (Tensor, Tensor) {
    let numbers = |width: i64, step: f64| {
        let index =
            Tensor::arange_start(first * width, (first + len) * width, (Kind::Double, Device::Cpu));
        (index * step).sin().to_kind(Kind::Float).view([len, width])
    };
    (numbers(3, 1.7), numbers(2, 0.9))
}

struct Net(nn::Linear, nn::Linear);

impl Net {
    fn new(vs: &VarStore) -> Self {
        let layer = |name: &str, inputs, outputs| linear(vs.root() / name, inputs, outputs);
        let net = Self(layer("a", 3, 5), layer("b", 5, 2));
        let tensors = [Some(&net.0.ws), net.0.bs.as_ref(), Some(&net.1.ws), net.1.bs.as_ref()];
        tch::no_grad(|| {
            for (number, tensor) in tensors.into_iter().flatten().enumerate() {
                let values = Tensor::arange(tensor.numel() as i64, (Kind::Float, Device::Cpu));
                let values = ((values + number as f64) * 0.7).cos() * 0.5;
                tensor.shallow_clone().copy_(&values.view(&tensor.size()[..]));
            }
        });
        net
    }

    fn loss(&self, (inputs, targets): &(Tensor, Tensor)) -> Tensor {
        let output = self.1.forward(&self.0.forward(inputs).tanh());
        let reduction = if inputs.size()[0] == 0 { Reduction::Sum } else { Reduction::Mean };
        output.mse_loss(targets, reduction)
    }
}

fn parameters(vs: &VarStore) -> anyhow::Result<Vec<f32>> {
    let all: Vec<Tensor> =
        vs.trainable_variables().iter().map(|it| it.detach().flatten(0, -1)).collect();
    Ok(Vec::<f32>::try_from(Tensor::cat(&all, 0))?)
}

/// Trains on the batches of `steps`; each rank has the samples that come after those of the rank before.
fn train(
    rank: usize,
    group: Rc<ProcessGroup>,
    steps: &[Step],
    options: DdpOptions,
) -> anyhow::Result<Vec<f32>> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs);
    let mut ddp = DistributedDataParallel::new((), &vs, group, options)?;
    let mut optimizer =
        Sgd::new(ddp.flat_buffers(), SgdOptions { momentum: 0.5, ..SgdOptions::default() })?;
    let mut first = 0;
    for step in steps {
        let before: i64 = step[..rank].iter().flatten().sum();
        let mut mine = first + before;
        ddp.zero_grad()?;
        for (number, &len) in step[rank].iter().enumerate() {
            let no_sync = (number + 1 < step[rank].len()).then(|| ddp.no_sync());
            ddp.backward_weighted(&net.loss(&samples(mine, len)), len as f64)?;
            drop(no_sync);
            mine += len;
        }
        optimizer.step(0.2)?;
        first += step.iter().flatten().sum::<i64>();
    }
    parameters(&vs)
}

/// One rank's steps on all samples of each.
fn union(steps: &[Step]) -> Vec<Step> {
    steps.iter().map(|step| vec![vec![step.iter().flatten().sum()]]).collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever sizes the batches have, none included: N ranks come to what one rank comes to on all samples.
    #[test]
    fn n_ranks_with_unequal_batches_match_one_rank(
        world_size in 1usize..5,
        sizes in vec(vec(0i64..9, 8), 1..5),
        batches in 1usize..3,
        overlap: bool,
        find_unused_parameters: bool,
        small_buckets: bool,
    ) {
        let step = |sizes: &Vec<i64>| -> Step {
            let mut step: Step =
                (0..world_size).map(|rank| sizes[rank * batches..(rank + 1) * batches].to_vec()).collect();
            if step.iter().flatten().sum::<i64>() == 0 {
                step[world_size - 1][0] = 3;
            }
            step
        };
        let steps: Vec<Step> = sizes.iter().map(step).collect();
        let mut options = DdpOptions { overlap: Some(overlap), find_unused_parameters, ..DdpOptions::default() };
        if small_buckets {
            (options.bucket_cap_mb, options.first_bucket_mb) = (1e-5, 1e-5);
        }
        let alone = union(&steps);
        let expected = ranks(1, move |rank, group| train(rank.rank(), group, &alone, DdpOptions::default())).remove(0);
        let results = ranks(world_size, move |rank, group| train(rank.rank(), group, &steps, options.clone()));
        for result in &results {
            prop_assert_eq!(result, &results[0]);
        }
        // In single precision, of parameters of size 1.
        let largest = largest_difference(&results[0], &expected);
        prop_assert!(largest < 2e-6, "{} ranks: {:e}", world_size, largest);
    }
}

fn hooks() -> [Option<Box<dyn CommHook>>; 4] {
    let options =
        PowerSgdOptions { start_iter: 1, min_compression_rate: 0.5, ..PowerSgdOptions::default() };
    let power = PowerSgd::new(options);
    [
        None,
        Some(Box::new(Compress::fp16())),
        Some(Box::new(Compress::bf16())),
        Some(Box::new(power)),
    ]
}

#[test]
fn equal_weights_give_the_bits_of_plain_backward() {
    for hook in 0..hooks().len() {
        for (world_size, samples_each) in [(1, 4), (2, 7), (3, 5), (4, 1)] {
            let trained = move |weighted: bool| {
                ranks(world_size, move |rank, group| {
                    let vs = VarStore::new(Device::Cpu);
                    let net = Net::new(&vs);
                    let mut ddp =
                        DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
                    if let Some(hook) = hooks().into_iter().nth(hook).flatten() {
                        ddp.register_comm_hook(hook)?;
                    }
                    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
                    for step in 0..4 {
                        ddp.zero_grad()?;
                        let first = (step * world_size + rank.rank()) as i64 * samples_each;
                        let loss = net.loss(&samples(first, samples_each));
                        match weighted {
                            true => ddp.backward_weighted(&loss, samples_each as f64)?,
                            false => ddp.backward(&loss)?,
                        }
                        optimizer.step(0.1)?;
                    }
                    parameters(&vs)
                })
            };
            assert_eq!(trained(true), trained(false), "hook {hook}, {world_size} ranks");
        }
    }
}

#[test]
fn join_with_weights_ignores_ranks_without_inputs() {
    // Of each step, by rank.
    let counts = [[5i64, 2, 4], [3, 0, 4], [0, 0, 1]];
    for divide_by_initial_world_size in [true, false] {
        let results = ranks(3, move |rank, group| {
            let vs = VarStore::new(Device::Cpu);
            let net = Net::new(&vs);
            let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
            let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
            let options = JoinOptions { divide_by_initial_world_size, ..JoinOptions::default() };
            ddp.join(options, |ddp| {
                let mut first = 0;
                for of_ranks in counts {
                    let before: i64 = of_ranks[..rank.rank()].iter().sum();
                    let len = of_ranks[rank.rank()];
                    if len > 0 {
                        ddp.zero_grad()?;
                        let loss = net.loss(&samples(first + before, len));
                        ddp.backward_weighted(&loss, len as f64)?;
                        optimizer.step(0.2)?;
                    }
                    first += of_ranks.iter().sum::<i64>();
                }
                Ok(())
            })?;
            parameters(&vs)
        });
        let plain = ranks(1, move |_, group| {
            let vs = VarStore::new(Device::Cpu);
            let net = Net::new(&vs);
            let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
            let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
            let mut first = 0;
            for len in counts.iter().map(|of_ranks| of_ranks.iter().sum()) {
                ddp.zero_grad()?;
                ddp.backward(&net.loss(&samples(first, len)))?;
                optimizer.step(0.2)?;
                first += len;
            }
            parameters(&vs)
        });
        for result in &results {
            assert!(largest_difference(result, &plain[0]) < 2e-6, "{result:?} {plain:?}");
        }
    }
}

/// Trains a step on the batches of this rank, in which 0 samples stand for a loss whose gradients are not finite.
fn step_of(
    (rank, group): (usize, Rc<ProcessGroup>),
    batches: &[i64],
    options: DdpOptions,
) -> anyhow::Result<Vec<f32>> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs);
    let mut ddp = DistributedDataParallel::new((), &vs, group, options)?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    // In the second step there are gradients of the first, which zero_grad does not overwrite.
    for step in 0..2 {
        ddp.zero_grad()?;
        let mut first = 100 * rank as i64 + 20 * step;
        for (number, &len) in batches.iter().enumerate() {
            let no_sync = (number + 1 < batches.len()).then(|| ddp.no_sync());
            let loss = net.loss(&samples(first, len.max(1)));
            let loss = if len == 0 { loss * f64::NAN } else { loss };
            ddp.backward_weighted(&loss, len as f64)?;
            drop(no_sync);
            first += len;
        }
        optimizer.step(0.2)?;
    }
    parameters(&vs)
}

#[test]
fn empty_batch_leaves_the_gradients_of_others_unchanged() {
    let small = DdpOptions { bucket_cap_mb: 1e-5, first_bucket_mb: 1e-5, ..DdpOptions::default() };
    let unused = DdpOptions { find_unused_parameters: true, ..DdpOptions::default() };
    let overlapping = DdpOptions { overlap: Some(true), ..small.clone() };
    for options in [DdpOptions::default(), small, unused, overlapping] {
        let train = |batches: Vec<i64>| {
            let options = options.clone();
            ranks(2, move |rank, group| {
                let batches = if rank.rank() == 0 { &batches[..] } else { &[4, 1] };
                step_of((rank.rank(), group), batches, options.clone())
            })
        };
        let expected = train(vec![3, 2]);
        assert!(expected.iter().flatten().all(|it| it.is_finite()));
        for batches in [vec![0, 3, 2], vec![3, 0, 2], vec![3, 2, 0], vec![0, 0, 3, 0, 2, 0, 0]] {
            assert_eq!(train(batches.clone()), expected, "{batches:?}, {options:?}");
        }
        let without = train(vec![0]);
        assert_eq!(train(vec![0, 0]), without, "{options:?}");
        assert!(without.iter().flatten().all(|it| it.is_finite()), "{options:?}");
    }
}

/// Its part of a gradient that the ranks add up within autograd counts for nothing, whatever it is.
#[test]
fn rank_without_samples_adds_no_gradient() {
    let gradients = ranks(2, |rank, group| {
        let vs = VarStore::new(Device::Cpu);
        let weight = vs.root().var("weight", &[2], nn::Init::Const(1.0));
        let mut ddp = DistributedDataParallel::new((), &vs, group.clone(), DdpOptions::default())?;
        let sum = functional::all_reduce(&weight, &group)?;
        let is_empty = rank.rank() == 1;
        let loss = sum.sum(Kind::Float) * if is_empty { f64::NAN } else { 3. };
        ddp.backward_weighted(&loss, if is_empty { 0. } else { 4. })?;
        Ok(Vec::<f32>::try_from(weight.grad())?)
    });
    // Rank 1's weight is in rank 0's loss, too, but its gradients are ignored.
    assert_eq!(gradients, [[3., 3.], [3., 3.]]);
}

#[test]
fn plain_backward_counts_as_the_first_weighted_batch() {
    // The gradient of each, and how many samples there are, if it has a number.
    let plain = (3., None);
    for order in [[plain, (1., Some(4.)), (5., Some(2.))], [(1., Some(4.)), plain, (5., Some(2.))]]
    {
        let gradient = ranks(1, move |_, group| {
            let vs = VarStore::new(Device::Cpu);
            let weight = vs.root().var("weight", &[1], nn::Init::Const(1.0));
            let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
            for (number, (factor, samples)) in order.into_iter().enumerate() {
                let _no_sync = (number + 1 < order.len()).then(|| ddp.no_sync());
                let loss = (&weight * factor).sum(Kind::Double);
                match samples {
                    Some(samples) => ddp.backward_weighted(&loss, samples)?,
                    None => ddp.backward(&loss)?,
                }
            }
            Ok(weight.grad().double_value(&[0]))
        });
        assert!((gradient[0] - (4. * (1. + 3.) + 2. * 5.) / 6.).abs() < 1e-6, "{gradient:?}");
    }
}

/// The gradients and outputs of a network with a batch norm over all ranks.
fn with_batch_norm(
    rank: usize,
    group: Rc<ProcessGroup>,
    sizes: &[i64],
) -> anyhow::Result<Vec<f32>> {
    let vs = VarStore::new(Device::Cpu);
    let norm = SyncBatchNorm::new(&(vs.root() / "norm"), 5, SyncBatchNorm::DEFAULT, &group)?;
    let net = Net::new(&vs);
    let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
    let (inputs, targets) = samples(sizes[..rank].iter().sum(), sizes[rank]);
    let output = net.1.forward(&norm.forward_t(&net.0.forward(&inputs), true).tanh());
    let reduction = if sizes[rank] == 0 { Reduction::Sum } else { Reduction::Mean };
    ddp.backward_weighted(&output.mse_loss(&targets, reduction), sizes[rank] as f64)?;
    let gradients: Vec<Tensor> =
        vs.trainable_variables().iter().map(|it| it.grad().flatten(0, -1)).collect();
    Ok(Vec::<f32>::try_from(Tensor::cat(&gradients, 0))?)
}

#[test]
fn sync_batch_norm_gradients_match_one_rank() {
    for sizes in [vec![4, 4], vec![7, 2], vec![1, 6, 3], vec![5, 0, 2]] {
        let all = sizes.iter().sum::<i64>();
        let expected = ranks(1, move |_, group| with_batch_norm(0, group, &[all])).remove(0);
        let of_ranks = sizes.clone();
        let results =
            ranks(sizes.len(), move |rank, group| with_batch_norm(rank.rank(), group, &of_ranks));
        for result in results {
            let largest = largest_difference(&result, &expected);
            assert!(largest < 2e-6, "{sizes:?}: {largest:e}");
        }
    }
}

/// How a run of two ranks fails whose `backward` is this.
fn failure(
    backward: impl Fn(usize, &mut DistributedDataParallel<()>, &Tensor) -> ddp_mp::Result<()>
    + Send
    + Sync
    + 'static,
) -> String {
    try_ranks(2, move |rank, group| {
        let vs = VarStore::new(Device::Cpu);
        let weight = vs.root().var("weight", &[2], nn::Init::Const(1.0));
        let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
        Ok(backward(rank.rank(), &mut ddp, &weight.sum(Kind::Float))?)
    })
    .unwrap_err()
    .to_string()
}

#[test]
fn invalid_weights_are_errors_with_rank_and_value() {
    for (weight, told) in
        [(-3.0, "rank 1 has the weight -3;"), (f64::NAN, "rank 1 has the weight NaN;")]
    {
        let error = failure(move |rank, ddp, loss| {
            ddp.backward_weighted(loss, if rank == 1 { weight } else { 1.0 })
        });
        assert!(error.starts_with("rank 1 (CPU:1) failed") && error.contains(told), "{error}");
    }
    let error = failure(|_, ddp, loss| ddp.backward_weighted(loss, 0.0));
    assert!(
        error.contains("the weights of the ranks 0, 1 add up to 0: each has the weight 0;"),
        "{error}"
    );
    let huge = |rank| if rank == 0 { f64::MAX } else { 1e308 };
    let error = failure(move |rank, ddp, loss| ddp.backward_weighted(loss, huge(rank)));
    assert!(error.contains("the weights of the ranks 0, 1 add up to inf"), "{error}");
    let error = failure(|rank, ddp, loss| match rank {
        0 => ddp.backward(loss),
        _ => ddp.backward_weighted(loss, 2.0),
    });
    assert!(error.contains("rank 0 called all_reduce(sum of 0.5 * each) of float32"), "{error}");
    assert!(
        error.contains("rank 1 called all_reduce(sum of 0.5 * each, weighted) of float32"),
        "{error}"
    );
    let error = failure(|_, ddp, loss| {
        let no_sync = ddp.no_sync();
        ddp.backward_weighted(loss, 4.0)?;
        drop(no_sync);
        ddp.backward(loss)
    });
    assert!(error.contains("backward: this step has 4 samples from backward_weighted"), "{error}");
    let error = failure(|_, ddp, loss| {
        ddp.backward_weighted(loss, 4.0)?;
        let _no_sync = ddp.no_sync();
        ddp.backward_weighted(loss, 4.0)
    });
    assert!(
        error.contains("an earlier step has averaged; call zero_grad before the first batch"),
        "{error}"
    );
    let error = failure(|_, ddp, loss| {
        let mean = |group: &ProcessGroup| ReduceOp::PremulSum(1.0 / group.world_size() as f64);
        ddp.register_comm_hook(hook_fn("mine", move |bucket, group| {
            group.all_reduce(bucket.gradients, mean(group))
        }))?;
        ddp.backward_weighted(loss, 4.0)
    });
    assert!(error.contains("the communication hook `mine` does not support weights"), "{error}");
    let error = failure(|rank, ddp, loss| {
        let joined = ddp.join(JoinOptions::default(), |ddp| {
            Ok(if rank == 0 { ddp.backward(loss) } else { ddp.backward_weighted(loss, 1.0) }?)
        });
        joined.map_err(|error| error.downcast().unwrap())
    });
    assert!(
        error.contains("join: 1 rank called backward, and 1 rank backward_weighted"),
        "{error}"
    );
}

fn end(args: &[&str]) -> Value {
    let (code, stdout, stderr) =
        run(&[&["--log-format=json", "--model=mlp", "--lr=0.05"], args].concat());
    assert_eq!(code, Some(0), "{args:?}: {stderr}");
    let end: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&end["event"], &end["replicas_equal"]), (&"end".into(), &true.into()));
    end
}

#[test]
fn exact_mean_of_equal_batches_changes_no_bit() {
    let all = [
        &["--nproc-per-node=3", "--batch-size=20", "--num-samples=600"][..],
        &["--nproc-per-node=2", "--batch-size=7", "--num-samples=210", "--grad-accum-steps=3"],
        &["--nproc-per-node=3", "--batch-size=20", "--num-samples=630", "--max-grad-norm=0.5"],
        &["--nproc-per-node=2", "--num-samples=640", "--spawn=processes"],
        &[
            "--nproc-per-node=3",
            "--batch-size=5",
            "--num-samples=90",
            "--amp=bf16",
            "--comm-hook=fp16",
        ],
    ];
    for args in some_of(all, 3) {
        let hash = |args: &[&str]| end(args)["parameters_hash"].clone();
        assert_eq!(hash(args), hash(&[args, &["--exact-mean"]].concat()), "{args:?}");
    }
}

#[test]
fn exact_mean_of_threads_and_processes_matches_one_rank() {
    // 101 samples: 34, 34 and 33 for three ranks, in steps of 24, and a last one of 2, 2 and 1 samples.
    let data = ["--num-samples=101", "--max-epochs=3", "--exact-mean"];
    let loss = |end: &Value| end["loss"].as_f64().unwrap();
    let alone = end(&[&data[..], &["--nproc-per-node=1", "--batch-size=24"]].concat());
    let three = ["--nproc-per-node=3", "--batch-size=8"];
    let threads = end(&[&data[..], &three].concat());
    assert!((loss(&threads) - loss(&alone)).abs() < 1e-6, "{threads} {alone}");
    assert_eq!(threads["steps"], alone["steps"]);
    let processes = end(&[&data[..], &three, &["--spawn=processes"]].concat());
    assert_eq!(processes["parameters_hash"], threads["parameters_hash"]);
    let small = ["--nproc-per-node=3", "--batch-size=4", "--grad-accum-steps=2"];
    let accumulated = end(&[&data[..], &small].concat());
    assert!((loss(&accumulated) - loss(&alone)).abs() < 1e-6, "{accumulated} {alone}");
    // The mean of the ranks' means is something else; without the flag samples are dealt twice to fill up, too.
    let plain = end(&[&data[..2], &three].concat());
    assert!((loss(&plain) - loss(&alone)).abs() > 1e-5, "{plain} {alone}");
    // Several ranks in some processes; a large model goes another way between two.
    for (ranks, model) in some_of(
        [
            (&[2, 1][..], "--hidden=8"),
            (&[1, 1], "--hidden=150,150"),
            (&[2, 2], "--hidden=150,150"),
            (&[1, 2, 1], "--hidden=150,150"),
        ],
        2,
    ) {
        let count: usize = ranks.iter().sum();
        let batch = format!("--batch-size={}", 24 / count);
        let common = [&data[..], &["--model=mlp", "--lr=0.05", model]].concat();
        let alone = end(&[&data[..], &[model, "--nproc-per-node=1", "--batch-size=24"]].concat());
        let end = processes::end(&[&common[..], &[&batch]].concat(), ranks);
        assert_eq!(end["replicas_equal"], true);
        assert!((loss(&end) - loss(&alone)).abs() < 1e-6, "{ranks:?}: {end} {alone}");
    }
}

#[test]
fn exact_mean_runs_with_an_empty_last_batch() {
    for args in [
        &["--nproc-per-node=4", "--num-samples=17", "--batch-size=2"][..],
        &["--nproc-per-node=4", "--num-samples=17", "--batch-size=2", "--num-workers=1"],
        &["--nproc-per-node=2", "--num-samples=9", "--batch-size=2", "--amp=fp16"],
        &["--nproc-per-node=3", "--num-samples=7", "--batch-size=1", "--find-unused-parameters"],
        &[
            "--nproc-per-node=3",
            "--num-samples=7",
            "--batch-size=1",
            "--comm-hook=powersgd",
            "--powersgd-start-iter=1",
        ],
        &["--nproc-per-node=3", "--num-samples=7", "--batch-size=1", "--skip-nonfinite=1"],
        &["--nproc-per-node=3", "--num-samples=7", "--batch-size=1", "--no-overlap"],
    ] {
        let end = end(&[args, &["--exact-mean", "--max-epochs=2"]].concat());
        assert!(end["loss"].as_f64().unwrap() > 0.0, "{end}");
    }
    let (code, _, stderr) = run(&["--nproc-per-node=2", "--exact-mean", "--strategy=dp"]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(
        stderr.contains("--exact-mean: needs --strategy ddp: with dp rank 0 gives"),
        "{stderr}"
    );
}

#[test]
fn verify_passes_with_unequal_batches() {
    for args in [
        &["--nproc-per-node=2", "--batch-size=8"][..],
        &["--nproc-per-node=3", "--batch-size=4", "--model=mlp", "--lr=0.05"],
        &["--nproc-per-node=4", "--batch-size=1"],
        &[
            "--nproc-per-node=2",
            "--batch-size=3",
            "--model=cnn",
            "--sync-batch-norm",
            "--dataset=digits",
            "--loss=cross-entropy",
        ],
    ] {
        let (code, stdout, stderr) =
            run(&[&["verify", "--exact-mean", "--steps=9", "--log-format=json"], args].concat());
        assert_eq!(code, Some(0), "{args:?}: {stderr}{stdout}");
        assert!(
            stderr
                .contains("in the last step of an epoch the ranks have batches of different size"),
            "{stderr}"
        );
        let rows: Vec<Value> =
            stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(
            !rows.is_empty()
                && rows.iter().all(|row| row["ok"] == true && row["strategy"] == "ddp"),
            "{stdout}"
        );
    }
}

#[test]
fn loss_of_two_models_is_weighted_by_samples() {
    ranks(2, |rank, group| {
        let wrap = |init| {
            let vs = VarStore::new(Device::Cpu);
            let weight = vs.root().var("weight", &[1], nn::Init::Const(init));
            let options = DdpOptions::default();
            let ddp = DistributedDataParallel::new((), &vs, group.clone(), options);
            Ok::<_, ddp_mp::Error>((weight, ddp?))
        };
        let ((g, mut generator), (d, mut discriminator)) = (wrap(3.0)?, wrap(5.0)?);
        let weighted = |samples| BackwardOptions { samples: Some(samples), ..Default::default() };
        let batch = if rank.rank() == 0 { vec![1f32, 1.0, 1.0] } else { vec![5.0] };
        let loss = |batch: &[f32]| (&d * &g * Tensor::from_slice(batch)).mean(Kind::Float);
        let gradients = || [&g, &d].map(|it| it.grad().double_value(&[0]));
        // The mean of all four samples is 2; that of the ranks' means is 3.
        let mut models: [&mut dyn Averaged; 2] = [&mut discriminator, &mut generator];
        ddp::backward(&loss(&batch), &mut models, weighted(batch.len() as f64))?;
        assert_eq!(gradients(), [2.0 * 5.0, 2.0 * 3.0]);

        // The same in two batches, of which rank 1 has one.
        let parts =
            if rank.rank() == 0 { [vec![1f32], vec![1.0, 1.0]] } else { [vec![5.0], vec![]] };
        generator.zero_grad()?;
        discriminator.zero_grad()?;
        let no_sync = (generator.no_sync(), discriminator.no_sync());
        let mut models: [&mut dyn Averaged; 2] = [&mut discriminator, &mut generator];
        ddp::backward(&loss(&parts[0]), &mut models, weighted(1.0))?;
        drop(no_sync);
        let last = if parts[1].is_empty() { (&d * &g).sum(Kind::Float) } else { loss(&parts[1]) };
        ddp::backward(&last, &mut models, weighted(parts[1].len() as f64))?;
        assert_eq!(gradients(), [2.0 * 5.0, 2.0 * 3.0]);

        // One of them has added up another batch before: one loss cannot have two weights.
        generator.zero_grad()?;
        discriminator.zero_grad()?;
        let no_sync = generator.no_sync();
        generator.backward_weighted(&(&g * 1.0).sum(Kind::Float), 4.0)?;
        drop(no_sync);
        let mut models: [&mut dyn Averaged; 2] = [&mut discriminator, &mut generator];
        let error = ddp::backward(&loss(&[1.0]), &mut models, weighted(1.0)).unwrap_err();
        assert!(
            error.to_string().contains("models that have added up different batches"),
            "{error}"
        );
        Ok(())
    });
}
