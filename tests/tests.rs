//! All integration tests, in one binary: linking libtorch is slow.

#![allow(clippy::unwrap_used, clippy::print_stdout)] // the helpers of tests are tests too

mod harness;
mod shared;

mod amp; // mixed precision: autocast of one thread, skipped steps
mod app; // a program of one's own: all flags, files and commands
mod bench; // ddp-mp bench: right results, right columns, wrong input
mod bind; // ranks on CPUs of their own, with all threads that they start
mod bisect; // ddp-mp bisect: the first tensors that differ, and its end at a signal
mod c10d; // groups in which PyTorch could be
mod callbacks; // a user's own: each step seen, a step skipped, a stop on one rank's request, a failure at a step's end
mod checkpoint; // stopped, killed, damaged, and going on as if nothing had happened
mod cli; // the program as a user meets it: help and mistakes
mod collectives; // every operation, kind, world size and awkward length; mismatches
mod comm; // what the program shows of the collectives
mod criterion; // losses, metrics, counts and steps of one's own in the trainer
mod cuda; // with a GPU; skips and says so without
mod data; // loaders, with workers and without
mod data_parallel; // DataParallel: DDP's results the old way
mod ddp; // N ranks against one, replicas bit-identical, models that differ
mod diff; // records of runs, and where two part
mod docs; // the README and the book: their commands, and the chapter on options
mod engine; // overlap, accumulation, unused parameters, communication hooks
mod explain; // what --explain tells: short, right, and changing nothing
mod failures; // every kind of failure at every stage on every rank
mod files; // data sets in files: written by others, of another kind, cut off
mod flags; // every flag with wrong values, from clap's own list
mod foreign; // what a run did not write, where it saves
mod functional; // collectives that gradients flow through
mod gloo; // ranks of several processes: what they reduce, and messages between them
mod gpt; // a gpt on a text: samples, options, validation
mod gradients; // what is in grad, as PyTorch has it: unused parameters, several models, retained graphs
mod groups; // some of the ranks, asynchronous operations, groups whose run has failed
mod kernels; // whether libtorch rounds as where the values of parity were recorded
mod last_step; // a failure costs no step: what a surviving rank saves, and when it cannot
mod layouts; // N ranks give one answer: as threads, as processes, on several hosts
mod lesson; // ddp-mp lesson: right and wrong answers, and the exercises of the book
mod libtorch; // a libtorch of another version than that of the build
mod limits; // open files and threads: each limit named with its remedy
mod live; // the live view without a terminal
mod many_ranks; // hundreds of threads: memory, and lists of tensors
mod matrix; // every kind of failure at every stage, where ranks are processes
mod mean; // the exact mean: N ranks with unequal batches are one rank on all samples
mod memory; // as much after ten thousand steps as after a thousand; blocks kept for the next tensors
mod messages; // from one rank to one other, and objects
mod mutated; // inputs that were changed at random
mod new; // ddp-mp new: what it writes, and what it refuses (`make crate` builds and runs it)
mod non_finite; // losses and gradients that are not finite
mod optim; // optimizers on buckets: their state, and which parameters they step
mod outputs; // tensors that are written to: those that overlap themselves are refused
mod own_model; // models of one's own in the trainer: several inputs
mod parity; // against values recorded from PyTorch
mod parity_gpt; // a gpt on a text, against values recorded from PyTorch
mod processes; // several processes: collectives, training, failures
mod prometheus; // the file for Prometheus: the last metrics, and how the run has ended
mod properties; // whatever the sizes: slices, splits
mod ranks; // what spawn promises
mod report; // the page of a run
mod restarts; // --max-restarts: every kind of failure, as if nothing had happened
mod sample; // text from a gpt: the tokens that nanoGPT draws
mod seen; // who is missing where, and what each rank does
mod share_model; // one copy of the model, or a partitioned optimizer: the bits of replicas
mod shell; // completions, --version, --quiet, colours
mod simulated_network; // `--simulate-cluster` in training
mod source_pages; // the pages about the source: all files, the path through them, the rooms
mod spawn_processes; // --spawn=processes: as threads, one report, nobody left behind
mod surface; // every public method of a group, with threads and with processes
mod sync_batch_norm; // the sum that gradients flow through, and batch norm over all ranks
mod tidy; // the rules of the source that a compiler does not check
mod trace; // what happened when, for Perfetto
mod verify; // N ranks against one, in every way; what really differs is found
mod written; // files of a run: never over inputs, whole after a kill, no part of one on a full disk
mod zero; // an optimizer that the ranks partition: its state, gradients and memory
