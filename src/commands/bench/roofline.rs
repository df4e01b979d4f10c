//! The limit of the machine: how fast as many threads as ranks can move the bytes of a collective. They never wait
//! for each other and compute nothing.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::bounded;

use crate::commands::CommOp;
use crate::error::{Error, Result};
use crate::operation::{CollectiveType, Operation};
use crate::os::affinity::unbind_this_thread;
use crate::os::limits::not_started;

/// The buffers of one thread, which reads every input once and writes every output once.
struct ThreadBuffers {
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    /// Whether the inputs are also the outputs.
    in_place: bool,
}

/// The memory of all threads: as much as the ranks of the collective have.
pub(super) struct MemoryRoofline(Vec<ThreadBuffers>);

/// The bytes of a piece, which stays in the first-level cache.
const PIECE_BYTES: usize = 4096;

impl MemoryRoofline {
    /// Allocates what the ranks must read and write of `bytes` bytes. They share the work.
    pub(super) fn new(op: CommOp, world_size: usize, bytes: u64) -> Self {
        let CollectiveType { inputs, outputs, reduces, .. } = op.moves();
        let (bytes, part) = (bytes as usize, (bytes as usize).div_ceil(world_size));
        let in_place = op == CommOp::Collective(Operation::AllReduce);
        let share = |rank| {
            let takes_part = inputs.is_list() && !outputs.is_list();
            let size = if reduces || (outputs.is_held_by(rank == 0) && takes_part) {
                part
            } else if outputs.is_held_by(rank == 0) {
                bytes
            } else {
                0
            };
            let buffers = |count| vec![vec![1; size]; count];
            ThreadBuffers {
                inputs: buffers(if reduces { world_size } else { 1 }),
                outputs: buffers(if in_place { 0 } else { 1 }),
                in_place,
            }
        };
        Self((0..world_size).map(share).collect())
    }

    /// Returns the time of one pass on the slowest thread, in seconds, on average over `iters` passes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] when a thread cannot be started.
    pub(super) fn measure(&mut self, iters: u64) -> Result<f64> {
        let count = self.0.len();
        let start = Barrier::new(count);
        // A message arrives for each thread when all threads have started. At the barrier they would wait forever for a
        // missing one.
        let (started_tx, started_rx) = bounded(count);
        let passes = |share: &mut ThreadBuffers| {
            unbind_this_thread(); // rank 0 starts them, on its CPUs
            if started_rx.recv().is_err() {
                return Duration::ZERO;
            }
            start.wait();
            let began = Instant::now();
            for _ in 0..iters {
                share.pass();
            }
            began.elapsed()
        };
        let slowest = thread::scope(|scope| {
            let passes = &passes;
            let start = |(number, share)| {
                let thread = thread::Builder::new().spawn_scoped(scope, move || passes(share));
                let what = || format!("thread {number} of {count} that measures the machine");
                thread.map_err(|error| Error::InvalidInput(not_started(&what(), &error)))
            };
            let threads: Result<Vec<_>> = self.0.iter_mut().enumerate().map(start).collect();
            if threads.is_ok() {
                (0..count).try_for_each(|_| started_tx.send(())).ok();
            }
            drop(started_tx);
            // A thread that only copies does not panic.
            Ok(threads?.into_iter().filter_map(|thread| thread.join().ok()).max())
        });
        Ok(slowest?.unwrap_or_default().as_secs_f64() / iters as f64)
    }
}

impl ThreadBuffers {
    /// Reads every input and writes every output. Data that is read passes through the nearest cache only.
    fn pass(&mut self) {
        let ThreadBuffers { inputs, outputs, in_place } = self;
        // With one input and one output, copies straight from memory to memory.
        if let ([input], [output]) = (&inputs[..], &mut outputs[..]) {
            output.copy_from_slice(input);
            std::hint::black_box(output);
            return;
        }
        let mut piece = [0; PIECE_BYTES];
        let len = inputs.first().map_or(0, Vec::len);
        for start in (0..len).step_by(PIECE_BYTES) {
            let range = start..(start + PIECE_BYTES).min(len);
            let piece = &mut piece[..range.len()];
            for input in &mut *inputs {
                piece.copy_from_slice(&input[range.clone()]);
                std::hint::black_box(&mut *piece);
            }
            for output in if *in_place { &mut *inputs } else { &mut *outputs } {
                output[range.clone()].copy_from_slice(piece);
            }
        }
        std::hint::black_box(inputs);
        std::hint::black_box(outputs);
    }
}
