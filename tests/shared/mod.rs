//! Checks that ranks on any device pass: tests/tests.rs runs them on the CPU, tests/gpus on simulated GPUs.

pub(crate) mod faults; // every failure, and what a run reports of it
pub(crate) mod functional; // collectives that gradients flow through
pub(crate) mod groups; // some of the ranks, asynchronous operations
pub(crate) mod kinds; // every kind of numbers, reduction and length
#[path = "../../examples/power_sgd/hook.rs"]
pub(crate) mod power_sgd; // the communication hook of an example
pub(crate) mod scene; // several processes that a test starts
pub(crate) mod surface; // every public method of a group
