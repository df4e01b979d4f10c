//! `zero`: what an optimizer that the ranks partition keeps and saves. Its bits are compared in `share_model`.

use std::fs;
use std::path::Path;

use ddp_mp::optim::{AdamW, AdamWOptions, GradState, Optimizer, ParameterState};
use ddp_mp::{DdpOptions, DistributedDataParallel, OptimizerLayout};
use serde_json::Value;
use tch::nn::{Module, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{buckets_of, linear, program, ranks, run_command, run_end, some_of};
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
        let (code, output, errors) = run_command(program);
        assert_eq!(code, Some(0), "{errors}");
        let end: Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
        end["peak_memory_bytes"].as_f64().unwrap()
    };
    let parameters = 4.0 * (20.0 * 2048.0 + 2.0 * 2048.0 * 2048.0);
    let saved = (peak(&[]) - peak(&["--zero"])) / parameters;
    println!("4 ranks save {saved:.2} times the memory of the parameters");
    assert!(saved > 1.5, "{saved}");
}

/// Returns the bytes of the optimizer's state in the newest checkpoint of a folder.
fn saved_state(folder: &Path) -> Vec<u8> {
    let newest = fs::read_to_string(folder.join("latest")).unwrap();
    fs::read(folder.join(newest.trim()).join("optimizer.safetensors")).unwrap()
}

/// A checkpoint contains the whole state. A run resumes from it with or without `--zero`, on any number of ranks.
#[test]
fn checkpoint_of_a_partitioned_optimizer_is_whole_and_resumes_anywhere() {
    for spawn in ["--spawn=processes", "--spawn=threads"] {
        let args = [MLP, &["--optimizer=adamw", "--max-epochs=3", spawn]].concat();
        let flags = |zero: bool| if zero { &["--zero"][..] } else { &[] };
        let train = |folder: &Path, ranks: &str, zero: bool, length: &str| {
            let dir = format!("--checkpoint-dir={}", folder.display());
            let run = [&args[..], &[&dir, ranks, length], flags(zero)].concat();
            run_end(&run)["parameters_hash"].clone()
        };
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [whole, in_parts] = folders.each_ref().map(|folder| folder.path());
        train(whole, "--nproc-per-node=2", false, "--max-steps=9");
        train(in_parts, "--nproc-per-node=2", true, "--max-steps=9");
        assert_eq!(saved_state(in_parts), saved_state(whole), "{spawn}");
        for ranks in some_of(["--nproc-per-node=2", "--nproc-per-node=3"], 1) {
            let resumed = [true, false].map(|zero| {
                let copy = tempfile::tempdir().unwrap();
                copy_folder(in_parts, copy.path());
                train(copy.path(), ranks, zero, "--resume=auto")
            });
            assert_eq!(resumed[0], resumed[1], "{spawn} {ranks}");
        }
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let copy = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &copy);
        } else {
            fs::copy(&path, &copy).unwrap();
        }
    }
}

/// From the second backward on, a rank has the averages of its partitions only. It gathers the others on request.
#[test]
fn averages_of_other_partitions_are_gathered_on_request() {
    let train = |averages_first: bool, zero: bool| {
        ranks(2, move |_, group| {
            let mut ddp = wrap(&group, LAYOUTS[usize::from(zero)])?;
            let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
            for step in 0..3 {
                ddp.zero_grad()?;
                let mut own = Vec::new();
                for part in 0..2 {
                    backward(&mut ddp, 2 * step + part)?; // the second one adds to the mean of the first
                    own = ddp.flat_buffers();
                }
                let expected = if zero { GradState::Partitioned } else { GradState::Averaged };
                assert!(own.iter().all(|buffer| buffer.layout.gradients() == expected));
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
    let whole = train(false, false);
    assert_eq!(train(false, true), whole);
    assert_eq!(train(true, true), whole);
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

/// Only rank 0 gets the state, and every rank takes its part of a whole one.
#[test]
fn state_of_a_partitioned_optimizer_is_whole_on_rank_0() {
    let states = |layout| {
        ranks(3, move |_, group| {
            let mut ddp = wrap(&group, layout)?;
            let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
            for step in 0..2 {
                ddp.zero_grad()?;
                backward(&mut ddp, step)?;
                optimizer.step(0.1)?;
            }
            let state = optimizer.state()?;
            if layout == OptimizerLayout::Partitioned && group.rank() > 0 {
                let error = optimizer.load_state(&state).unwrap_err().to_string();
                assert!(error.contains("has nothing for parameter"), "{error}");
            }
            let values = |(slot, tensor): (&String, &Tensor)| {
                (slot.clone(), Vec::<f32>::try_from(tensor.flatten(0, -1)).unwrap())
            };
            let values =
                |state: &ParameterState| state.tensors.iter().map(values).collect::<Vec<_>>();
            Ok(state.iter().map(values).collect::<Vec<_>>())
        })
    };
    let [whole, divided] = LAYOUTS.map(states);
    assert_eq!(divided[0], whole[0]);
    assert!(divided[1..].iter().all(Vec::is_empty));
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
