//! The NCCL calls that make up each collective.

use std::ffi::{c_int, c_void};

use cudarc::nccl::sys::{self, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t};
use tch::{Kind, Tensor};

use super::super::backend::RankBackend;
use super::super::call::Call;
use super::super::in_place::multiply;
use super::super::local::Extras;
use super::super::network::Network;
use super::super::traffic::{Traffic, first_bytes, split_traffic};
use super::super::{P2POp, ReduceOp, dtype_name, num_bytes};
use super::NcclBackend;
use super::library::is_failure;
use crate::error::{Error, Result};
use crate::ffi::{TorchResult, cuda};
use crate::operation::{CollectiveType, Operation};

/// The dtype of tensors that are only copied: any can travel as bytes.
const BYTE: ncclDataType_t = ncclDataType_t::ncclUint8;

/// A tensor that this rank sends to a peer, or receives from it.
struct Transfer<'a> {
    is_send: bool,
    tensor: &'a Tensor,
    /// The peer's rank in the communicator.
    peer: usize,
}

impl NcclBackend {
    /// Launches this rank's part of a collective between two barriers.
    pub(super) fn launch(&mut self, call: &Call) -> Result<()> {
        let stream = cuda::current_stream(self.gpu)?.cast();
        let (comm, root) = (self.launched.state.lock().communicator.comm, call.root() as c_int);
        let data = |tensor: &Tensor| -> *mut c_void { tensor.data_ptr() };
        let reduction = || reduction(call.operation, call.op(), call.kind);
        let (inputs, outputs) = (call.inputs, call.outputs);
        // SAFETY, for all calls below, and in `all_gather` and `reduce_scatter`: each pointer is to the stated number of
        // elements of that dtype, on this rank's GPU. They are read and written in the order of the stream on which their
        // tensors were made and on which they will be freed.
        match call.operation {
            Operation::AllReduce => {
                let (kind, op) = reduction()?;
                let tensor = &inputs[0];
                if let ReduceOp::PremulSum(factor) = call.op() {
                    multiply(tensor, factor)?;
                }
                let (buffer, numel) = (data(tensor), tensor.numel());
                self.with_launch_barrier(call, "ncclAllReduce", |_| {
                    // SAFETY: as above.
                    unsafe { sys::ncclAllReduce(buffer, buffer, numel, kind, op, comm, stream) }
                })
            }
            Operation::Reduce => {
                let (kind, op) = reduction()?;
                let (buffer, numel) = (data(&inputs[0]), inputs[0].numel());
                self.with_launch_barrier(call, "ncclReduce", |_| {
                    // SAFETY: as above; only the root writes.
                    unsafe { sys::ncclReduce(buffer, buffer, numel, kind, op, root, comm, stream) }
                })
            }
            Operation::Broadcast => {
                let tensor = inputs.first().unwrap_or_else(|| &outputs[0]);
                let (buffer, size) = (data(tensor), num_bytes(tensor.kind(), tensor.numel()));
                self.with_launch_barrier(call, "ncclBroadcast", |_| {
                    // SAFETY: as above.
                    unsafe { sys::ncclBroadcast(buffer, buffer, size, BYTE, root, comm, stream) }
                })
            }
            Operation::AllGather => self.all_gather(call, comm, stream),
            Operation::ReduceScatter => self.reduce_scatter(call, comm, stream),
            // The local ranks synchronize first, then the devices of all ranks.
            Operation::Barrier => {
                let token = data(&self.token);
                let (kind, op) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
                self.with_launch_barrier(call, "ncclAllReduce", |_| {
                    // SAFETY: as above.
                    unsafe { sys::ncclAllReduce(token, token, 1, kind, op, comm, stream) }
                })?;
                self.synchronize(&|| {})
            }
            Operation::NewGroup => self.exchange_local(call),
            other => match other.collective() {
                Some(collective) if !collective.reduces => self.copy(call, collective),
                _ => Err(Error::unsupported(format!("backend nccl has no {other}"))),
            },
        }
    }

    /// Launches an all_gather. A list that is not one piece of memory is copied. All ranks must make the same NCCL calls,
    /// but the memory layout of the tensors is each rank's own.
    fn all_gather(&mut self, call: &Call, comm: ncclComm_t, stream: cudaStream_t) -> Result<()> {
        let (input, outputs) = (&call.inputs[0], call.outputs);
        let (from, size) = (input.data_ptr(), num_bytes(input.kind(), input.numel()));
        let copy = room_for(outputs)?;
        let to = copy.as_ref().unwrap_or(&outputs[0]).data_ptr();
        self.with_launch_barrier(call, "ncclAllGather", |_| {
            // SAFETY: as in `launch`; there is room for the tensors of all ranks.
            unsafe { sys::ncclAllGather(from, to, size, BYTE, comm, stream) }
        })?;
        match copy {
            Some(copy) => copy_parts(&copy, outputs),
            None => Ok(()),
        }
    }

