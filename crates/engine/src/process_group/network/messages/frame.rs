//! The frames that two processes exchange: a length and a header in MessagePack. After some of them follow the bytes of
//! a tensor.
//!
//! Any program that reaches the port can write to it, so a header is checked before use.

use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::super::process_map::ProcessMap;
use crate::ffi::TensorFacts;
use crate::process_group::dtype::{num_bytes, plain_kind};

/// Tensors of up to this many bytes travel with the offer. Larger ones follow when the receiver is ready for them.
pub(super) const EAGER_MAX_BYTES: usize = 64 << 10;

/// Size in bytes of the largest header.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// Size in bytes of the length before a header.
const LENGTH_BYTES: usize = 4;

/// A header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Frame {
    /// The first frame of a connection, from this process. `to` is what the other one left in the store.
    Hello { to: String, process: usize },
    /// A rank sends a tensor. Its bytes follow if there are at most [`EAGER_MAX_BYTES`].
    Offer(Offer),
    /// The receiver of the offer with this id is ready for its bytes.
    Ready(u64),
    /// The bytes of this offer follow.
    Data(u64),
    /// The receiver has taken the tensor of this offer.
    Taken(u64),
}

/// A tensor that a rank of one process sends to a rank of the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Offer {
    /// Number among the offers of its process to the other.
    pub id: u64,
    /// Group ranks of the sender and the receiver.
    pub source: usize,
    pub destination: usize,
    pub tag: u64,
    /// PyTorch's name of the dtype.
    pub kind: String,
    pub shape: Vec<i64>,
}

impl Offer {
    /// Returns the dtype of the tensor, and its size in bytes.
    ///
    /// # Errors
    /// If process `from` cannot have made this offer to this process.
    pub(super) fn check(&self, processes: &ProcessMap, from: usize) -> io::Result<(Kind, usize)> {
        let are_theirs = processes.processes[from].contains(&self.source)
            && processes.here().contains(&self.destination);
        let kind = plain_kind(&self.kind).filter(|_| are_theirs);
        let checked = kind.and_then(|kind| {
            let multiplied = |all: usize, &size: &i64| all.checked_mul(size.try_into().ok()?);
            let bytes = self.shape.iter().try_fold(num_bytes(kind, 1), multiplied)?;
            (bytes <= isize::MAX as usize).then_some((kind, bytes))
        });
        checked.ok_or_else(|| foreign(&format!("process {from} announced an invalid {self:?}")))
    }
}

impl Frame {
    /// Returns the length and the header.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH_BYTES];
        let _ = rmp_serde::encode::write(&mut bytes, self); // cannot fail in memory
        let len = (bytes.len() - LENGTH_BYTES) as u32;
        bytes[..LENGTH_BYTES].copy_from_slice(&len.to_le_bytes());
        bytes
    }

    /// Reads the next header.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut len = [0; LENGTH_BYTES];
        from.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_HEADER_BYTES {
            return Err(foreign(&format!(
                "a message header has {len} bytes, and {MAX_HEADER_BYTES} are the most"
            )));
        }
        let mut header = vec![0; len];
        from.read_exact(&mut header)?;
        let frame = rmp_serde::from_slice(&header);
        frame.map_err(|error| foreign(&format!("a message header is invalid: {error}")))
    }
}

/// Fills `tensor`, which must be contiguous, on the CPU and used nowhere else.
pub(super) fn read_tensor(from: &mut impl Read, tensor: &Tensor) -> io::Result<()> {
    let facts = TensorFacts::of(tensor).map_err(io::Error::other)?;
    if facts.numel == 0 {
        return Ok(()); // it has no address
    }
    if !facts.is_plain || facts.data.is_null() || tensor.device() != Device::Cpu {
        return Err(io::Error::other("a message takes tensors in one piece on the CPU"));
    }
    let len = num_bytes(tensor.kind(), facts.numel);
    // SAFETY: these bytes are the tensor's. The handle keeps them alive. The rank does not use them before its receive
    // completes, which happens after this read.
    from.read_exact(unsafe { std::slice::from_raw_parts_mut(facts.data, len) })
}

