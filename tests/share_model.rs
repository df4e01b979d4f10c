//! `share_model` and `zero`: one copy of the model, and an optimizer that the ranks partition, give the bits of replicas.

use std::rc::Rc;

use ddp_mp::ddp::JoinOptions;
use ddp_mp::models::parameters_hash;
use ddp_mp::optim::{
    AdamW, AdamWOptions, GradState, Optimizer, ParamSpan, Sgd, SgdOptions, average_gradients,
    clip_grad_norm,
};
use ddp_mp::{DdpOptions, DistributedDataParallel, OptimizerLayout, ProcessGroup, ReduceOp};
use serde_json::Value;
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{
    buckets_of, in_parallel, linear, ranks, run, run_all_refused, run_end, run_events, some_of,
    words,
};
use crate::processes::end;
use crate::shared::power_sgd::{PowerSgd, PowerSgdOptions};

/// Returns the options of a wrapper with this layout.
pub(crate) fn with(optimizer_layout: OptimizerLayout) -> DdpOptions {
    DdpOptions { optimizer_layout, ..DdpOptions::default() }
}

/// Large and small parameters, with lengths that are multiples of a cache line and others.
pub(crate) const MLP: &[&str] = &["--model=mlp", "--hidden=300,256,129,130", "--num-samples=401"];

/// Returns what must be equal: each epoch's losses, and the end's without durations and bytes.
fn results(events: &[Value]) -> Vec<Value> {
    let keys = "event rank epoch steps loss parameters_hash replicas_equal validation";
    let picked = events.iter().filter(|event| event["event"] == "epoch" || event["event"] == "end");
    let pick = |event: &Value| keys.split(' ').map(|key| event[key].clone()).collect();
    let mut results: Vec<Value> = picked.map(pick).collect();
    results.sort_by_key(Value::to_string); // processes write their lines in any order
    results
}

/// Checks that runs with the `ways` have the results of those without: a row has the number of ranks and more options.
/// `make test` tries a third of the rows, each with one of the ways in turn.
#[track_caller]
fn same(ways: &[&str], base: &[&str], rows: &[(usize, &str)]) {
    for (number, &(count, row)) in some_of(rows, rows.len().div_ceil(3)).into_iter().enumerate() {
        let count = format!("--nproc-per-node={count}");
        let row: Vec<&str> = row.split_whitespace().collect();
        let args = [base, &row, &[&count]].concat();
        let apart = run_events(&args);
        assert!(apart.last().unwrap()["parameters_hash"].is_string());
        for way in some_of(ways.iter().cycle().skip(number).take(ways.len()), 1) {
            let found = run_events(&[&args[..], &words(way)].concat());
            assert_eq!(results(&found), results(&apart), "{way} {args:?}");
        }
    }
}

/// One copy for all ranks, and an optimizer that they partition.
const BOTH: &[&str] = &["--share-model", "--zero"];

/// Long: it starts a run for each option and layout.
#[test]
fn layouts_have_the_bits_of_replicas_with_each_optimizer() {
    same(
        BOTH,
        MLP,
        &[
            (1, "--optimizer=adamw"),
            (2, "--max-epochs=2"),
            (3, "--momentum=0.9 --dampening=0.1 --weight-decay=0.01"),
            (2, "--momentum=0.9 --nesterov --bucket-cap-mb=0.1"),
            (2, "--weight-decay=0.1 --no-decay-on-bias-and-norm"),
            (2, "--optimizer=adamw --max-epochs=2 --weight-decay=0.1"),
            (4, "--optimizer=adamw --no-decay-on-bias-and-norm --bucket-cap-mb=0.05"),
            (3, "--optimizer=adamw --beta1=0.8 --beta2=0.9 --eps=0.001 --weight-decay=0.1"),
            (2, "--max-epochs=2 --schedule=cosine --schedule-by=step --warmup-steps=3"),
            (1, ""),
        ],
    );
}

/// Long: it starts a run for each option and layout.
#[test]
fn layouts_have_the_bits_of_replicas_with_gradient_options() {
    same(
        BOTH,
        MLP,
        &[
            (2, "--max-grad-norm=0.1 --momentum=0.9"),
            (3, "--optimizer=adamw --max-grad-norm=0.01 --grad-accum-steps=2"),
            (2, "--skip-nonfinite=5 --inject-fault=nan:rank=1,at=step,step=3"),
            (3, "--exact-mean --momentum=0.9"),
            (2, "--exact-mean --grad-accum-steps=3 --optimizer=adamw"),
            (2, "--find-unused-parameters --momentum=0.9"),
            (2, "--static-graph --optimizer=adamw"),
            (2, "--comm-hook=bf16 --optimizer=adamw"),
            (2, "--bucket-cap-mb=0.1"),
            (2, "--check-replicas-every=2 --explain --momentum=0.9"),
        ],
    );
}

