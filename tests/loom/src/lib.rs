//! The part of ddp-mp in which ranks share memory, file by file as it is, but without libtorch.
//!
//! With the feature `loom` the ranks take turns in every possible order (`orders`); without it they are
//! threads, for the thread sanitizer to watch (`process_group::local::races`).

#![allow(dead_code, unused_imports)] // these files have more, for the rest of ddp-mp

// element.rs takes `Kind` from tch.
extern crate self as tch;

#[path = "../../../crates/engine/src/error/mod.rs"]
mod error;
#[path = "../../../crates/engine/src/operation.rs"]
mod operation;
mod process_group;
#[path = "../../../crates/engine/src/runtime/mod.rs"]
mod runtime;

#[cfg(loom)]
mod loom_primitives;
#[cfg(all(test, loom))]
mod orders;

/// The dtypes of `tch::Kind` that can be reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Uint8,
    Int8,
    Int16,
    Int,
    Int64,
    Half,
    Float,
    Double,
    Bool,
    BFloat16,
    Other,
}
