//! A gpt on a text against PyTorch's: `gpt` in tests/parity/record.py recorded the values of tests/parity/gpt.json.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use ddp_mp::ffi::Autocast;
use ddp_mp::models::{ModelConfig, ModelKind};
use ddp_mp::optim::{OptimizerOptions, ParamSpan, Unit};
use ddp_mp::trainer::{Loss, Trainer, TrainerOptions};
use ddp_mp::{
    AdamWOptions, DataLoader, Dataset, DistributedDataParallel, DistributedSampler,
    OptimizerLayout, Schedule, TextDataset,
};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, repository, some_of};
use crate::kernels::has_recorded_kernels;
use crate::parity::{EpochLosses, difference, digest, flat, recorded, state};
use crate::share_model::with;

#[derive(Deserialize, Clone)]
struct Recorded {
    seed: u64,
    batch: usize,
    epochs: u64,
    max_norm: f64,
    n_layer: i64,
    n_head: i64,
    n_embd: i64,
    block_size: i64,
    lr: f64,
    betas: (f64, f64),
    weight_decay: f64,
    warmup: u64,
    start_factor: f64,
    eta_min: f64,
    initial: Vec<Initial>,
    cases: Vec<Case>,
}

/// The parameters before training.
#[derive(Deserialize, Clone)]
struct Initial {
    bias: bool,
    /// Digests of the bits.
    parameters: BTreeMap<String, String>,
    /// The loss with 8 times these parameters.
    float32: f64,
    bfloat16: f64,
}

#[derive(Deserialize, Clone)]
struct Case {
    world_size: usize,
    samples: usize,
    bias: bool,
    /// PyTorch's AdamW has two kernels. They round differently.
    fused: bool,
    /// Of each epoch.
    losses: Vec<f64>,
    /// A digest of all bits of all parameters.
    bits: String,
    /// Of each parameter: its norm in float64, and some of its numbers.
    r#final: BTreeMap<String, Vec<f64>>,
}

impl Recorded {
    fn read() -> Self {
        serde_json::from_value(recorded("gpt.json")).unwrap()
    }

    fn model(&self, bias: bool) -> ModelConfig {
        ModelConfig {
            kind: ModelKind::Gpt,
            in_features: self.block_size,
            out_features: TextDataset::VOCAB_SIZE,
            n_layer: self.n_layer,
            n_head: self.n_head,
            n_embd: self.n_embd,
            bias,
            ..ModelConfig::default()
        }
    }

    fn contexts(&self, samples: usize) -> TextDataset {
        let text = repository("assets/shakespeare.txt");
        TextDataset::open(&text, self.block_size as usize).unwrap().first(samples).unwrap()
    }

