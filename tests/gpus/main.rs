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

mod check_gpus; // env --check-gpus: each fault on its line, with the switch that helps
mod collectives; // every collective, message and group with NCCL
mod failures; // every kind of failure, at every stage, of threads and processes
mod hardware; // the same options on a GPU that is there: `make gpu-pack`
mod layouts; // ranks on one GPU, checkpoints that move
mod libraries; // libraries that are missing
mod machine; // a machine with simulated GPUs
mod nccl_faults; // calls of NCCL's that fail
mod same; // the same bits as on CPU ranks, whatever the options
mod schedules; // random orders of work, allocations that wait
mod steps; // what a step costs besides its work