    /// Launches a reduce_scatter. A list that is not one piece of memory is copied, as in an all_gather.
    fn reduce_scatter(
        &mut self,
        call: &Call,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<()> {
        let (kind, op) = reduction(call.operation, call.op(), call.kind)?;
        let (to, numel) = (call.outputs[0].data_ptr(), call.outputs[0].numel());
        let copy = joined(call.inputs)?;
        let from = copy.as_ref().unwrap_or(&call.inputs[0]).data_ptr();
        self.with_launch_barrier(call, "ncclReduceScatter", |_| {
            // SAFETY: as in `launch`; there is one tensor for each rank.
            unsafe { sys::ncclReduceScatter(from, to, numel, kind, op, comm, stream) }
        })
    }

    /// Launches a collective that only copies: each input goes straight to the ranks that have an output for it.
    fn copy(&mut self, call: &Call, collective: CollectiveType) -> Result<()> {
        let CollectiveType { inputs, outputs, .. } = collective;
        let mut transfers = Vec::new();
        for peer in 0..self.shared.members.len() {
            let is_root = peer == call.root();
            let sent = inputs.tensor_for(peer, call.inputs);
            if let Some(tensor) = sent.filter(|_| outputs.is_held_by(is_root)) {
                transfers.push(Transfer { is_send: true, tensor, peer });
            }
            let received = outputs.tensor_for(peer, call.outputs);
            if let Some(tensor) = received.filter(|_| inputs.is_held_by(is_root)) {
                transfers.push(Transfer { is_send: false, tensor, peer });
            }
        }
        self.transfer(call, &transfers)
    }

    /// Launches messages in a communicator of two.
    pub(super) fn exchange(&mut self, messages: &[&P2POp]) -> Result<()> {
        let Some(first) = messages.first() else { return Ok(()) };
        let peer = 1 - self.rank;
        let transfers: Vec<Transfer> = messages
            .iter()
            .map(|op| Transfer { is_send: op.is_send, tensor: &op.tensor, peer })
            .collect();
        // The calls of the two sides differ, as they should.
        self.check = false;
        self.transfer(&Call::bare(first.operation()), &transfers)
    }

    /// Launches the sends and receives of `call` together.
    fn transfer(&mut self, call: &Call, transfers: &[Transfer]) -> Result<()> {
        let stream = cuda::current_stream(self.gpu)?.cast();
        let comm = self.launched.state.lock().communicator.comm;
        let launch = |&Transfer { is_send, tensor, peer }: &Transfer| {
            let data: *mut c_void = tensor.data_ptr();
            let (size, peer) = (num_bytes(tensor.kind(), tensor.numel()), peer as c_int);
            // SAFETY: the tensor has this many bytes on this rank's GPU, and is used in the order of the stream.
            unsafe {
                if is_send {
                    sys::ncclSend(data, size, BYTE, peer, comm, stream)
                } else {
                    sys::ncclRecv(data, size, BYTE, peer, comm, stream)
                }
            }
        };
        self.with_launch_barrier(call, "ncclSend and ncclRecv", |_| {
            // SAFETY: starts and ends a group on this thread.
            let begun = unsafe { sys::ncclGroupStart() };
            if is_failure(&begun) {
                return begun;
            }
            let failed = transfers.iter().map(launch).find(is_failure);
            // SAFETY: ends the group that was started above.
            let ended = unsafe { sys::ncclGroupEnd() };
            failed.unwrap_or(ended)
        })
    }

    /// Synchronizes the ranks of this process before a call. They always compare an all_reduce, which averages gradients.
    /// With `--check-collectives` or a new group, the ranks compare every call, also with those of other processes. This
    /// costs one message to each other process, over TCP.
    pub(super) fn exchange_local(&mut self, call: &Call) -> Result<()> {
        let compares = self.check || call.operation == Operation::NewGroup;
        if !compares && call.operation != Operation::AllReduce {
            let timeout = call.timeout.unwrap_or(self.shared.run.timeout);
            return self.slot.barrier().wait_at_most(self.slot.rank(), call.at(), timeout);
        }
        let extras = Extras { device: false, contents: 0 };
        self.slot.exchange_calls(self.shared.here.start, call, extras, None)?;
        let Some(network) = self.elsewhere().filter(|_| compares) else { return Ok(()) };
        self.slot.on_leader(call.at(), || network.compare(call, || self.slot.call_text()))
    }

    fn elsewhere(&self) -> Option<&Network> {
        self.network.as_deref().filter(|network| network.map.processes.len() > 1)
    }
}

/// Returns a buffer for copies of `tensors`, which are contiguous and of one size. `None` if they lie one after the
/// other.
fn room_for(tensors: &[Tensor]) -> Result<Option<Tensor>> {
    let first = &tensors[0];
    if is_one_piece(tensors) {
        return Ok(None);
    }
    let numel = (tensors.len() * first.numel()) as i64;
    let buffer = Tensor::f_empty([numel], (first.kind(), first.device()));
    buffer.map(Some).doing("empty")
}

/// Returns copies of `tensors`, contiguous and of one size, in one buffer. `None` if they already lie one after the
/// other.
fn joined(tensors: &[Tensor]) -> Result<Option<Tensor>> {
    if is_one_piece(tensors) {
        return Ok(None);
    }
    let flat = || {
        let flat: Result<Vec<Tensor>, _> =
            tensors.iter().map(|tensor| tensor.f_view([-1])).collect();
        Tensor::f_cat(&flat?, 0)
    };
    tch::no_grad(flat).map(Some).doing("cat")
}

/// Copies its part of `flat` to each of `tensors`, which are contiguous and of one size.
fn copy_parts(flat: &Tensor, tensors: &[Tensor]) -> Result<()> {
    let copy = || {
        let parts = flat.f_chunk(tensors.len() as i64, 0)?;
        tensors
            .iter()
            .zip(parts)
            .try_for_each(|(to, part)| to.shallow_clone().f_copy_(&part.f_view_as(to)?).map(drop))
    };
    tch::no_grad(copy).doing("copy_")
}

/// Returns whether `tensors`, contiguous and of one size, lie one after the other.
fn is_one_piece(tensors: &[Tensor]) -> bool {
    let size = num_bytes(tensors[0].kind(), tensors[0].numel());
    let start = tensors[0].data_ptr() as usize;
    tensors.iter().enumerate().all(|(i, tensor)| tensor.data_ptr() as usize == start + i * size)
}

/// Returns the bytes that one rank sends and receives: in NCCL's ring algorithm, if the call is an all_reduce.
pub(super) fn traffic(call: &Call, rank: usize, world_size: usize) -> Traffic {
    if call.operation != Operation::AllReduce {
        return split_traffic(call, rank, world_size);
    }
    let share = 2 * first_bytes(call, call.inputs) * (world_size as u64 - 1) / world_size as u64;
    Traffic { sent: share, received: share }
}

/// Returns NCCL's dtype and operation for a reduction, if NCCL has both.
pub(super) fn reduction(
    operation: Operation,
    op: ReduceOp,
    kind: Kind,
) -> Result<(ncclDataType_t, ncclRedOp_t)> {
    Ok((data_type(kind)?, nccl_op(operation, op)?))
}

fn nccl_op(operation: Operation, op: ReduceOp) -> Result<ncclRedOp_t> {
    Ok(match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Avg => ncclRedOp_t::ncclAvg,
        ReduceOp::Product => ncclRedOp_t::ncclProd,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        // The tensor was multiplied in place before.
        ReduceOp::PremulSum(_) if operation == Operation::AllReduce => ncclRedOp_t::ncclSum,
        op @ (ReduceOp::PremulSum(_) | ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor) => {
            return Err(Error::unsupported(format!(
                "backend nccl has no {operation}({op}); use another operation, or backend threaded"
            )));
        }
    })
}

