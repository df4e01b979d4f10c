//! What the configuration asks of the DDP engine.

use serde::{Deserialize, Serialize};

use super::Config;
use crate::ddp::{CommHook, Compress, DdpOptions, PowerSgd, PowerSgdOptions};

/// How buckets of gradients are averaged: `--comm-hook`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommHookKind {
    /// As they are.
    None,
    /// As float16.
    Fp16,
    /// As bfloat16.
    Bf16,
    /// As products of thin matrices, from step [`Config::powersgd_start`] on.
    PowerSgd,
}

impl Config {
    /// The options of the engine that this asks for.
    pub fn ddp_options(&self) -> DdpOptions {
        let default = DdpOptions::default();
        DdpOptions {
            bucket_cap_mb: self.bucket_cap_mb,
            first_bucket_mb: default.first_bucket_mb.min(self.bucket_cap_mb),
            find_unused_parameters: self.find_unused_parameters,
            static_graph: self.static_graph,
            broadcast_buffers: !self.no_broadcast_buffers,
            overlap: self.no_overlap.then_some(false),
            ..default
        }
    }

    /// The communication hook that this asks for, if any.
    pub fn comm_hook(&self) -> Option<Box<dyn CommHook>> {
        match self.comm_hook {
            CommHookKind::None => None,
            CommHookKind::Fp16 => Some(Box::new(Compress::fp16())),
            CommHookKind::Bf16 => Some(Box::new(Compress::bf16())),
            CommHookKind::PowerSgd => Some(Box::new(PowerSgd::new(PowerSgdOptions {
                start_iter: self.powersgd_start,
                seed: self.seed,
                ..PowerSgdOptions::default()
            }))),
        }
    }
}