/// Long: it starts a run for each option and layout.
#[test]
fn layouts_have_the_bits_of_replicas_with_amp_buffers_and_validation() {
    same(
        BOTH,
        &["--dataset=digits", "--loss=cross-entropy", "--num-samples=150"],
        &[
            (3, "--model=cnn --sync-batch-norm --val-fraction=0.25 --optimizer=adamw"),
            (2, "--model=cnn --optimizer=adamw"),
            (2, "--model=cnn --amp=fp16 --max-grad-norm=1 --momentum=0.9"),
            (2, "--model=cnn --no-broadcast-buffers --momentum=0.9"),
            (
                4,
                "--model=mlp --hidden=512 --max-epochs=2 --dropout=0.3 --momentum=0.9 --num-workers=1",
            ),
            (2, "--model=cnn --amp=bf16 --optimizer=adamw"),
        ],
    );
}

/// Between processes, buckets are reduce-scattered during backward.
#[test]
fn processes_that_partition_the_optimizer_have_the_bits_of_replicated_ones() {
    same(
        &["--zero --spawn=processes"],
        MLP,
        &[
            (2, "--optimizer=adamw --max-epochs=2"),
            (3, "--momentum=0.9 --bucket-cap-mb=0.1"),
            (2, "--optimizer=adamw --max-grad-norm=0.01 --no-overlap"),
            (2, "--exact-mean --optimizer=adamw --grad-accum-steps=2"),
        ],
    );
}

#[test]
fn layouts_are_refused_where_they_cannot_be() {
    run_all_refused(&[
        (
            "--nproc-per-node=2 --share-model --spawn=processes",
            "--share-model: needs --spawn threads, because processes share no memory",
        ),
        ("--nproc-per-node=2 --share-model --strategy=dp", "--share-model: needs --strategy ddp"),
        (
            "--nproc-per-node=2 --zero --share-model",
            "--zero: cannot be combined with --share-model",
        ),
        ("--nproc-per-node=2 --zero --strategy=dp", "--zero: needs --strategy ddp"),
    ]);
    for (layout, reason) in [
        (OptimizerLayout::SharedModel, "a rank without inputs makes no optimizer steps"),
        (OptimizerLayout::Partitioned, "join cannot be used with OptimizerLayout::Partitioned"),
    ] {
        ranks(2, move |_, group| {
            let mut ddp = wrap(&group, layout)?;
            let error = ddp.join(JoinOptions::default(), |_| Ok(())).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
            Ok(())
        });
    }
}

#[test]
fn processes_of_several_ranks_have_the_bits_of_replicas() {
    // Of several buckets, which are rebuilt after the first step.
    let share = ("--share-model", &["--max-grad-norm=0.1", "--bucket-cap-mb=0.1"][..]);
    let zero = ("--zero", &["--bucket-cap-mb=0.2"][..]);
    let all = [(share, [2, 2]), (share, [1, 3]), (zero, [1, 3]), (zero, [2, 2])];
    for ((way, row), processes) in some_of(all, 2) {
        let args = [MLP, &["--optimizer=adamw"], row].concat();
        let hash = |args: &[&str]| end(args, &processes)["parameters_hash"].clone();
        assert_eq!(hash(&[&args[..], &[way]].concat()), hash(&args), "{way} {processes:?}");
    }
}

/// A rank that fails or stalls ends the run; no other rank waits for its part of a step for ever.
/// Long: it waits for time-outs.
#[test]
fn failure_of_a_rank_that_others_depend_on_in_a_step_ends_the_run() {
    let layouts = [&["--share-model"][..], &["--zero"], &["--zero", "--spawn=processes"]];
    let faults = [
        ("panic:rank=1,at=step,step=3", "rank 1 (CPU:1) failed in step #3: panicked"),
        ("error:rank=0,at=step,step=3", "rank 0 (CPU:0) failed"),
        ("stall:rank=2,at=step,step=3", "rank 2"),
    ];
    let all = layouts.iter().flat_map(|layout| faults.map(|fault| (layout, fault)));
    in_parallel(&some_of(all, 3), |&(layout, (fault, words))| {
        let fault = format!("--inject-fault={fault}");
        // Only a stall is found by waiting.
        let timeout = if words == "rank 2" { "--timeout=15s" } else { "--timeout=1h" };
        let args = ["--nproc-per-node=3", timeout, "--grace-period=1s", &fault];
        let (code, _, errors) = run(&[MLP, &args, layout].concat());
        assert_eq!(code, Some(1), "{errors}");
        assert!(errors.contains(words), "{fault} {layout:?}: {errors}");
    });
}

