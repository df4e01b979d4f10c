//! The options of the model.

use clap::Args;
use serde::Serialize;

use super::Config;
use super::ddp::needs_ddp;
use super::option_rules::{Conflict, InShortHelp, OnlyIf};
use super::values::{name, number, whole};
use crate::models::{Activation, ModelConfig, ModelKind};

/// The architecture of the model. The data gives the numbers of inputs and outputs.
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Model")]
#[group(skip)]
pub struct ModelSection {
    /// Model
    #[arg(id = "model", long = "model", value_name = "NAME", value_parser = name::<ModelKind>())]
    #[arg(default_value_t = ModelKind::Linear, add = InShortHelp)]
    #[serde(rename = "model")]
    pub kind: ModelKind,
    /// Widths of an mlp's hidden layers, with commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole::<i64>(1..))]
    #[arg(default_value = "64,64", add = HIDDEN)]
    pub hidden: Vec<i64>,
    /// Activation between the layers of an mlp or cnn
    #[arg(long, value_name = "NAME", value_parser = name::<Activation>())]
    #[arg(default_value_t = Activation::Relu, add = ACTIVATION)]
    pub activation: Activation,
    /// Dropout probability between an mlp's layers
    #[arg(long, value_name = "P", value_parser = number(0.0..=1.0), default_value_t = 0.0)]
    #[arg(add = DROPOUT)]
    pub dropout: f64,
    /// Channels of a cnn's convolutions, with commas
    ///
    /// Each convolution halves the image
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole::<i64>(1..))]
    #[arg(default_value = "16,32", add = CHANNELS)]
    pub channels: Vec<i64>,
    /// Batch norm of a cnn over all ranks' samples
    #[arg(long, add = Conflict(needs_ddp), add = BATCH_NORM)]
    pub sync_batch_norm: bool,
}

const MLP: &str = "is for an mlp; use --model mlp";
const CNN: &str = "is for a cnn; use --model cnn";

const HIDDEN: OnlyIf = OnlyIf(|config| config.model.kind.uses("hidden"), MLP);
const DROPOUT: OnlyIf = OnlyIf(|config| config.model.kind.uses("dropout"), MLP);
const CHANNELS: OnlyIf = OnlyIf(|config| config.model.kind.uses("channels"), CNN);
const BATCH_NORM: OnlyIf = OnlyIf(|config| config.model.kind.uses("sync_batch_norm"), CNN);
const ACTIVATION: OnlyIf = OnlyIf(
    |config| config.model.kind.uses("activation"),
    "a linear model has no activation; use --model mlp or cnn",
);

impl Config {
    /// Returns the configuration of the model.
    pub fn model_config(&self) -> ModelConfig {
        let default = ModelConfig::default();
        let ModelSection { kind, hidden, channels, activation, dropout, .. } = &self.model;
        ModelConfig {
            kind: *kind,
            in_features: self.data.in_features.unwrap_or(default.in_features),
            out_features: self.data.out_features.unwrap_or(default.out_features),
            hidden: if kind.uses("channels") { channels.clone() } else { hidden.clone() },
            activation: *activation,
            dropout: *dropout,
        }
    }
}
