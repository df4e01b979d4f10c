//! A rank's announcement before a collective: what must be equal on all ranks, the addresses of its tensors, and the
//! elements of small ones.

use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};

use super::conflict::{Span, Spans, TensorConflict, TensorMemories, TensorMemory};
use super::input_copies::{self, InputCopies};
use crate::error::Result;
use crate::ffi::{Shape, TensorFacts};
use crate::operation::Operation;
use crate::process_group::call::{Call, NEXT_SHAPE};
use crate::process_group::device_name;
use crate::process_group::dtype::{dtype_name, num_bytes};
use crate::process_group::reduce_op::ReduceOp;
use crate::runtime;

/// The text before sizes that may differ between ranks.
pub(super) const SIZES: &str = " sending ";

/// What an announcement has besides the call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extras {
    /// The device of the tensors, if all ranks must use the same one.
    pub device: bool,
    /// The elements of an all_reduce on the CPU, if they have at most this size in bytes; 0 for none.
    pub contents: usize,
}

/// One rank's call: everything that must be equal on all ranks, and the memory of its tensors.
///
/// A list of one tensor is stored inline, so that the other ranks need not follow pointers to read them.
#[derive(Debug)]
pub(crate) struct CollectiveFingerprint {
    pub(super) operation: Operation,
    reduce_op: Option<ReduceOp>,
    root: Option<usize>,
    pub kind: Kind,
    pub device: Device,
    shape: Shape,
    /// Line of the program that makes the call.
    pub call_site: Option<runtime::CallSite>,
    pub(crate) inputs: TensorMemories,
    pub(crate) outputs: TensorMemories,
    /// Memory of inputs and outputs, with adjacent spans joined. The ranks compare these spans.
    pub(super) spans: Spans,
    /// Conflict found by the first rank of the process, if it alone looks for conflicts.
    pub(super) verdict: OnceLock<Option<TensorConflict>>,
    /// Whether `contents` has the elements of the inputs. If so, no rank touches another's tensors.
    pub(crate) has_contents: bool,
    contents: InputCopies,
}

impl CollectiveFingerprint {
    pub(super) fn nothing() -> Self {
        Self {
            operation: Operation::UserCode,
            reduce_op: None,
            root: None,
            kind: Kind::Uint8,
            device: Device::Cpu,
            shape: Shape::new(),
            call_site: None,
            inputs: TensorMemories::new(),
            outputs: TensorMemories::new(),
            spans: Spans::new(),
            verdict: OnceLock::new(),
            has_contents: false,
            contents: InputCopies::nothing(),
        }
    }

    /// Records `call` of the group rank `group_rank`.
    pub(super) fn publish(&mut self, call: &Call, group_rank: usize, extras: Extras) -> Result<()> {
        let mut tensors = call.inputs.iter().chain(call.outputs);
        let device = tensors.next().filter(|_| extras.device).map(Tensor::device);
        self.operation = call.operation;
        (self.reduce_op, self.root, self.kind) = (call.reduce_op, call.root, call.kind);
        self.call_site = call.call_site;
        self.device = device.unwrap_or(Device::Cpu);
        self.shape.clear();
        self.shape.extend_from_slice(call.shape);
        list(&mut self.inputs, call.inputs)?;
        if call.is_in_place() {
            self.outputs.clone_from(&self.inputs);
        } else {
            list(&mut self.outputs, call.outputs)?;
        }
        self.join_spans(group_rank);
        self.verdict.take();
        let numel = self.inputs.iter().map(|input| input.numel).sum();
        // This follows from what the ranks announce, so it is equal if their calls agree.
        self.has_contents = extras.contents > 0
            && self.operation == Operation::AllReduce
            && self.device == Device::Cpu
            && num_bytes(self.kind, numel) <= extras.contents.min(input_copies::MAX_BYTES);
        if self.has_contents {
            // SAFETY: tensors of this rank, on the CPU. It writes to them only after the exchange.
            unsafe { self.contents.copy(&self.inputs, num_bytes(self.kind, 1)) };
        }
        Ok(())
    }

