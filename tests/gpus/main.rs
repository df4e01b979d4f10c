//! The program and the library on simulated GPUs: `make test-gpus`.
//!
//! Three libraries stand in for libcuda, libtorch_cuda and libnccl. Every test here starts processes that load them.

#![allow(clippy::unwrap_used, clippy::print_stdout)] // the helpers of tests are tests too

#[path = "../harness.rs"]
#[allow(dead_code)] // shared with tests/tests.rs, which uses all of it
mod harness;
#[path = "../shared/mod.rs"]
#[allow(dead_code)]
mod shared;

mod collectives; // every collective, message and group with NCCL
mod failures; // every kind of failure, at every stage, of threads and processes
mod machine; // a machine with simulated GPUs
mod same; // the same bits as on CPU ranks, whatever the options
