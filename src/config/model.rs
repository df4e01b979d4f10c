//! The options of the model.

use std::rc::Rc;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use strum::VariantNames;
use tch::Device;
use tch::nn::VarStore;

use super::ddp::needs_ddp;
use super::option_rules::{Conflict, InShortHelp};
use super::values::{name, number, whole};
use super::{BuildContext, Config, DataSection};
use engine::error::Result;
use engine::ffi::Generator;
use engine::models::{Activation, Model, ModelConfig, ModelKind, build_on};
use engine::process_group::ProcessGroup;
use engine::runtime::panics;
use engine::trainer::Loss;

/// The architecture of the model. The data gives the numbers of inputs and outputs.
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Model")]
#[group(skip)]
pub struct ModelSection {
    /// Choose the model
    #[arg(id = "model", long = "model", value_name = "NAME", value_parser = name::<ModelKind>())]
    #[arg(default_value_t = ModelKind::Linear, add = InShortHelp, add = Conflict(needs_text))]
    #[serde(rename = "model")]
    pub kind: ModelKind,
    /// Set the widths of an mlp's hidden layers, with commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole::<i64>(1..))]
    #[arg(default_value = "64,64")]
    pub hidden: Vec<i64>,
    /// Choose the activation between layers of an mlp or cnn
    #[arg(long, value_name = "NAME", value_parser = name::<Activation>())]
    #[arg(default_value_t = Activation::Relu)]
    pub activation: Activation,
    /// Set the dropout probability in an mlp or gpt
    #[arg(long, value_name = "P", value_parser = number(0.0..=1.0), default_value_t = 0.0)]
    pub dropout: f64,
    /// Set the channels of a cnn's convolutions, with commas
    ///
    /// Each convolution halves the image
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole::<i64>(1..))]
    #[arg(default_value = "16,32")]
    pub channels: Vec<i64>,
    /// Compute a cnn's batch norm over all ranks' samples
    #[arg(long, add = Conflict(needs_ddp))]
    pub sync_batch_norm: bool,
    /// Give a gpt N blocks
    #[arg(long, value_name = "N", value_parser = whole::<i64>(1..))]
    #[arg(default_value_t = ModelConfig::default().n_layer)]
    pub n_layer: i64,
    /// Give each block of a gpt N attention heads
    #[arg(long, value_name = "N", value_parser = whole::<i64>(1..))]
    #[arg(default_value_t = ModelConfig::default().n_head)]
    pub n_head: i64,
    /// Set a gpt's width, a multiple of its heads
    #[arg(long, value_name = "N", value_parser = whole::<i64>(1..))]
    #[arg(default_value_t = ModelConfig::default().n_embd)]
    pub n_embd: i64,
    /// Set the tokens of a gpt's context
    #[arg(long, value_name = "N", value_parser = whole::<i64>(1..), default_value_t = 64)]
    pub block_size: i64,
    /// Leave biases out of a gpt's dense layers and norms
    #[arg(long)]
    pub no_bias: bool,
}

/// Refuses a gpt without a text, or with another loss than cross-entropy.
fn needs_text(config: &Config) -> Option<String> {
    let is_text = config.data.dataset.text_file().is_some();
    match config.model.kind {
        ModelKind::Gpt if config.program.dataset.is_some() => Some(
            "a gpt reads the text of --dataset, and this program brings its own data set".into(),
        ),
        ModelKind::Gpt if !is_text => Some("a gpt reads text; use --dataset text:FILE".into()),
        ModelKind::Gpt if config.training.loss != Loss::CrossEntropy => {
            Some("a gpt predicts classes, the next token; use --loss cross-entropy".into())
        }
        _ => None,
    }
}

impl Config {
    /// Returns why the option `key` has no effect: it is one of other models than the chosen one. `None` for any other
    /// option.
    pub(super) fn needs_other_model(&self, key: &str) -> Option<String> {
        let kinds = ModelKind::VARIANTS.iter().filter_map(|name| name.parse::<ModelKind>().ok());
        let users = kinds.filter(|kind| kind.uses(key)).map(ModelKind::name);
        let users = users.collect::<Vec<_>>().join(" or ");
        if users.is_empty() || self.model.kind.uses(key) || self.program.model.is_some() {
            return None;
        }
        let article = if users.starts_with('m') { "an" } else { "a" };
        Some(format!("applies only to {article} {users}; add --model {users}, or remove it"))
    }

    /// Returns the number of predictions that a sample asks for: one, or one for each token of a text.
    pub(crate) fn tokens_per_sample(&self) -> usize {
        if self.model.kind.uses("block_size") { self.model.block_size as usize } else { 1 }
    }

    /// Returns the model's name, for reports.
    pub(crate) fn model_name(&self) -> &'static str {
        match self.program.model {
            Some(_) => self.program.name,
            None => self.model.kind.name(),
        }
    }

    /// Builds the model of `rank`, with the parameters that the seed gives, the same on every rank. `group` is `None`
    /// where the model is built before any rank starts.
    ///
    /// # Errors
    /// The errors of [`ModelConfig::build`], and an error for a panic of the program's own model.
    pub(crate) fn build_model(
        &self,
        device: Device,
        generator: &Arc<Generator>,
        group: Option<&Rc<ProcessGroup>>,
    ) -> Result<(VarStore, Model)> {
        let seed = self.training.seed;
        let Some(build) = &self.program.model else {
            let (vs, model) = self.model_config().build(device, seed)?;
            let model = model.with_generator(generator);
            return Ok(match group {
                Some(group) if self.model.sync_batch_norm => {
                    (vs, model.convert_sync_batchnorm(group))
                }
                _ => (vs, model),
            });
        };
        let DataSection { in_features, out_features, .. } = self.data;
        let args = &*self.own.args;
        let context = BuildContext { args, generator, group, in_features, out_features };
        panics::in_closure("the model", || {
            build_on(device, seed, |path| Ok(build(path, &context)))
        })?
    }

    /// Returns the configuration of the model.
    pub fn model_config(&self) -> ModelConfig {
        let default = ModelConfig::default();
        let ModelSection { kind, hidden, channels, activation, dropout, .. } = &self.model;
        let ModelSection { n_layer, n_head, n_embd, block_size, no_bias, .. } = self.model;
        let in_features = Some(block_size).filter(|_| kind.uses("block_size"));
        ModelConfig {
            kind: *kind,
            in_features: in_features.or(self.data.in_features).unwrap_or(default.in_features),
            out_features: self.data.out_features.unwrap_or(default.out_features),
            hidden: if kind.uses("channels") { channels.clone() } else { hidden.clone() },
            activation: *activation,
            dropout: *dropout,
            n_layer,
            n_head,
            n_embd,
            bias: !no_bias,
        }
    }
}
