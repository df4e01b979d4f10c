//! The dispatch: the one path of every collective from its caller to the backend.
//!
//! 1. [`collective`](ProcessGroup::collective) checks what needs no other rank, and makes every tensor contiguous.
//! 2. [`dispatch`](ProcessGroup::dispatch) notes the rank's activity for the other ranks, injects a planned fault, and
//!    numbers the call.
//! 3. It opens the call's entry in the flight recorder.
//! 4. It runs the call on the [`RankBackend`], which compares the ranks' calls where it must, and moves the data. Over a
//!    simulated network it then waits.
//! 5. It counts the traffic. The entry ends with the call.
//!
//! [`start_all_reduce`](ProcessGroup::start_all_reduce) takes the same path. Its entry may end later, because the
//! backend may continue in the background.

use std::panic::Location;

use tch::Tensor;

use super::backend::RankBackend;
use super::call::{Call, Options};
use super::contiguous::Contiguous;
use super::network::InFlight;
use super::{ProcessGroup, ReduceOp};
use crate::error::{Error, Result};
use crate::ffi::{self, TensorFacts};
use crate::operation::Operation;
use crate::runtime::{CallSite, SpanId};

impl ProcessGroup {
    /// Runs a collective on tensors that need not be contiguous. `shape` must be the same on all ranks.
    #[track_caller]
    pub(super) fn collective(
        &self,
        operation: Operation,
        options: Options,
        shape: &[i64],
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<()> {
        let call_site = Location::caller();
        let call = self.check_call(operation, options, shape, inputs, outputs)?;
        if call.is_contiguous {
            return self.run_call(call, call_site);
        }
        for output in outputs {
            self.check_output(operation, output)?;
        }
        let contiguous = |tensors: &[Tensor]| {
            tensors
                .iter()
                .map(|tensor| Contiguous::new(operation, tensor))
                .collect::<Result<Vec<_>>>()
        };
        let handles = |contiguous: &[Contiguous]| {
            contiguous.iter().map(Contiguous::handle).collect::<Vec<_>>()
        };
        let results = contiguous(outputs)?;
        let contiguous_outputs = handles(&results);
        // In place, the inputs must stay the outputs.
        let contiguous_inputs =
            if call.is_in_place() { handles(&results) } else { handles(&contiguous(inputs)?) };
        self.run_call(
            Call {
                inputs: &contiguous_inputs,
                outputs: &contiguous_outputs,
                is_contiguous: true,
                ..call
            },
            call_site,
        )?;
        results
            .iter()
            .zip(outputs)
            .try_for_each(|(contiguous, output)| contiguous.write_back(output))
    }

    /// Starts an all_reduce of a contiguous tensor. If the operation continues in the background, returns it with
    /// the id of its entry; `None` if it is done.
    pub(super) fn start_all_reduce(
        &self,
        tensor: &Tensor,
        op: ReduceOp,
    ) -> Result<Option<(InFlight, SpanId)>> {
        let (tensors, shape) = (std::slice::from_ref(tensor), ffi::shape(tensor)?);
        let options = Options { reduce_op: Some(op), ..Options::default() };
        let call = self.check_call(Operation::AllReduce, options, &shape, tensors, tensors)?;
        // The wait for a simulated network ends the operation.
        let start = |backend: &mut dyn RankBackend, call: &Call| match self.simulated_cluster() {
            Some(_) => backend.run(call).map(|()| None),
            None => backend.start(call),
        };
        let (in_flight, entry) = self.dispatch(call, Location::caller(), start)?;
        if in_flight.is_none() {
            self.record_end(entry);
        }
        Ok(in_flight.map(|in_flight| (in_flight, entry)))
    }

    /// Checks what needs no other rank. Returns the call, which has no number yet.
    pub(super) fn check_call<'a>(
        &self,
        operation: Operation,
        options: Options,
        shape: &'a [i64],
        inputs: &'a [Tensor],
        outputs: &'a [Tensor],
    ) -> Result<Call<'a>> {
        let Options { reduce_op, root, timeout } = options;
        if let Some(root) = root {
            self.check_root(operation, root)?;
        }
        let call = Call { shape, inputs, outputs, ..Call::bare(operation) };
        let kind = self.common_kind(operation, inputs, call.further_outputs())?;
        if let Some(op) = reduce_op {
            op.check_kind(operation, kind)?;
        }
        let mut is_contiguous = true;
        let mut count = |tensors: &[Tensor]| -> Result<usize> {
            tensors.iter().try_fold(0, |numel, tensor| {
                let facts = TensorFacts::of(tensor)?;
                if facts.data.is_null() && facts.numel > 0 {
                    return Err(Error::usage(format!(
                        "{operation}: the tensor is not dense, so its elements have no addresses; pass \
                         `tensor.to_dense(..)`"
                    )));
                }
                is_contiguous &= facts.is_plain;
                Ok(numel + facts.numel)
            })
        };
        let numel = count(inputs)?.max(count(call.further_outputs())?);
        Ok(Call { reduce_op, root, kind, numel, is_contiguous, timeout, ..call })
    }

    /// Runs a call with contiguous tensors, from the start of its entry to the end.
    pub(super) fn run_call(&self, call: Call, call_site: CallSite) -> Result<()> {
        let ((), entry) = self.dispatch(call, call_site, |backend, call| backend.run(call))?;
        self.record_end(entry);
        Ok(())
    }

    /// Numbers the call, records it, and passes it to `run` with the backend. Returns the result, and the id of the
    /// call's entry, which is still open.
    fn dispatch<T>(
        &self,
        call: Call,
        call_site: CallSite,
        run: impl FnOnce(&mut dyn RankBackend, &Call) -> Result<T>,
    ) -> Result<(T, SpanId)> {
        let mut side = self.side()?;
        let before = self.activity().enter(call.operation, side.sequence);
        self.run().fault_point(self.global_rank(), call.operation, 0)?;
        let call_site = Some(self.call_site_of(call_site));
        let call = Call { sequence: side.sequence, call_site, ..call };
        side.sequence += 1;
        let entry = self.record_call(&call);
        let result = run(&mut *side.backend, &call)
            .and_then(|result| self.wait_for_simulated_network(&call).map(|()| result))
            .inspect_err(|error| self.record_failure(entry, error))?;
        self.traffic.add(side.backend.traffic(&call));
        self.activity().restore(before);
        Ok((result, entry))
    }
}
