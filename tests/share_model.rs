//! `share_model`: one copy of the model gives the bits of a replica for each rank, whatever the options.

use ddp_mp::optim::{
    AdamW, AdamWOptions, GradState, Optimizer, Sgd, SgdOptions, average_gradients,
};
use ddp_mp::{DdpOptions, DistributedDataParallel, ReduceOp};
use serde_json::Value;
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, run};

/// Large and small parameters, with lengths that are multiples of a cache line and others.
const MLP: &[&str] = &["--model=mlp", "--hidden=300,256,129,130", "--num-samples=401"];
const CNN: &[&str] =
    &["--model=cnn", "--dataset=digits", "--loss=cross-entropy", "--num-samples=150"];
const DIGITS: &[&str] = &[
    "--model=mlp",
    "--hidden=512",
    "--dataset=digits",
    "--loss=cross-entropy",
    "--num-samples=300",
];

/// Returns the events of a run on CPU ranks.
#[track_caller]
fn events(args: &[&str]) -> Vec<Value> {
    let (code, output, errors) = run(&[args, &["--log-format=json"]].concat());
    assert_eq!(code, Some(0), "{args:?}\n{errors}");
    output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns what must be equal: each epoch's losses, and the end's without durations and bytes.
fn results(events: &[Value]) -> Vec<Value> {
    let keys = [
        "event",
        "rank",
        "epoch",
        "steps",
        "loss",
        "parameters_hash",
        "replicas_equal",
        "validation",
    ];
    let picked = events.iter().filter(|event| event["event"] == "epoch" || event["event"] == "end");
    picked.map(|event| keys.iter().map(|key| event[*key].clone()).collect()).collect()
}

#[track_caller]
fn same(base: &[&str], rows: &[(usize, &str)]) {
    for &(count, row) in rows {
        let count = format!("--nproc-per-node={count}");
        let row: Vec<&str> = row.split_whitespace().collect();
        let args = [base, &row, &[&count]].concat();
        let apart = events(&args);
        let shared = events(&[&args[..], &["--share-model"]].concat());
        assert_eq!(results(&shared), results(&apart), "{args:?}");
        assert!(shared.last().unwrap()["parameters_hash"].is_string());
    }
}

#[test]
fn shared_model_has_the_bits_of_replicas_with_each_optimizer() {
    same(
        MLP,
        &[
            (1, ""),
            (2, "--max-epochs=2"),
            (3, "--momentum=0.9 --dampening=0.1 --weight-decay=0.01"),
            (2, "--momentum=0.9 --nesterov"),
            (2, "--weight-decay=0.1 --no-decay-on-bias-and-norm"),
            (1, "--optimizer=adamw"),
            (2, "--optimizer=adamw --max-epochs=2"),
            (3, "--optimizer=adamw --beta1=0.8 --beta2=0.9 --eps=0.001 --weight-decay=0.1"),
            (4, "--optimizer=adamw --no-decay-on-bias-and-norm"),
            (2, "--max-epochs=2 --schedule=cosine --schedule-by=step --warmup-steps=3"),
        ],
    );
}

#[test]
fn shared_model_has_the_bits_of_replicas_with_gradient_options() {
    same(
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
            (2, "--comm-hook=powersgd --powersgd-start-iter=2"),
            (2, "--bucket-cap-mb=0.1"),
            (2, "--check-replicas-every=2 --explain"),
        ],
    );
}

#[test]
fn shared_model_has_the_bits_of_replicas_with_amp_buffers_and_validation() {
    same(
        CNN,
        &[
            (2, "--optimizer=adamw"),
            (3, "--sync-batch-norm --val-fraction=0.25"),
            (2, "--no-broadcast-buffers --momentum=0.9"),
            (2, "--amp=bf16 --optimizer=adamw"),
            (2, "--amp=fp16 --max-grad-norm=1"),
        ],
    );
    same(DIGITS, &[(4, "--max-epochs=2 --dropout=0.3 --momentum=0.9 --num-workers=1")]);
}