#[test]
fn verify_finds_no_difference_in_any_layout() {
    for layout in BOTH {
        let args = ["verify", "--nproc-per-node=2", "--model=mlp", "--hidden=300", layout];
        let (code, output, errors) = run(&args);
        assert_eq!(code, Some(0), "{layout}: {output}{errors}");
    }
}

/// A further rank takes its gradients and activations. As a replica it also takes parameters and the optimizer's state.
/// (Tensors below 32 MiB may stay with malloc when they are freed.)
#[test]
fn further_rank_of_a_shared_model_takes_memory_for_its_gradients_only() {
    let peak = |ranks: usize, more: &[&str]| {
        let count = format!("--nproc-per-node={ranks}");
        let model = ["--model=mlp", "--hidden=3072,3072", "--optimizer=adamw"];
        let length = ["--num-samples=512", "--max-steps=2", &count];
        run_end(&[&model[..], &length, more].concat())["peak_memory_bytes"].as_f64().unwrap()
    };
    let parameters = 4.0 * (20.0 * 3072.0 + 3072.0 * 3072.0);
    let of_a_rank = |more: &[&str]| (peak(3, more) - peak(1, more)) / 2.0 / parameters;
    let (replica, shared) = (of_a_rank(&[]), of_a_rank(&["--share-model"]));
    println!("a further rank takes {shared:.2} times its parameters, a replica {replica:.2} times");
    assert!(shared < 1.5 && replica > 3.5, "{shared} {replica}");
}

/// Returns a model with a large weight, and with the same values in each run.
fn model(vs: &VarStore) -> impl ModuleT + use<> {
    let root = vs.root();
    let model = nn::seq_t().add(linear(&root / "a", 64, 512)).add_fn(|x| x.relu()).add(linear(
        &root / "b",
        512,
        3,
    ));
    tch::no_grad(|| {
        for mut tensor in vs.trainable_variables() {
            let numel = tensor.numel() as i64;
            let values = Tensor::arange(numel, (Kind::Float, Device::Cpu)).cos() * 0.1;
            tensor.copy_(&values.view(&tensor.size()[..]));
        }
    });
    model
}

fn inputs(rank: usize, step: i64) -> Tensor {
    let values = Tensor::arange(8 * 64, (Kind::Float, Device::Cpu));
    (values * (0.1 + rank as f64 + step as f64)).sin().view([8, 64])
}

/// Returns [`model`], wrapped in this layout.
pub(crate) fn wrap(
    group: &Rc<ProcessGroup>,
    layout: OptimizerLayout,
) -> ddp_mp::Result<DistributedDataParallel<impl ModuleT + use<>>> {
    let vs = VarStore::new(Device::Cpu);
    DistributedDataParallel::new(model(&vs), &vs, group.clone(), with(layout))
}

/// Computes the gradients of a step's loss.
pub(crate) fn backward<M: ModuleT>(
    ddp: &mut DistributedDataParallel<M>,
    step: i64,
) -> ddp_mp::Result<()> {
    let inputs = inputs(ddp.group().rank(), step);
    ddp.backward(&ddp.forward(&inputs).square().mean(Kind::Float))
}

