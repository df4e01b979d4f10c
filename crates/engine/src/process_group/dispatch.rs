//! The dispatch: the one path of every collective from its caller to the backend.
//!
//! 1. [`collective`](ProcessGroup::collective) checks what needs no other rank, and makes every tensor contiguous.
//! 2. [`run_call`](ProcessGroup::run_call) notes the rank's activity for the other ranks, injects a planned fault, and
//!    numbers the call.
//! 3. It opens the call's entry in the flight recorder.
//! 4. It runs the call on the [`RankBackend`](super::backend::RankBackend), which compares the ranks' calls where it
//!    must, and moves the data. Over a simulated network it then waits.
//! 5. It counts the traffic. The entry ends with the call.

use std::panic::Location;

use tch::Tensor;

use super::call::Call;
use super::contiguous::Contiguous;
use super::{ProcessGroup, num_bytes};
use crate::error::{Error, Result};
use crate::ffi::TensorFacts;
use crate::runtime::{CallSite, OpStart};

impl ProcessGroup {
    /// Runs a collective on tensors that need not be contiguous.
    #[track_caller]
    pub(super) fn collective(&self, call: Call) -> Result<()> {
        let call_site = Location::caller();
        let call = self.check_call(call)?;
        let Call { operation, inputs, outputs, .. } = call;
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

    /// Checks what needs no other rank. Returns the call, which has no number yet.
    pub(super) fn check_call<'a>(&self, call: Call<'a>) -> Result<Call<'a>> {
        let operation = call.operation;
        if let Some(root) = call.root {
            self.check_rank(operation, operation.root_argument(), root)?;
        }
        let kind = self.common_kind(operation, call.inputs, call.further_outputs())?;
        if let Some(op) = call.reduce_op {
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
        let numel = count(call.inputs)?.max(count(call.further_outputs())?);
        Ok(Call { kind, numel, is_contiguous, ..call })
    }

    /// Runs a call with contiguous tensors: numbers it, records it, and passes it to the backend.
    pub(super) fn run_call(&self, call: Call, call_site: CallSite) -> Result<()> {
        let mut side = self.side()?;
        let before = self.activity().enter(call.operation, side.sequence);
        self.run().fault_point(self.global_rank(), call.operation, 0)?;
        let context = self.phase_tracker.context.get();
        let call_site = Some(context.call_site.unwrap_or(call_site));
        let call = Call { sequence: side.sequence, call_site, ..call };
        side.sequence += 1;
        let begin = OpStart {
            at: call.at(),
            group: Some(self.phase_tracker.group),
            bucket: context.bucket,
            amount: num_bytes(call.kind, call.numel) as u64,
            call_site,
            on_comm_thread: self.own_activity.is_some(),
        };
        self.recorded(before, begin, || {
            side.backend.run(&call)?;
            self.wait_for_simulated_network(&call)
        })?;
        self.traffic.add(side.backend.traffic(&call));
        Ok(())
    }
}