    /// Fills `spans`.
    fn join_spans(&mut self, group_rank: usize) {
        let mut spans = std::mem::take(&mut self.spans);
        spans.clear();
        let mut add = |tensor: &TensorMemory, written| {
            let start = tensor.data as usize;
            let end = start + num_bytes(self.kind, tensor.numel);
            Span { start, end, written }.join(&mut spans);
        };
        self.outputs.iter().for_each(|tensor| add(tensor, true));
        let collective = self.operation.collective();
        for (input, tensor) in self.inputs.iter().enumerate() {
            // An input may share memory with the output that this rank keeps.
            let kept = collective.and_then(|collective| collective.kept_output(input, group_rank));
            if kept.and_then(|output| self.outputs.get(output)) != Some(tensor) {
                add(tensor, false);
            }
        }
        self.spans = spans;
    }

    /// Takes over what is equal on all ranks of a call, and forgets the rest.
    pub(super) fn describe_like(&mut self, other: &Self) {
        self.operation = other.operation;
        self.reduce_op = other.reduce_op;
        self.root = other.root;
        self.kind = other.kind;
        self.device = other.device;
        self.has_contents = other.has_contents;
        self.spans.clear();
        self.verdict.take();
    }

    /// Copies the elements that travel with the announcement, which is `bytes` long.
    ///
    /// # Safety
    /// There are as many bytes at `contents`, and no other thread writes to them. They are at most
    /// [`input_copies::MAX_BYTES`].
    pub(super) unsafe fn set_contents(&mut self, contents: *mut u8, bytes: usize) {
        let contents = TensorMemory { data: contents, numel: bytes };
        // SAFETY: as the caller promises.
        unsafe { self.contents.copy(&[contents], 1) };
    }

    /// Returns how many bytes of the inputs travel with the announcement. All ranks have as many.
    pub(super) fn contents_len(&self) -> usize {
        let lens = self.inputs.iter().map(|input| num_bytes(self.kind, input.numel));
        if self.has_contents { lens.sum() } else { 0 }
    }

    /// Returns the address of the copied inputs from their byte `offset` on, to read from until this rank announces its
    /// next call but one.
    pub(crate) fn contents(&self, offset: usize) -> *mut u8 {
        self.contents.at(offset)
    }

    pub(super) fn agrees_with(&self, other: &CollectiveFingerprint) -> bool {
        self.operation == other.operation
            && self.reduce_op == other.reduce_op
            && self.root == other.root
            && self.kind == other.kind
            && self.device == other.device
            && self.shape == other.shape
            && self.has_contents == other.has_contents
    }

    pub(crate) fn describe(&self) -> String {
        let CollectiveFingerprint { operation, kind, device, shape, .. } = self;
        let role = operation.root_argument();
        let options = match (self.root, self.reduce_op) {
            (Some(root), Some(op)) => format!("({role} {root}, {op})"),
            (Some(root), None) => format!("({role} {root})"),
            (None, Some(op)) => format!("({op})"),
            (None, None) => String::new(),
        };
        let sizes = |tensors: &[TensorMemory]| {
            tensors.iter().map(|tensor| tensor.numel).collect::<Vec<_>>()
        };
        let kind = dtype_name(*kind);
        let on_device = match device {
            Device::Cpu => String::new(),
            device => format!(" on {}", device_name(*device)),
        };
        let what = match operation {
            Operation::Barrier => return operation.to_string(),
            Operation::NewGroup => return format!("{operation} of ranks {shape:?}"),
            _ if operation.has_own_sizes() => {
                let [sent, expected] = [&self.inputs, &self.outputs].map(|tensors| sizes(tensors));
                return format!(
                    "{operation} of {kind}{on_device}{SIZES}{sent:?} and expecting {expected:?}"
                );
            }
            _ => {
                let shapes = shape.split(|&size| size == NEXT_SHAPE);
                shapes.map(|shape| format!("{shape:?}")).collect::<Vec<_>>().join(" ")
            }
        };
        format!("{operation}{options} of {kind} {what}{on_device}")
    }
}

/// Fills `memories` with the memory of these tensors.
fn list(memories: &mut TensorMemories, tensors: &[Tensor]) -> Result<()> {
    memories.clear();
    for tensor in tensors {
        let TensorFacts { data, numel, .. } = TensorFacts::of(tensor)?;
        memories.push(TensorMemory { data, numel });
    }
    Ok(())
}