    /// Trains as in this case. Returns it with what that has come to.
    fn train(&self, case: &Case, layout: OptimizerLayout) -> Case {
        let (recorded, model) = (self.clone(), self.model(case.bias));
        let dataset = Arc::new(self.contexts(case.samples));
        let mut all = ranks(case.world_size, move |rank, group| {
            let (vs, model) = model.build(rank.device(), recorded.seed)?;
            let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
            let sampler = sampler.seed(recorded.seed);
            let loader = DataLoader::new(dataset.clone(), sampler, recorded.batch, rank.device())?;
            let ddp = DistributedDataParallel::new(model, &vs, group, with(layout))?;
            let optimizer = AdamWOptions {
                betas: recorded.betas,
                weight_decay: recorded.weight_decay,
                decays: ParamSpan::is_weight,
                ..AdamWOptions::default()
            };
            let optimizer = optimizer.build(ddp.flat_buffers())?;
            let steps = recorded.epochs * loader.num_batches() as u64;
            assert_eq!(steps, 50);
            let schedule = Schedule::cosine(recorded.lr, steps - recorded.warmup, recorded.eta_min);
            let schedule = schedule.by(Unit::Step).warmup(recorded.warmup, recorded.start_factor);
            let losses = Rc::new(RefCell::default());
            let options = TrainerOptions {
                max_grad_norm: Some(recorded.max_norm),
                ..TrainerOptions::default()
            };
            let mut trainer = Trainer::new(ddp, optimizer, schedule, loader, Loss::CrossEntropy)?
                .options(options)?
                .callback(EpochLosses(Rc::clone(&losses)));
            trainer.train(recorded.epochs)?;
            let in_order = vs.trainable_variables();
            let bits = bits(in_order.iter().flat_map(flat));
            Ok((losses.take(), bits, state(&vs)))
        });
        assert!(all.iter().all(|rank| rank == &all[0]), "the ranks differ");
        let (losses, bits, values) = all.remove(0);
        let r#final = values.into_iter().map(|(name, values)| (name.clone(), some(&name, &values)));
        Case { losses, bits, r#final: r#final.collect(), ..case.clone() }
    }
}

/// Returns a digest of every bit, as record.py does.
fn bits(values: impl IntoIterator<Item = f32>) -> String {
    digest(values.into_iter().map(|value| value.to_bits() as usize))
}

/// Returns the norm in float64, and some of the numbers, as record.py does.
fn some(name: &str, values: &[f32]) -> Vec<f64> {
    let mut values = Tensor::from_slice(values).to_kind(Kind::Double);
    if name.ends_with("c_attn.bias") {
        // Without that of the keys: softmax takes it away, and its gradient is what rounding leaves.
        let parts = values.chunk(3, 0);
        values = Tensor::cat(&[&parts[0], &parts[2]], 0);
    }
    let norm = values.norm().double_value(&[]);
    let numbers = values.slice(0, 0, None, values.size()[0] / 4);
    [vec![norm], Vec::try_from(numbers).unwrap()].concat()
}

#[test]
fn gpt_starts_with_the_bits_of_pytorch() {
    let recorded = Recorded::read();
    assert_eq!(recorded.initial.len(), 2);
    for initial in &recorded.initial {
        let (vs, _) = recorded.model(initial.bias).build(Device::Cpu, recorded.seed).unwrap();
        let digests: BTreeMap<_, _> =
            state(&vs).into_iter().map(|(name, values)| (name, bits(values))).collect();
        assert_eq!(digests, initial.parameters);
    }
}

#[test]
fn gpt_has_the_loss_of_pytorch_with_and_without_autocast() {
    let recorded = Recorded::read();
    for initial in recorded.initial.clone() {
        let recorded = recorded.clone();
        // On a rank, whose operations have one thread, as when the values were recorded.
        ranks(1, move |_, _| {
            let (vs, model) = recorded.model(initial.bias).build(Device::Cpu, recorded.seed)?;
            tch::no_grad(|| vs.trainable_variables().iter_mut().for_each(|it| *it *= 8));
            let batch: Vec<usize> = (0..recorded.batch).collect();
            let (inputs, targets) = recorded.contexts(recorded.batch).batch(&batch)?;
            let loss = || -> anyhow::Result<f64> {
                let logits = tch::no_grad(|| model.forward_t(&inputs, false));
                Ok(Loss::CrossEntropy.of(&logits, &targets)?.double_value(&[]))
            };
            let rounding = if has_recorded_kernels() { 0.0 } else { 1e-6 * initial.float32 };
            let (ours, theirs) = (loss()?, initial.float32);
            assert!((ours - theirs).abs() <= rounding, "{ours}, PyTorch {theirs}");
            let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16)?;
            let (half, theirs, without) = (loss()?, initial.bfloat16, initial.float32);
            println!("bfloat16: {half}, PyTorch {theirs}; float32: {without}");
            // Processors with bfloat16 and without round differently.
            let bound = 1e-1 * (theirs - without).abs();
            assert!(bound > 1e-6 && (half - theirs).abs() <= bound, "{half}, {theirs}, {without}");
            Ok(())
        });
    }
}

/// With PyTorch's fused AdamW not a bit differs for one and two ranks, whose two gradients have one sum.
/// Long: it trains all recorded cases in three layouts.
#[test]
fn gpt_trains_as_with_pytorch_ddp() {
    use OptimizerLayout::{Partitioned, Replicated, SharedModel};
    let recorded = Recorded::read();
    let mut missed = Vec::new();
    for case in &recorded.cases {
        for layout in some_of([Replicated, SharedModel, Partitioned], 2) {
            let Case { losses, bits, r#final, .. } = recorded.train(case, layout);
            assert!(r#final.keys().eq(case.r#final.keys()), "{:?}", r#final.keys());
            assert!(losses.last() < losses.first(), "{losses:?}");
            let losses = difference(&losses, &case.losses);
            let pairs = case.r#final.iter();
            let pairs = pairs.map(|(name, theirs)| (difference(&r#final[name], theirs), name));
            let (values, name) = pairs.max_by(|(a, _), (b, _)| a.total_cmp(b)).unwrap();
            let Case { world_size, bias, fused, .. } = *case;
            let equal_bits = bits == case.bits;
            let row = format!(
                "{world_size} ranks, {layout:?}, bias {bias}, fused {fused}: losses differ by {losses:.1e}, values by \
                 {values:.1e} ({name}), equal bits {equal_bits}"
            );
            println!("{row}");
            let is_same = fused && world_size < 3;
            // Elsewhere numbers of the last bit grow over fifty steps of AdamW, most where gradients are small.
            if losses > 1e-7 || values > 5e-4 || is_same && has_recorded_kernels() && !equal_bits {
                missed.push(row);
            }
        }
    }
    assert!(recorded.cases.len() == 12 && missed.is_empty(), "{}", missed.join("\n"));
}
