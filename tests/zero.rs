//! `zero`: what an optimizer that the ranks partition keeps and saves. Its bits are compared in `share_model`.

use std::fs;
use std::path::Path;
use std::process::Command;

use ddp_mp::optim::{AdamW, AdamWOptions, GradState, Optimizer, ParameterState};
use ddp_mp::{DdpOptions, DistributedDataParallel, OptimizerLayout};
use serde_json::Value;
use tch::nn::{Module, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{
    buckets_of, in_parallel, last_event, linear, program, ranks, run_command_to, run_end, some_of,
};
use crate::share_model::{MLP, backward, wrap};

const LAYOUTS: [OptimizerLayout; 2] = [OptimizerLayout::Replicated, OptimizerLayout::Partitioned];

/// Four whole states of AdamW take 8 times the memory of the parameters; one that four ranks partition takes 2 times.
/// Among threads the saving is half of that, because only without `--zero` do large gradients stay outside of buckets.
#[test]
fn partitioned_optimizer_takes_its_part_of_the_memory() {
    let peak = |more: &[&str]| {
        let model = ["--model=mlp", "--hidden=2048,2048,2048", "--optimizer=adamw"];
        let length = ["--num-samples=512", "--max-steps=3", "--nproc-per-node=4"];
        let mut program = program(&[&model[..], &length, &["--log-format=json"], more].concat());
        program.env("DDP_MP_KEEP_MEMORY", "0"); // memory that is free would count
        last_event(&run_command_to(0, program).0)["peak_memory_bytes"].as_f64().unwrap()
    };
    let parameters = 4.0 * (20.0 * 2048.0 + 2.0 * 2048.0 * 2048.0);
    let saved = (peak(&[]) - peak(&["--zero"])) / parameters;
    println!("4 ranks save {saved:.2} times the memory of the parameters");
    assert!(saved > 1.5, "{saved}");
}

/// Returns the bytes of the optimizer's state and of the model in the newest checkpoint of a folder.
fn saved(folder: &Path) -> [Vec<u8>; 2] {
    let newest = fs::read_to_string(folder.join("latest")).unwrap();
    ["optimizer.safetensors", "model.safetensors"]
        .map(|name| fs::read(folder.join(newest.trim()).join(name)).unwrap())
}

/// A checkpoint contains the whole state. A run resumes from it in this layout or with replicas, on any number of ranks.
#[test]
fn checkpoint_of_any_layout_is_whole_and_resumes_anywhere() {
    for hook in some_of([&["--comm-hook=bf16"][..], &[]], 1) {
        let args = [MLP, &["--optimizer=adamw", "--max-epochs=3"], hook].concat();
        is_whole_and_resumes(&args);
    }
}

fn is_whole_and_resumes(args: &[&str]) {
    let train = |folder: &Path, ranks: &str, layout: &[&str], length: &str| {
        let dir = format!("--checkpoint-dir={}", folder.display());
        let run = [args, &[&dir, ranks, length], layout].concat();
        run_end(&run)["parameters_hash"].clone()
    };
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), "--nproc-per-node=2", &[], "--max-steps=9");
    let whole = saved(folder.path());
    let layouts: [&[&str]; 3] = [&["--zero", "--spawn=processes"], &["--zero"], &["--share-model"]];
    in_parallel(&layouts, |layout| {
        let folder = tempfile::tempdir().unwrap();
        train(folder.path(), "--nproc-per-node=2", layout, "--max-steps=9");
        assert!(saved(folder.path()) == whole, "{layout:?}");
        for ranks in some_of(["--nproc-per-node=2", "--nproc-per-node=3"], 1) {
            let resumed = [layout, &[][..]].map(|layout| {
                let copy = tempfile::tempdir().unwrap();
                let paths = [folder.path(), copy.path()];
                assert!(Command::new("cp").arg("-rT").args(paths).status().unwrap().success());
                train(copy.path(), ranks, layout, "--resume=auto")
            });
            assert_eq!(resumed[0], resumed[1], "{layout:?} {ranks}");
        }
    });
}

