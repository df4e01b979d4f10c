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
    #[arg(default_value = "64,64", add = MLP)]
    pub hidden: Vec<i64>,
    /// Activation between the layers of an mlp or cnn
    #[arg(long, value_name = "NAME", value_parser = name::<Activation>())]
    #[arg(default_value_t = Activation::Relu, add = LAYERS)]
    pub activation: Activation,
    /// Dropout probability between an mlp's layers
    #[arg(long, value_name = "P", value_parser = number(0.0..=1.0), default_value_t = 0.0)]
    #[arg(add = MLP)]
    pub dropout: f64,
    /// Channels of a cnn's convolutions, with commas
    ///
    /// Each convolution halves the image
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole::<i64>(1..))]
    #[arg(default_value = "16,32", add = CNN)]
    pub channels: Vec<i64>,
    /// Batch norm of a cnn over all ranks' samples
    #[arg(long, add = Conflict(needs_ddp), add = CNN)]
    pub sync_batch_norm: bool,
}

const MLP: OnlyIf =
    OnlyIf(|config| config.model.kind == ModelKind::Mlp, "is for an mlp; use --model mlp");
const CNN: OnlyIf =
    OnlyIf(|config| config.model.kind == ModelKind::Cnn, "is for a cnn; use --model cnn");
const LAYERS: OnlyIf = OnlyIf(
    |config| config.model.kind != ModelKind::Linear,
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
            hidden: if *kind == ModelKind::Cnn { channels.clone() } else { hidden.clone() },
            activation: *activation,
            dropout: *dropout,
        }
    }
}