fn data_type(kind: Kind) -> Result<ncclDataType_t> {
    Ok(match kind {
        Kind::Double => ncclDataType_t::ncclFloat64,
        Kind::Float => ncclDataType_t::ncclFloat32,
        Kind::Half => ncclDataType_t::ncclFloat16,
        Kind::BFloat16 => ncclDataType_t::ncclBfloat16,
        Kind::Int64 => ncclDataType_t::ncclInt64,
        Kind::Int => ncclDataType_t::ncclInt32,
        Kind::Int8 => ncclDataType_t::ncclInt8,
        Kind::Uint8 | Kind::Bool => ncclDataType_t::ncclUint8,
        kind => {
            return Err(Error::unsupported(format!(
                "backend nccl cannot reduce {} tensors, because NCCL has no such type; convert first",
                dtype_name(kind)
            )));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_reductions_are_refused_without_nccl() {
        let refusal = |op, kind| {
            let refused = reduction(Operation::Reduce, op, kind).err();
            refused.map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(refusal(ReduceOp::Avg, Kind::BFloat16), "");
        assert!(refusal(ReduceOp::Bor, Kind::Int64).starts_with("backend nccl has no reduce(bor)"));
        let int16 = refusal(ReduceOp::Sum, Kind::Int16);
        assert!(int16.starts_with("backend nccl cannot reduce int16 tensors"), "{int16}");
    }
}
