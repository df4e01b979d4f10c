//! What processes send each other in an exchange: a header of a fixed size ahead of it, and the buffers of the headers
//! and of the parts, which all calls reuse.

use std::cell::UnsafeCell;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use zerocopy::little_endian::U64;
use zerocopy::transmute;

use super::common::Room;
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::process_group::local::Host;
use crate::runtime::StopMessage;

/// Size of a header in bytes. With what Gloo adds it fits into one frame of Ethernet.
pub(super) const HEADER_BYTES: usize = 1344;

/// The numbers of a header as they are sent.
type WireNumbers = [U64; 6];

/// Bytes of the numbers in a header.
pub(super) const HEADER_INT_BYTES: usize = size_of::<WireNumbers>();

/// The losses of the first ranks of a process, as [`LossRecord::newest`](crate::runtime::LossRecord) returns them. They
/// follow the numbers of a header.
pub(super) type WireLosses = [[U64; 3]; 8];

/// Bytes at the beginning of a header, before the part that travels inside.
pub(super) const HEADER_FIXED_BYTES: usize = HEADER_INT_BYTES + size_of::<WireLosses>();

/// Size in bytes of the largest part that travels inside a header.
pub(super) const HEADER_MAX_DATA_BYTES: usize = HEADER_BYTES - HEADER_FIXED_BYTES;

/// The numbers of a header.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ExchangeHeader {
    /// Sequence number of the call, and a hash of what must be equal in all processes.
    pub sequence: u64,
    pub fingerprint: u64,
    /// Size in bytes of the part that follows.
    pub size: u64,
    pub stop: StopMessage,
}

impl ExchangeHeader {
    pub(super) fn to_bytes(self) -> [u8; HEADER_INT_BYTES] {
        let ExchangeHeader { sequence, fingerprint, size, stop } = self;
        let [last, reason, asked] = stop.to_numbers();
        let numbers = [sequence, fingerprint, size, last, reason, asked];
        let numbers: WireNumbers = numbers.map(U64::new);
        transmute!(numbers)
    }

    /// Parses the header that `process` has sent. The caller checks whether it fits the call.
    ///
    /// # Errors
    /// [`Error::Input`] for bytes that no process of the run sends.
    pub(super) fn from_bytes(process: usize, bytes: &[u8; HEADER_INT_BYTES]) -> Result<Self> {
        let numbers: WireNumbers = transmute!(*bytes);
        let [sequence, fingerprint, size, last, reason, asked] = numbers.map(U64::get);
        let stop = StopMessage::from_numbers([last, reason, asked]).ok_or_else(|| {
            Error::data(format!(
                "process {process} sent an invalid header before call #{sequence}: stop after {last} steps for \
                 the reasons {reason} and {asked}; another program may use Gloo's ports: let only the processes of \
                 this run connect to them"
            ))
        })?;
        Ok(ExchangeHeader { sequence, fingerprint, size, stop })
    }
}

/// Send and receive buffers: a header for each process, and room for the largest call so far.
pub(super) struct StagingBuffers {
    /// The headers that go out, and those that come in.
    pub(super) headers: [Tensor; 2],
    parts: UnsafeCell<[Tensor; 2]>,
}

// SAFETY: only the process's first rank, one thread at a time, writes headers, exchanges parts and enlarges the buffers
// (`StagingBuffers::reserve`, `Network::exchange`, `Network::advance`). While ranks work on a piece of a chain, libtorch
// sends and receives other pieces. If a chain fails, its messages may outlive the call: libtorch has handles of its own to
// the buffers, and the run is cancelled, so no later call uses them. The other ranks get the addresses of the parts only between a later
// barrier of the process and the one that ends the collective. `process_group::gloo` keeps apart what the ranks write
// and read there.
unsafe impl Sync for StagingBuffers {}
// SAFETY: tensors may be dropped on any thread.
unsafe impl Send for StagingBuffers {}

impl StagingBuffers {
    /// Creates headers for this many processes, and no room for parts yet.
    pub(super) fn new(processes: usize) -> Result<Self> {
        let headers = [bytes(HEADER_BYTES * processes)?, bytes(HEADER_BYTES * processes)?];
        Ok(Self { headers, parts: UnsafeCell::new([bytes(0)?, bytes(0)?]) })
    }

    /// Makes `room` in the buffers. Called by the process's first rank, before the others' barrier. The buffers are in the
    /// memory of `host`, if given.
    pub(super) fn reserve(&self, room: Room, host: Option<&Arc<Host>>) -> Result<()> {
        // SAFETY: see the implementation of `Sync`.
        let parts = unsafe { &mut *self.parts.get() };
        for (tensor, size) in parts.iter_mut().zip([room.send, room.receive]) {
            if tensor.numel() < size {
                *tensor = match host {
                    // Its addresses are not used again: few sizes waste few of them.
                    Some(host) => host.buffer(size.next_power_of_two())?,
                    None => bytes(size)?,
                };
            }
        }
        Ok(())
    }

    /// Returns the send buffer and the receive buffer.
    pub(super) fn parts(&self) -> &[Tensor; 2] {
        // SAFETY: see the implementation of `Sync`.
        unsafe { &*self.parts.get() }
    }
}

fn bytes(size: usize) -> Result<Tensor> {
    Tensor::f_zeros([size as i64], (Kind::Uint8, Device::Cpu)).doing("making room")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn header_from_random_bytes_is_valid_or_an_error(bytes: [u8; HEADER_INT_BYTES], small: [u8; 3]) {
            let mut near = bytes;
            // Reasons that may be valid.
            near[24..].fill(0);
            [near[24], near[32], near[40]] = small.map(|byte| byte % 9);
            for bytes in [bytes, near] {
                match ExchangeHeader::from_bytes(3, &bytes) {
                    Ok(header) => prop_assert_eq!(header.to_bytes(), bytes),
                    Err(error) => {
                        prop_assert!(error.to_string().contains("process 3 sent an invalid header"), "{}", error);
                    }
                }
            }
        }
    }

    #[test]
    fn header_round_trip_is_exact_and_bad_stops_are_refused() {
        let stop = StopMessage::from_numbers([7, 2, 1]).unwrap();
        let header = ExchangeHeader { sequence: 1, fingerprint: 2, size: 3, stop };
        assert_eq!(ExchangeHeader::from_bytes(0, &header.to_bytes()).unwrap(), header);
        for wrong in [[7, 0, 0], [7, 10, 0], [0, 0, 10]] {
            assert_eq!(StopMessage::from_numbers(wrong), None, "{wrong:?}");
        }
    }
}
