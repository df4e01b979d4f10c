//! `ddp-mp sample`: text from a trained gpt.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use tch::Device;

use crate::config::{Config, MAX_F32, Program, number, whole};
use engine::checkpoint::Checkpoint;
use engine::error::{Error, Result, Shown};
use engine::ffi::cuda::Cuda;
use engine::models::{Generate, GenerateOptions, ModelConfig, ModelKind};
use views::{Printer, Utf8Stream};

/// The flags of `sample`.
#[derive(Debug, Clone, Args)]
pub struct SampleFlags {
    /// Read the model from a run or a checkpoint folder
    ///
    /// For a run it reads the newest checkpoint. RUN/best is the one with the smallest validation loss
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Continue this text
    #[arg(long, value_name = "TEXT", default_value = "\n", hide_default_value = true)]
    #[arg(allow_hyphen_values = true)]
    #[arg(help = "Continue this text [default: a line break]")]
    pub prompt: String,
    /// Write N bytes after the prompt
    #[arg(long, value_name = "N", value_parser = whole::<usize>(0..=u64::MAX), default_value_t = 500)]
    pub num_tokens: usize,
    /// Divide the logits by X; 0 takes the likeliest byte
    #[arg(long, value_name = "X", value_parser = number(0.0..=MAX_F32), default_value_t = 0.8)]
    pub temperature: f64,
    /// Draw from the K likeliest bytes [default: all]
    #[arg(long, value_name = "K", value_parser = whole::<i64>(1..))]
    pub top_k: Option<i64>,
    /// Set the random seed
    #[arg(long, value_name = "N", value_parser = whole::<u64>(..), default_value_t = 0)]
    pub seed: u64,
}

/// Writes the prompt and what a gpt writes after it to stdout, as it writes it. The gpt is on the first GPU, if there
/// is one.
///
/// # Errors
/// [`Error::Input`] when the checkpoint cannot be read or holds another model; an error when stdout cannot be
/// written.
pub(crate) fn sample(
    flags: &SampleFlags,
    program: &Arc<Program>,
    cuda: &Cuda,
    printer: &Printer,
) -> anyhow::Result<()> {
    let device = if cuda.usable() > 0 { Device::Cuda(0) } else { Device::Cpu };
    let checkpoint =
        Checkpoint::read(&flags.checkpoint).map_err(|error| error.named("--checkpoint"))?;
    let config = gpt_of(program, &checkpoint, &flags.checkpoint)?;
    let (vs, model) = config.build(device, 0)?;
    checkpoint.load_model(&vs)?;

    let options = GenerateOptions {
        block_size: config.in_features,
        temperature: flags.temperature,
        top_k: flags.top_k,
        seed: flags.seed,
    };
    let prompt: Vec<i64> = flags.prompt.bytes().map(i64::from).collect();
    let tokens =
        Generate::new(&model, &prompt, options, device).map_err(|error| error.named("--prompt"))?;
    let mut text = Utf8Stream::new(printer);
    text.write(flags.prompt.as_bytes())?;
    for token in tokens.take(flags.num_tokens) {
        if !text.write(&[token? as u8])? {
            break; // the reader has closed the pipe
        }
    }
    Ok(text.end()?)
}

/// Returns the configuration of the gpt that `checkpoint` holds.
fn gpt_of(program: &Arc<Program>, checkpoint: &Checkpoint, path: &Path) -> Result<ModelConfig> {
    let wrong =
        |problem: String| Err(Error::usage(format!("--checkpoint {}: {problem}", path.shown())));
    let saved = &checkpoint.state().options;
    if !saved.contains_key("model") {
        return wrong(
            "it does not say which model it holds, because the program that saved it passed no options; use \
             models::Generate in that program"
                .into(),
        );
    }
    match Config::of_saved(program, saved).map(|config| config.model_config()) {
        Ok(config) if config.kind == ModelKind::Gpt => Ok(config),
        Ok(ModelConfig { kind, .. }) => wrong(format!(
            "it holds a {kind} model, which writes no text; use the checkpoint of a run with --model gpt"
        )),
        Err(error) => wrong(error.to_string()),
    }
}
