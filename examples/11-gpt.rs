//! 11. A GPT: two ranks teach a small transformer to write, and it writes.
//!
//!     cargo run --release --example 11-gpt
//!
//! All that was said about a dense layer holds for a transformer: shards of the data, the same start, averaged
//! gradients. Only the model and its samples differ. A sample is a part of a text, the *context*; its targets are
//! the same text, one byte further. So one context asks the model for many predictions at once.
//!
//! `ddp-mp --config configs/gpt.toml` trains a larger one, which learns to write words.

#![allow(clippy::print_stdout)]

use std::io::Write;
use std::sync::Arc;

use anyhow::{Context, ensure};
use ddp_mp::models::{Forward, Generate, GenerateOptions};
use ddp_mp::optim::ParamSpan;
use ddp_mp::prelude::*;

const TEXT: &[u8] = include_bytes!("../assets/shakespeare.txt");

/// The tokens that the model sees at once.
const BLOCK_SIZE: usize = 32; // exercise
const RANKS: usize = 2;

/// The contexts per step and rank.
const BATCH: usize = 16;

const STEPS: usize = 150;

/// Returns the text that the model writes after a line break.
fn write(model: &impl Forward) -> anyhow::Result<String> {
    let block_size = BLOCK_SIZE as i64;
    let options = GenerateOptions { block_size, temperature: 0.8, ..Default::default() };
    let tokens = Generate::new(model, &[b'\n'.into()], options, Device::Cpu)?;
    let bytes = tokens.take(120).map(|token| token.map(|token| token as u8));
    let text = String::from_utf8_lossy(&bytes.collect::<Result<Vec<_>, _>>()?).into_owned();
    Ok(text.replace(|c: char| c.is_control(), " "))
}

/// Returns the bits that each byte of the text takes if the model knows only how frequent each byte is.
fn bits_of_frequencies(text: &[u8]) -> f64 {
    let mut counts = [0.0; 256];
    text.iter().for_each(|&byte| counts[byte as usize] += 1.0);
    let shares = counts.iter().map(|count| count / text.len() as f64);
    shares.filter(|share| *share > 0.0).map(|share| -share * share.log2()).sum()
}

fn main() -> anyhow::Result<()> {
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(TEXT)?;
    let (training, validation) = TextDataset::open(file.path(), BLOCK_SIZE)?.split_tail(0.02)?;
    // As many contexts as the steps take: then the run is one epoch.
    let training = Arc::new(training.first(STEPS * RANKS * BATCH)?);
    let validation = Arc::new(validation);

    let bits = spawn(RANKS, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let config = ModelConfig {
            kind: ModelKind::Gpt,
            in_features: BLOCK_SIZE as i64,
            out_features: TextDataset::VOCAB_SIZE,
            n_layer: 2,
            n_head: 2,
            n_embd: 64,
            ..ModelConfig::default()
        };
        let (vs, model) = config.build(rank.device(), 0)?;
        if rank.rank() == 0 {
            println!("before: {}", write(&model)?);
        }
        let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
        let options = AdamWOptions { decays: ParamSpan::is_weight, ..Default::default() };
        let optimizer: Box<dyn Optimizer> = Box::new(AdamW::new(ddp.flat_buffers(), options)?);
        let loader = |dataset: &Arc<TextDataset>| {
            let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
            DataLoader::new(dataset.clone(), sampler, BATCH, rank.device())
        };
        let schedule =
            Schedule::cosine(3e-3, STEPS as u64 - 20, 3e-4).by(Unit::Step).warmup(20, 0.1);
        let loss = Loss::CrossEntropy;
        let mut trainer = Trainer::new(ddp, optimizer, schedule, loader(&training)?, loss)?
            .options(TrainerOptions { max_grad_norm: Some(1.0), ..Default::default() })?
            .validation(loader(&validation)?, 1);
        trainer.train(1)?;
        if rank.rank() == 0 {
            println!("after:  {}", write(trainer.ddp().module())?);
        }
        Ok(trainer.state().best.as_ref().and_then(|best| best.bits_per_token))
    })?;
    let bits = bits[0].context("the run ends with a validation")?;
    let known = bits_of_frequencies(TEXT);
    println!("each byte of text that was held back takes {bits:.2} bits");
    println!("and {known:.2} bits if one knows only how frequent each byte is");
    ensure!(bits < known, "a model that sees the bytes before must do better");
    Ok(())
}
