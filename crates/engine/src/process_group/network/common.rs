//! What the first rank of each process, or of each host, makes known to its other ranks. They read it after the next
//! barrier, and it stays until the call ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use crate::error::{Error, Result};
use crate::process_group::local::{HostGroup, HostNumbers, InMemory, PAGE, invalid_data};
use crate::runtime::StopMessage;

/// The numbers that the ranks share.
pub(super) struct Common(InMemory<HostNumbers>);

/// The addresses of the send buffer and the receive buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffers {
    pub send: *mut u8,
    pub receive: *mut u8,
}

/// How many bytes a call needs in each buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pub send: usize,
    pub receive: usize,
}

// SAFETY: addresses, which are the same for all threads.
unsafe impl Send for Buffers {}

impl Common {
    /// Returns the numbers: in the memory of the host, if the ranks are in several processes.
    pub(super) fn new(on_host: Option<&HostGroup>) -> Result<Self> {
        Ok(Self(match on_host {
            Some(group) => group.numbers(0)?,
            None => InMemory::of(Arc::default()),
        }))
    }

    pub(super) fn set_stop(&self, message: StopMessage) {
        for (number, value) in self.0.stop.iter().zip(message.to_numbers()) {
            number.store(value, Ordering::Relaxed);
        }
    }

    /// Returns rank 0's decision to stop, as the first rank has received it.
    ///
    /// # Errors
    /// [`Error::Input`] for numbers that no rank writes.
    pub(super) fn stop(&self) -> Result<StopMessage> {
        let numbers = self.0.stop.each_ref().map(|number| number.load(Ordering::Relaxed));
        StopMessage::from_numbers(numbers).ok_or_else(invalid_data)
    }

    /// Makes known where the buffers are. They are in the memory of `group`, whose first rank this is.
    pub(super) fn set_buffers(&self, group: &HostGroup, buffers: &[Tensor; 2]) -> Result<()> {
        for (stored, buffer) in self.0.offsets.iter().zip(buffers) {
            let offset = match buffer.numel() {
                0 => Some(0),
                len => group.offset_of(buffer.data_ptr().cast(), len),
            };
            let elsewhere = || Error::Internal("a buffer is not in the memory of the host".into());
            stored.store(offset.ok_or_else(elsewhere)? as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns where the buffers of the first rank are. This rank uses as many bytes of them as `room` says.
    ///
    /// # Errors
    /// [`Error::Input`] if the memory of the first rank's process has no such bytes there.
    pub(super) fn buffers(&self, group: &HostGroup, room: Room) -> Result<Buffers> {
        let [send, receive] = &self.0.offsets;
        let find = |stored: &AtomicU64, len: usize| match stored.load(Ordering::Relaxed) as usize {
            offset if offset.is_multiple_of(PAGE) => group.buffer_of_first(offset, len),
            _ => Err(invalid_data()),
        };
        Ok(Buffers { send: find(send, room.send)?, receive: find(receive, room.receive)? })
    }
}
