//! A rank's announcement before a collective: everything that must be equal on all ranks.

use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};

use super::span::{Conflict, Place, Span};
use crate::error::Result;
use crate::ffi::cuda;
use crate::operation::Operation;
use crate::process_group::call::{Call, NEXT_SHAPE};
use crate::process_group::device_name::device_name;
use crate::process_group::dtype::{dtype_name, num_bytes};
use crate::process_group::reduce_op::ReduceOp;
use crate::runtime;

/// The text before the sizes of an all_to_all, which may differ between ranks.
pub(super) const SIZES: &str = " sending ";

/// One rank's call: everything that must be equal on all ranks, and the memory of its tensors.
#[derive(Debug)]
pub(crate) struct CollectiveFingerprint {
    pub(super) operation: Operation,
    reduce_op: Option<ReduceOp>,
    root: Option<usize>,
    /// The value is each rank's own, but either all ranks have a weight or none has.
    pub(crate) weight: Option<f64>,
    pub kind: Kind,
    pub device: Device,
    /// CUDA stream of the rank's work; 0 on a CPU. Equal on all ranks, so the work is in order.
    stream: usize,
    shape: Vec<i64>,
    /// Line of the program that makes the call.
    pub call_site: Option<runtime::CallSite>,
    pub(crate) inputs: Vec<Place>,
    pub(crate) outputs: Vec<Place>,
    /// Memory of inputs and outputs, with adjacent spans joined. The ranks compare these spans.
    pub(super) spans: Vec<Span>,
    /// Conflict found by the first rank of the process, if it alone looks for conflicts.
    pub(super) verdict: OnceLock<Option<Conflict>>,
}

impl CollectiveFingerprint {
    pub(super) fn nothing() -> Self {
        Self {
            operation: Operation::UserCode,
            reduce_op: None,
            root: None,
            weight: None,
            kind: Kind::Uint8,
            device: Device::Cpu,
            stream: 0,
            shape: Vec::new(),
            call_site: None,
            inputs: Vec::new(),
            outputs: Vec::new(),
            spans: Vec::new(),
            verdict: OnceLock::new(),
        }
    }

    /// Records `call` of the group rank `at_place`. Records its device only with `on_one_device`, that is, if all ranks
    /// must use the same one.
    pub(super) fn publish(
        &mut self,
        call: &Call,
        at_place: usize,
        on_one_device: bool,
    ) -> Result<()> {
        let place = |t: &Tensor| Place { data: t.data_ptr().cast(), numel: t.numel() };
        let mut tensors = call.inputs.iter().chain(call.outputs);
        let device = tensors.next().filter(|_| on_one_device).map(Tensor::device);
        self.operation = call.operation;
        (self.reduce_op, self.root, self.kind) = (call.reduce_op, call.root, call.kind);
        (self.weight, self.call_site) = (call.weight, call.call_site);
        self.device = device.unwrap_or(Device::Cpu);
        self.stream = match self.device {
            Device::Cuda(index) => cuda::current_stream(index)? as usize,
            _ => 0,
        };
        self.shape.clear();
        self.shape.extend_from_slice(call.shape);
        self.inputs.clear();
        self.inputs.extend(call.inputs.iter().map(place));
        self.outputs.clear();
        self.outputs.extend(call.outputs.iter().map(place));
        self.join_spans(at_place);
        self.verdict.take();
        Ok(())
    }

    /// Fills `spans`.
    fn join_spans(&mut self, at_place: usize) {
        let mut spans = std::mem::take(&mut self.spans);
        spans.clear();
        let mut add = |place: &Place, written| {
            let start = place.data as usize;
            let end = start + num_bytes(self.kind, place.numel);
            Span { start, end, written }.join(&mut spans);
        };
        self.outputs.iter().for_each(|place| add(place, true));
        let read = (0..self.inputs.len()).filter(|&input| !self.is_kept(input, at_place));
        read.for_each(|input| add(&self.inputs[input], false));
        self.spans = spans;
    }

    pub(super) fn agrees_with(&self, other: &CollectiveFingerprint) -> bool {
        self.operation == other.operation
            && self.reduce_op == other.reduce_op
            && self.root == other.root
            && self.weight.is_some() == other.weight.is_some()
            && self.kind == other.kind
            && self.device == other.device
            && self.stream == other.stream
            && self.shape == other.shape
    }

    pub(crate) fn describe(&self) -> String {
        let CollectiveFingerprint { operation, kind, device, shape, .. } = self;
        let role = match operation {
            Operation::Broadcast | Operation::Scatter => "src",
            _ => "dst",
        };
        let options = match (self.root, self.reduce_op) {
            (Some(root), Some(op)) => format!("({role} {root}, {op})"),
            (Some(root), None) => format!("({role} {root})"),
            (None, Some(op)) if self.weight.is_some() => format!("({op}, weighted)"),
            (None, Some(op)) => format!("({op})"),
            (None, None) => String::new(),
        };
        let sizes = |places: &[Place]| places.iter().map(|place| place.numel).collect::<Vec<_>>();
        let kind = dtype_name(*kind);
        let place = match device {
            Device::Cpu => String::new(),
            device => format!(" on {}, stream {:#x}", device_name(*device), self.stream),
        };
        let what = match operation {
            Operation::Barrier => return operation.to_string(),
            Operation::NewGroup => return format!("{operation} of ranks {shape:?}"),
            Operation::AllToAll => {
                let [sent, expected] = [&self.inputs, &self.outputs].map(|places| sizes(places));
                return format!(
                    "{operation} of {kind}{place}{SIZES}{sent:?} and expecting {expected:?}"
                );
            }
            _ => {
                let shapes = shape.split(|&size| size == NEXT_SHAPE);
                shapes.map(|shape| format!("{shape:?}")).collect::<Vec<_>>().join(" ")
            }
        };
        format!("{operation}{options} of {kind} {what}{place}")
    }

    /// Returns whether the input is the same memory as an output, where it may be: as the part that this rank keeps.
    fn is_kept(&self, input: usize, rank: usize) -> bool {
        let output = match self.operation {
            Operation::AllReduce | Operation::Reduce => input,
            Operation::AllGather | Operation::Gather if input == 0 => rank,
            Operation::Scatter | Operation::ReduceScatter if input == rank => 0,
            Operation::AllToAll if input == rank => rank,
            _ => return false,
        };
        self.outputs.get(output) == Some(&self.inputs[input])
    }
}