/// From the second backward on, a rank has the averages of its partitions only. It gathers the others on request. In every
/// layout a second backward adds to the mean of the first.
#[test]
fn averages_of_other_partitions_are_gathered_on_request() {
    let train = |averages_first: bool, layout: OptimizerLayout| {
        ranks(2, move |_, group| {
            let mut ddp = wrap(&group, layout)?;
            let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
            for step in 0..3 {
                ddp.zero_grad()?;
                let mut own = Vec::new();
                for part in 0..2 {
                    backward(&mut ddp, 2 * step + part)?; // the second one adds to the mean of the first
                    own = ddp.flat_buffers();
                }
                if layout == OptimizerLayout::Partitioned {
                    let state = GradState::Partitioned;
                    assert!(own.iter().all(|buffer| buffer.layout.gradients() == state));
                }
                if averages_first {
                    let (name, weight) = ddp.state_dict().swap_remove(0);
                    let averaged = ddp.averaged_grad(&name)?.unwrap();
                    assert!(averaged.equal(&weight.grad()));
                    let mut first = averaged.copy();
                    group.broadcast(&mut first, 0)?;
                    assert!(first.equal(&averaged)); // every rank has the same
                    assert!(own.iter().all(|b| b.layout.gradients() == GradState::Averaged));
                }
                optimizer.step(0.1)?;
                optimizer.step(0.01)?; // with the same gradients
            }
            Ok(ddp.parameters_hash()?)
        })
    };
    let whole = train(false, OptimizerLayout::Replicated);
    assert_eq!(train(false, OptimizerLayout::SharedModel), whole);
    assert_eq!(train(false, OptimizerLayout::Partitioned), whole);
    assert_eq!(train(true, OptimizerLayout::Partitioned), whole);
}

/// State that is loaded when the first backward has moved the parameters goes to their new places.
#[test]
fn state_loaded_after_the_buckets_are_rebuilt_is_that_of_each_parameter() {
    ranks(2, |_, group| {
        for optimizer_layout in LAYOUTS {
            let vs = VarStore::new(Device::Cpu);
            // Used against the order of creation, so that the order of the buckets changes.
            let [last, first] = [("b", 8, 3), ("a", 5, 8)]
                .map(|(name, from, to)| linear(vs.root() / name, from, to));
            let options = DdpOptions { optimizer_layout, ..buckets_of(1e-5) };
            let mut ddp = DistributedDataParallel::new((), &vs, group.clone(), options)?;
            let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
            let starts = |ddp: &DistributedDataParallel<()>| -> Vec<usize> {
                let spans = ddp.flat_buffers().into_iter().flat_map(|it| it.layout.get().to_vec());
                spans.map(|span| span.index).collect()
            };
            let before = starts(&ddp);
            let saved: Vec<ParameterState> = optimizer
                .parameter_names()
                .into_iter()
                .zip(ddp.state_dict())
                .map(|(name, (same, parameter))| {
                    assert_eq!(name, same);
                    let numel = parameter.numel() as i64;
                    let values = Tensor::arange(numel, (Kind::Float, Device::Cpu))
                        + name.len() as f64 * 0.5
                        + numel as f64;
                    let values = || values.view(&parameter.size()[..]);
                    let tensors = [
                        ("exp_avg", values()),
                        ("exp_avg_sq", values() * 2),
                        ("step", Tensor::from(3f32)),
                    ];
                    let tensors = tensors.map(|(slot, tensor)| (slot.to_owned(), tensor)).into();
                    ParameterState { name, tensors }
                })
                .collect();
            let inputs = Tensor::ones([4, 5], (Kind::Float, Device::Cpu));
            ddp.backward(&last.forward(&first.forward(&inputs)).sum(Kind::Float))?;
            assert_ne!(starts(&ddp), before);
            optimizer.load_state(&saved)?;
            for (state, saved) in optimizer.state()?.iter().zip(&saved) {
                assert_eq!(state.name, saved.name);
                assert_eq!(state.tensors, saved.tensors, "{} {optimizer_layout:?}", state.name);
            }
        }
        Ok(())
    });
}

#[test]
fn trace_shows_a_reduce_scatter_and_an_all_gather_per_bucket() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let args = ["--nproc-per-node=2", "--zero", "--num-samples=256", "--max-epochs=1"];
    let path = format!("--trace={}", trace.display());
    let end = run_end(&[&args[..], &["--batch-size=32", &path]].concat());
    assert_eq!(end["event"], "end");
    let trace: Value = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().or(trace.as_array()).unwrap();
    let is =
        |event: &&Value, name: &str| event["name"].as_str().is_some_and(|it| it.starts_with(name));
    let count = |name: &str| events.iter().filter(|event| is(event, name)).count();
    // Four steps on two ranks; the first one all-reduces, because it finds the order of the buckets.
    assert_eq!((count("reduce_scatter"), count("all_gather")), (2 * 3, 2 * 4));
}
