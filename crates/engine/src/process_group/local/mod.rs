//! The state of ranks that share memory: the exchange of their calls, their mailboxes, and arithmetic on their tensors.
//! They are threads of one process, or with [`host`] processes of one host.
//!
//! `threaded` and `gloo` compare all calls in [`call_slot`]; `nccl` compares them with `--check-collectives` only, except
//! for those that it cannot run without. [`mail`] carries the messages of CPU ranks. [`element`] reduces tensors in the
//! memory of the process.

mod barrier;
mod call_slot;
mod common_stream;
mod conflict;
mod element;
mod exchange;
mod fingerprint;
mod host;
mod input_copies;
mod mail;
mod mismatch;
mod once;
mod shared;

pub(crate) use barrier::InMemory;
pub(super) use call_slot::CallSlot;
pub(super) use common_stream::CommonStream;
pub(super) use conflict::{Memory, TensorMemory};
pub(super) use element::{
    Kinds, Reduction, ReductionScratch, in_tensors, my_slice, my_slices, reduce, wide_kind,
};
pub(super) use fingerprint::{CollectiveFingerprint, Extras};
pub(crate) use host::Host;
pub(super) use host::{HostGroup, HostNumbers, PAGE, invalid_data};
pub(super) use mail::{Completion, Mailboxes, MessageEnd, MessageTensor, P2pRequest};
pub(super) use mismatch::{mismatch_in_store, sizes_differ};
pub(crate) use once::OncePerProcess;
pub(super) use shared::Shared;