/// Returns the error about bytes that no process of the run sends.
pub(super) fn foreign(why: &str) -> io::Error {
    io::Error::other(format!(
        "{why}; another program uses the connection: let only the processes of this run connect to its ports"
    ))
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use proptest::prelude::*;

    use super::*;

    fn frame() -> impl Strategy<Value = Frame> {
        let offer = (any::<(u64, usize, usize, u64)>(), ".{0,40}", any::<Vec<i64>>());
        let offer = offer.prop_map(|((id, source, destination, tag), kind, shape)| {
            Frame::Offer(Offer { id, source, destination, tag, kind, shape })
        });
        prop_oneof![
            (".{0,40}", any::<usize>()).prop_map(|(to, process)| Frame::Hello { to, process }),
            offer,
            any::<u64>().prop_map(Frame::Ready),
            any::<u64>().prop_map(Frame::Data),
            any::<u64>().prop_map(Frame::Taken),
        ]
    }

    fn process_map() -> ProcessMap {
        ProcessMap { processes: vec![0..2, 2..4], mine: 1 }
    }

    /// The frames in `bytes`, and the error at their end.
    fn read(mut bytes: &[u8]) -> (Vec<Frame>, io::Error) {
        let mut frames = Vec::new();
        loop {
            match Frame::read(&mut bytes) {
                Ok(frame) => frames.push(frame),
                Err(error) => return (frames, error),
            }
        }
    }

    proptest! {
        #[test]
        fn frames_round_trip_exactly(frames in prop::collection::vec(frame(), 0..5)) {
            let bytes: Vec<u8> = frames.iter().flat_map(Frame::to_bytes).collect();
            let (found, end) = read(&bytes);
            prop_assert_eq!(found, frames);
            prop_assert_eq!(end.kind(), ErrorKind::UnexpectedEof);
        }

        #[test]
        fn frames_from_changed_bytes_never_panic(
            frame in frame(),
            changes: Vec<(prop::sample::Index, u8)>,
            others: Vec<u8>,
        ) {
            let mut bytes = frame.to_bytes();
            let len = bytes.len();
            changes.iter().for_each(|(at, byte)| bytes[at.index(len)] = *byte);
            for bytes in [bytes, others] {
                if let [Frame::Offer(offer), ..] = &read(&bytes).0[..]
                    && let Ok((kind, size)) = offer.check(&process_map(), 0)
                {
                    prop_assert!(offer.source < 2 && (2..4).contains(&offer.destination));
                    let numel: i64 = offer.shape.iter().product();
                    prop_assert_eq!(num_bytes(kind, numel as usize), size);
                }
            }
        }
    }

    #[test]
    fn invalid_offers_are_refused() {
        let offer = |source, destination, kind: &str, shape: &[i64]| {
            let (kind, shape) = (kind.into(), shape.into());
            let offer = Offer { id: 0, source, destination, tag: 0, kind, shape };
            offer.check(&process_map(), 0)
        };
        assert_eq!(offer(1, 2, "float32", &[3, 5]).unwrap(), (Kind::Float, 60));
        assert_eq!(offer(1, 2, "int64", &[]).unwrap(), (Kind::Int64, 8));
        assert_eq!(offer(1, 2, "int64", &[0, 5]).unwrap(), (Kind::Int64, 0));
        for (source, destination, kind, shape) in [
            (2, 2, "float32", &[3][..]),
            (1, 1, "float32", &[3]),
            (1, 9, "float32", &[3]),
            (1, 2, "float31", &[3]),
            (1, 2, "qint8", &[3]),
            (1, 2, "float32", &[-1]),
            (1, 2, "float32", &[1 << 62, 2]),
            (1, 2, "float32", &[1 << 62]),
        ] {
            assert!(offer(source, destination, kind, shape).is_err(), "{kind} {shape:?}");
        }
    }
}