#[test]
fn one_copy_per_process_has_the_bits_of_replicas() {
    // Ranks of one process share. Those of several are tried by `processes`.
    let (code, _, errors) = run(&["--share-model", "--spawn=processes", "--nproc-per-node=2"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("--share-model: needs --spawn threads"), "{errors}");
    let (code, _, errors) = run(&["--share-model", "--strategy=dp", "--nproc-per-node=2"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("--share-model: needs --strategy ddp"), "{errors}");
}

/// A checkpoint of one form continues in the other, to the bits of a run without interruption.
#[test]
fn checkpoint_of_a_shared_model_resumes_with_replicas_and_back() {
    let args = [MLP, &["--nproc-per-node=2", "--optimizer=adamw", "--max-epochs=3"]].concat();
    let whole = events(&args);
    for before in [true, false] {
        for after in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let dir = format!("--checkpoint-dir={}", folder.path().display());
            let shared = |yes: bool| if yes { &["--share-model"][..] } else { &[] };
            let first = [&args[..], &[&dir, "--max-steps=9"], shared(before)].concat();
            events(&first);
            let second = [&args[..], &[&dir, "--resume=auto"], shared(after)].concat();
            let resumed = events(&second);
            let hash = |events: &[Value]| events.last().unwrap()["parameters_hash"].clone();
            assert_eq!(hash(&resumed), hash(&whole), "{before} {after}");
        }
    }
}

/// Returns a model with a large weight, and with the same values in each run.
fn model(vs: &VarStore) -> impl ModuleT + use<> {
    let root = vs.root();
    let model = nn::seq_t()
        .add(nn::linear(&root / "a", 64, 512, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(&root / "b", 512, 3, Default::default()));
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

/// The ranks' parameters are one memory, and so is the optimizer's state; gradients are not.
#[test]
fn ranks_that_share_a_model_have_the_same_parameter_memory() {
    let addresses = ranks(3, |_, group| {
        let vs = VarStore::new(Device::Cpu);
        let model = model(&vs);
        let options = DdpOptions { share_model: true, ..DdpOptions::default() };
        let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
        let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        for step in 0..2 {
            ddp.zero_grad()?;
            let loss = ddp.forward(&inputs(group.rank(), step)).square().mean(Kind::Float);
            ddp.backward(&loss)?;
            optimizer.step(0.1)?;
        }
        let state = ddp.state_dict();
        let address = |tensor: &Tensor| tensor.data_ptr() as usize;
        let parameters: Vec<usize> = state.iter().map(|(_, tensor)| address(tensor)).collect();
        let gradients: Vec<usize> = state.iter().map(|(_, t)| address(&t.grad())).collect();
        group.barrier()?;
        Ok((parameters, gradients))
    });
    for (parameters, gradients) in &addresses[1..] {
        assert_eq!(*parameters, addresses[0].0);
        assert!(gradients.iter().zip(&addresses[0].1).all(|(one, other)| one != other));
    }
}

/// Before the step each rank has its own gradient; after `average_gradients` each has the mean, and the step is the same.
#[test]
fn gradients_of_a_shared_model_are_averaged_on_request() {
    let train = |averages_first: bool| {
        ranks(2, move |_, group| {
            let vs = VarStore::new(Device::Cpu);
            let model = model(&vs);
            let options = DdpOptions { share_model: true, ..DdpOptions::default() };
            let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
            let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
            ddp.zero_grad()?;
            let loss = ddp.forward(&inputs(group.rank(), 0)).square().mean(Kind::Float);
            ddp.backward(&loss)?;
            let buffers = ddp.flat_buffers();
            assert!(buffers.iter().all(|b| b.places.gradients() == GradState::Complete));
            let weight = ddp.state_dict().swap_remove(0).1;
            let own = weight.grad().copy();
            if averages_first {
                average_gradients(&buffers)?;
                assert!(buffers.iter().all(|b| b.places.gradients() == GradState::Averaged));
                let mut mean = own.copy();
                group.all_reduce(&mut mean, ReduceOp::PremulSum(0.5))?;
                assert!(weight.grad().equal(&mean) && !mean.equal(&own));
            }
            optimizer.step(0.1)?;
            Ok(ddp.parameters_hash()?)
        })
    };
    assert_eq!(train(true), train(false));
}

/// Two backwards that average, before one step, add up as they do with replicas.
#[test]
fn second_backward_adds_to_the_mean_of_the_first() {
    let train = |share_model: bool| {
        ranks(2, move |_, group| {
            let vs = VarStore::new(Device::Cpu);
            let model = model(&vs);
            let options = DdpOptions { share_model, ..DdpOptions::default() };
            let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
            let momentum = SgdOptions { momentum: 0.9, ..SgdOptions::default() };
            let mut optimizer = Sgd::new(ddp.flat_buffers(), momentum)?;
            for step in 0..3 {
                ddp.zero_grad()?;
                for part in 0..2 {
                    let inputs = inputs(group.rank(), 2 * step + part);
                    ddp.backward(&ddp.forward(&inputs).square().mean(Kind::Float))?;
                }
                optimizer.step(0.1)?;
                optimizer.step(0.01)?; // with the same gradients
            }
            Ok(ddp.parameters_hash()?)
        })
    };
    assert_eq!(train(true), train(false));
}

/// An older graph refuses its backward after a step of any rank, as with replicas.
#[test]
fn step_of_a_shared_model_raises_the_version_of_its_parameters() {
    ranks(2, |_, group| {
        let vs = VarStore::new(Device::Cpu);
        let model = model(&vs);
        let options = DdpOptions { share_model: true, ..DdpOptions::default() };
        let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
        let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        ddp.zero_grad()?;
        let older = ddp.forward(&inputs(group.rank(), 0)).square().mean(Kind::Float);
        ddp.backward(&ddp.forward(&inputs(group.rank(), 1)).square().mean(Kind::Float))?;
        optimizer.step(0.1)?;
        let error = ddp.backward(&older).unwrap_err().to_string();
        assert!(error.contains("modified by an inplace operation"), "{error}");
        Ok(())
    });
}
