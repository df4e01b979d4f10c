//! The exact mean: losses that count by the samples of each rank, so that N ranks are one on all their samples.

use std::rc::Rc;

use ddp_mp::{DdpOptions, DistributedDataParallel, Optimizer, ProcessGroup, Sgd, SgdOptions};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::Value;
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

use crate::harness::{
    buckets_of, events, linear, ranks, run_all_refused, run_end, run_to, some_of, words,
};
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
    Ok(Vec::try_from(Tensor::cat(&all, 0))?)
}

/// The factor of the mean loss of a batch: its samples times the ranks, divided by the samples of all ranks.
fn factor(len: i64, ranks: usize, all: i64) -> f64 {
    len as f64 * ranks as f64 / all as f64
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
        let all = step.iter().flatten().sum();
        let mut mine = first + before;
        ddp.zero_grad()?;
        for (number, &len) in step[rank].iter().enumerate() {
            let no_sync = (number + 1 < step[rank].len()).then(|| ddp.no_sync());
            ddp.backward(&(net.loss(&samples(mine, len)) * factor(len, step.len(), all)))?;
            drop(no_sync);
            mine += len;
        }
        optimizer.step(0.2)?;
        first += all;
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
        let caps = if small_buckets { buckets_of(1e-5) } else { DdpOptions::default() };
        let options = DdpOptions { overlap: Some(overlap), find_unused_parameters, ..caps };
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

/// The `end` event of a run with these options, and more.
fn end(args: &str, more: &[&str]) -> Value {
    let end = run_end(&[&["--model=mlp", "--lr=0.05"], &words(args)[..], more].concat());
    assert_eq!((&end["event"], &end["replicas_equal"]), (&"end".into(), &true.into()));
    end
}

#[test]
fn exact_mean_of_equal_batches_changes_no_bit() {
    let all = [
        "--nproc-per-node=3 --batch-size=20 --num-samples=600",
        "--nproc-per-node=2 --batch-size=7 --num-samples=210 --grad-accum-steps=3",
        "--nproc-per-node=3 --batch-size=20 --num-samples=630 --max-grad-norm=0.5",
        "--nproc-per-node=2 --num-samples=640 --spawn=processes",
        "--nproc-per-node=3 --batch-size=5 --num-samples=90 --amp=bf16 --comm-hook=fp16",
    ];
    for args in some_of(all, 3) {
        let hash = |more: &[&str]| end(args, more)["parameters_hash"].clone();
        assert_eq!(hash(&[]), hash(&["--exact-mean"]), "{args:?}");
    }
}

#[test]
fn exact_mean_of_threads_and_processes_matches_one_rank() {
    // 101 samples: 34, 34 and 33 for three ranks, in steps of 24, and a last one of 2, 2 and 1 samples.
    let data = ["--num-samples=101", "--max-epochs=3", "--exact-mean"];
    let loss = |end: &Value| end["loss"].as_f64().unwrap();
    let alone = end("--nproc-per-node=1 --batch-size=24", &data);
    let three = "--nproc-per-node=3 --batch-size=8";
    let threads = end(three, &data);
    assert!((loss(&threads) - loss(&alone)).abs() < 1e-6, "{threads} {alone}");
    assert_eq!(threads["steps"], alone["steps"]);
    let processes = end(&format!("{three} --spawn=processes"), &data);
    assert_eq!(processes["parameters_hash"], threads["parameters_hash"]);
    let accumulated = end("--nproc-per-node=3 --batch-size=4 --grad-accum-steps=2", &data);
    assert!((loss(&accumulated) - loss(&alone)).abs() < 1e-6, "{accumulated} {alone}");
    // The mean of the ranks' means is something else; without the flag samples are dealt twice to fill up, too.
    let plain = end(three, &data[..2]);
    assert!((loss(&plain) - loss(&alone)).abs() > 1e-5, "{plain} {alone}");
    // Several ranks in some processes; a large model goes another way between two.
    let all: [(&[usize], _); 4] = [
        (&[2, 1], "--hidden=8"),
        (&[1, 1], "--hidden=150,150"),
        (&[2, 2], "--hidden=150,150"),
        (&[1, 2, 1], "--hidden=150,150"),
    ];
    for (ranks, model) in some_of(all, 2) {
        let count: usize = ranks.iter().sum();
        let batch = format!("--batch-size={}", 24 / count);
        let common = [&data[..], &["--model=mlp", "--lr=0.05", model]].concat();
        let alone = end(&format!("{model} --nproc-per-node=1 --batch-size=24"), &data);
        let end = processes::end(&[&common[..], &[&batch]].concat(), ranks);
        assert_eq!(end["replicas_equal"], true);
        assert!((loss(&end) - loss(&alone)).abs() < 1e-6, "{ranks:?}: {end} {alone}");
    }
}

#[test]
fn exact_mean_runs_with_an_empty_last_batch() {
    let all = [
        "--nproc-per-node=4 --num-samples=17 --batch-size=2",
        "--nproc-per-node=4 --num-samples=17 --batch-size=2 --num-workers=1",
        "--nproc-per-node=2 --num-samples=9 --batch-size=2 --amp=fp16",
        "--nproc-per-node=3 --num-samples=7 --batch-size=1 --find-unused-parameters",
        "--nproc-per-node=3 --num-samples=7 --batch-size=1 --comm-hook=bf16",
        "--nproc-per-node=3 --num-samples=7 --batch-size=1 --skip-nonfinite=1",
        "--nproc-per-node=3 --num-samples=7 --batch-size=1 --no-overlap",
    ];
    for args in some_of(all, 4) {
        let end = end(args, &["--exact-mean", "--max-epochs=2"]);
        assert!(end["loss"].as_f64().unwrap() > 0.0, "{end}");
    }
    let told = "--exact-mean: needs --strategy ddp: with dp rank 0 gives";
    run_all_refused(&[("--nproc-per-node=2 --exact-mean --strategy=dp", told)]);
}

#[test]
fn verify_passes_with_unequal_batches() {
    let all = [
        "--nproc-per-node=3 --batch-size=4 --model=mlp --lr=0.05",
        "--nproc-per-node=2 --batch-size=8",
        "--nproc-per-node=2 --batch-size=3 --model=cnn --sync-batch-norm --dataset=digits --loss=cross-entropy",
        "--nproc-per-node=4 --batch-size=1",
    ];
    for args in some_of(all, 2) {
        let verify = ["verify", "--exact-mean", "--steps=9", "--log-format=json"];
        let (stdout, stderr) = run_to(0, &[&verify[..], &words(args)].concat());
        let told = "in the last step of an epoch the ranks have batches of different size";
        assert!(stderr.contains(told), "{stderr}");
        let rows = events(&stdout);
        let ok = rows.iter().all(|row| row["ok"] == true && row["strategy"] == "ddp");
        assert!(!rows.is_empty() && ok, "{stdout}");
    }
}