/// Before the step each rank has its own gradient; after `average_gradients` each has the mean, and the step is the same.
#[test]
fn gradients_of_a_shared_model_are_averaged_on_request() {
    let train = |averages_first: bool| {
        ranks(2, move |_, group| {
            let mut ddp = wrap(&group, OptimizerLayout::SharedModel)?;
            let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
            ddp.zero_grad()?;
            backward(&mut ddp, 0)?;
            let buffers = ddp.flat_buffers();
            assert!(buffers.iter().all(|b| b.layout.gradients() == GradState::LeftToStep));
            let (name, weight) = ddp.state_dict().swap_remove(0);
            let own = weight.grad().copy();
            if averages_first {
                let averaged = ddp.averaged_grad(&name)?.unwrap();
                assert!(averaged.equal(&weight.grad()));
                average_gradients(&buffers)?; // they are averaged once
                assert!(buffers.iter().all(|b| b.layout.gradients() == GradState::Averaged));
                let mut mean = own.copy();
                group.all_reduce(&mut mean, ReduceOp::PremulSum(0.5))?;
                assert!(weight.grad().equal(&mean) && !mean.equal(&own));
                let error = ddp.averaged_grad("nothing").unwrap_err().to_string();
                assert!(error.contains("trains no parameter `nothing`"), "{error}");
            }
            optimizer.step(0.1)?;
            Ok(ddp.parameters_hash()?)
        })
    };
    assert_eq!(train(true), train(false));
}

/// An older graph refuses its backward after a step of any rank, as with replicas.
#[test]
fn step_of_a_shared_model_raises_the_version_of_its_parameters() {
    ranks(2, |_, group| {
        let mut ddp = wrap(&group, OptimizerLayout::SharedModel)?;
        let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        ddp.zero_grad()?;
        let older = ddp.forward(&inputs(group.rank(), 0)).square().mean(Kind::Float);
        backward(&mut ddp, 1)?;
        optimizer.step(0.1)?;
        let error = ddp.backward(&older).unwrap_err().to_string();
        assert!(error.contains("modified by an inplace operation"), "{error}");
        Ok(())
    });
}

/// Parameters of several dtypes, of which one is empty, and clipping of a part of them: each is stepped once.
#[test]
fn dtypes_and_parts_of_a_shared_model_are_stepped_as_replicas() {
    let train = |layout| {
        ranks(3, move |_, group| {
            let vs = VarStore::new(Device::Cpu);
            let var = |name: &str, shape: &[i64], kind| {
                let mut root = vs.root();
                root.set_kind(kind);
                root.var(name, shape, nn::Init::Const(0.5))
            };
            let (empty, bias) = (var("empty", &[0], Kind::Float), var("bias", &[256], Kind::Float));
            let scale = var("scale", &[256], Kind::Double);
            let weight = var("weight", &[256, 256], Kind::Float);
            let mut ddp = DistributedDataParallel::new((), &vs, group.clone(), with(layout))?;
            let options = AdamWOptions { decays: ParamSpan::is_weight, ..AdamWOptions::default() };
            let mut optimizer = AdamW::new(ddp.flat_buffers(), options)?;
            for step in 0..3 {
                ddp.zero_grad()?;
                let x = inputs(group.rank(), step).view([2, 256]);
                let y = (x.matmul(&weight) + &bias) * scale.to_kind(Kind::Float);
                let loss = y.square().mean(Kind::Float) + empty.sum(Kind::Float);
                ddp.backward(&loss)?;
                if step > 0 {
                    let _ = clip_grad_norm(&ddp.flat_buffers()[..1], 0.01)?;
                }
                optimizer.step(0.1)?;
            }
            Ok(ddp.parameters_hash()?)
        })
    };
    assert_eq!(train(OptimizerLayout::SharedModel), train(OptimizerLayout::Replicated));
}

/// A gradient that shares its memory with another tensor's is copied before it is averaged in place.
#[test]
fn gradient_of_an_ignored_parameter_stays_its_rank_s_own() {
    ranks(2, |_, group| {
        let vs = VarStore::new(Device::Cpu);
        let root = vs.root();
        let var = |name: &str| root.var(name, &[128, 128], nn::Init::Const(0.5));
        let (trained, ignored) = (var("trained"), var("ignored"));
        let options = DdpOptions { ignore: vec!["ignored".into()], ..DdpOptions::default() };
        let mut ddp = DistributedDataParallel::new((), &vs, group.clone(), options)?;
        let factor = 1.0 + group.rank() as f64;
        let sum = trained.view(-1) + ignored.view(-1);
        ddp.backward(&((sum * factor).square().sum(Kind::Float)))?;
        // The derivative of (f (a + b))^2 is 2 f^2 (a + b).
        assert_eq!(ignored.grad().double_value(&[0, 0]), 2.0 * factor * factor);
        assert_eq!(trained.grad().double_value(&[0, 0]), (2.0 + 8.0) / 2.0);
        Ok(())
    });
}

/// After a wrap with `share_model` all ranks use one memory. A new wrap gives each rank its own, or shares it again.
#[test]
fn shared_model_can_be_wrapped_again() {
    use OptimizerLayout::{Replicated, SharedModel};
    let train = |layouts: [OptimizerLayout; 2], init_sync| {
        let hashes = ranks(3, move |_, group| {
            let vs = VarStore::new(Device::Cpu);
            let model = model(&vs);
            for layout in layouts {
                let options = DdpOptions { init_sync, ..with(layout) };
                let mut ddp = DistributedDataParallel::new((), &vs, group.clone(), options)?;
                let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
                for step in 0..2 {
                    ddp.zero_grad()?;
                    let outputs = model.forward_t(&inputs(group.rank(), step), true);
                    ddp.backward(&outputs.square().mean(Kind::Float))?;
                    optimizer.step(0.1)?;
                }
            }
            group.barrier()?; // no rank reads parameters that another still steps
            Ok(parameters_hash(&vs)?)
        });
        assert_eq!(hashes, [hashes[0]; 3], "{layouts:?} {init_sync}");
        hashes[0]
    };
    let replicas = train([Replicated, Replicated], true);
    for layouts in [[SharedModel, Replicated], [SharedModel; 2], [Replicated, SharedModel]] {
        for init_sync in [true, false] {
            assert_eq!(train(layouts, init_sync), replicas, "{layouts:?} {init_sync}");
        }
    }
}

/// After the first step the buckets follow rank 0's gradients. A communication hook makes results depend on the buckets.
#[test]
fn buckets_of_a_shared_model_are_those_of_replicas() {
    let train = |layout| {
        ranks(2, move |_, group| {
            let vs = VarStore::new(Device::Cpu);
            let root = vs.root();
            let var = |name: &str, shape: [i64; 2]| root.var(name, &shape, nn::Init::Const(0.01));
            let (a, b, c) = (var("a", [128, 64]), var("b", [32, 128]), var("c", [64, 32]));
            // Two parameters, or a larger one.
            let options = DdpOptions { optimizer_layout: layout, ..buckets_of(0.02) };
            let mut ddp = DistributedDataParallel::new((), &vs, group.clone(), options)?;
            let hook = PowerSgdOptions { start_iter: 2, ..PowerSgdOptions::default() };
            ddp.register_comm_hook(Box::new(PowerSgd::new(hook)))?;
            let momentum = SgdOptions { momentum: 0.9, ..SgdOptions::default() };
            let mut optimizer = Sgd::new(ddp.flat_buffers(), momentum)?;
            let before = ddp.statistics().bucket_bytes;
            for step in 0..5 {
                ddp.zero_grad()?;
                // Backward computes the gradient of `a` first, although `a` was created first.
                let y = inputs(group.rank(), step).matmul(&c).sin().matmul(&b).sin().matmul(&a);
                ddp.backward(&(y + 1.0).square().mean(Kind::Float))?;
                optimizer.step(0.1)?;
            }
            let after = ddp.statistics().bucket_bytes;
            assert_ne!(before, after, "the buckets have changed");
            Ok((after, ddp.parameters_hash()?))
        })
    };
    assert_eq!(train(OptimizerLayout::SharedModel), train(OptimizerLayout::Replicated));
}

#[test]
fn state_of_a_shared_model_is_loaded_after_all_have_read_it() {
    let (send, receive) = crossbeam::channel::bounded(1);
    ranks(2, move |_, group| {
        let mut ddp = wrap(&group, OptimizerLayout::SharedModel)?;
        let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        let values = |optimizer: &AdamW| -> anyhow::Result<Vec<Tensor>> {
            let states = optimizer.state()?.into_iter();
            Ok(states.flat_map(|state| state.tensors.into_values()).collect())
        };
        let mut states = Vec::new();
        for step in 0..2 {
            ddp.zero_grad()?;
            backward(&mut ddp, step)?;
            optimizer.step(0.1)?;
            states.push((optimizer.state()?, values(&optimizer)?));
        }
        group.barrier()?;
        let [(older, before), (_, now)] = &states[..] else { unreachable!() };
        if group.rank() == 0 {
            send.send(())?;
        } else {
            receive.recv()?;
            for _ in 0..300 {
                assert_eq!(values(&optimizer)?, *now);
            }
        }
        optimizer.load_state(older)?;
        assert_eq!(values(&optimizer)?, *before);
        Ok(())
    });
}
