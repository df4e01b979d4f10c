//! The frames that two processes exchange on a connection for messages: a length and a header in MessagePack. After
//! some of them follow the bytes of a tensor.
//!
//! Any program that reaches the port can write to it, so a header is checked before use.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};
use tch::Kind;

use super::super::process_map::ProcessMap;
use crate::process_group::dtype::{num_bytes, plain_kind};

/// Tensors of up to this many bytes travel with the offer. Larger ones follow when the receiver is ready for them.
pub(super) const EAGER_MAX_BYTES: usize = 64 << 10;

/// Size in bytes of the largest header.
const MAX_FRAME_HEADER_BYTES: usize = 64 << 10;

/// A header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Frame {
    /// The first frame of the process that connects. `token` is the one that the other process left in the store.
    Hello { token: u64, process: usize },
    /// The answer to `Hello`: both processes use this connection.
    Welcome,
    /// The answer to `Hello`: use the other connection, which was opened at the same time.
    Busy,
    /// A rank sends a tensor. Its bytes follow if there are at most [`EAGER_MAX_BYTES`].
    Offer(Offer),
    /// The receiver of this offer is ready for its bytes.
    Ready { id: u64 },
    /// The bytes of this offer follow.
    Data { id: u64 },
    /// The receiver has taken the bytes that came with this offer.
    Taken { id: u64 },
    /// The receiver expects another dtype or shape.
    Refused { id: u64, expected: String },
}

/// A tensor that a rank of one process sends to a rank of the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Offer {
    /// Sequence number among the offers of its process to the other.
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
    /// A text on the error, if process `from` cannot have made this offer to this process.
    pub(super) fn check(
        &self,
        process_map: &ProcessMap,
        from: usize,
    ) -> Result<(Kind, usize), String> {
        let Self { source, destination, kind, shape, .. } = self;
        if !process_map.processes[from].contains(source)
            || !process_map.here().contains(destination)
        {
            return Err(format!(
                "process {from} announced a tensor from rank {source} to rank {destination}, which are not its rank \
                 and one of this process"
            ));
        }
        let known = plain_kind(kind)
            .ok_or_else(|| format!("it announced a tensor of the unknown dtype {kind:?}"))?;
        let numel = shape
            .iter()
            .try_fold(1usize, |numel, &size| numel.checked_mul(usize::try_from(size).ok()?));
        let most = isize::MAX as usize / num_bytes(known, 1);
        match numel.filter(|numel| *numel <= most) {
            Some(numel) => Ok((known, num_bytes(known, numel))),
            None => Err(format!("it announced a tensor of the impossible shape {shape:?}")),
        }
    }
}

impl Frame {
    /// Writes the length and the header.
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let header = rmp_serde::to_vec(self).map_err(io::Error::other)?;
        let len =
            u32::try_from(header.len()).ok().filter(|len| *len as usize <= MAX_FRAME_HEADER_BYTES);
        let too_long = || format!("a message header of {} bytes is too long to send", header.len());
        let len = len.ok_or_else(|| io::Error::other(too_long()))?;
        // In one write, because each write may become a packet.
        to.write_all(&[&len.to_le_bytes()[..], &header].concat())
    }

    /// Reads the next header. Returns `None` at the end of the stream.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut len = [0; 4];
        if from.read(&mut len[..1])? == 0 {
            return Ok(None);
        }
        from.read_exact(&mut len[1..])?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_FRAME_HEADER_BYTES {
            let why = format!(
                "a message header has {len} bytes, and {MAX_FRAME_HEADER_BYTES} are the most"
            );
            return Err(foreign(&why));
        }
        let mut header = vec![0; len];
        from.read_exact(&mut header)?;
        let frame = rmp_serde::from_slice(&header);
        frame.map(Some).map_err(|error| foreign(&format!("a message header is invalid: {error}")))
    }
}

/// Returns the error about bytes that no process of the run sends.
pub(super) fn foreign(why: &str) -> io::Error {
    io::Error::other(format!(
        "{why}; another program uses the connection: let only the processes of this run connect to its ports"
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame() -> impl Strategy<Value = Frame> {
        let offer = (any::<(u64, usize, usize, u64)>(), ".{0,40}", any::<Vec<i64>>());
        let offer = offer.prop_map(|((id, source, destination, tag), kind, shape)| {
            Frame::Offer(Offer { id, source, destination, tag, kind, shape })
        });
        prop_oneof![
            any::<(u64, usize)>().prop_map(|(token, process)| Frame::Hello { token, process }),
            Just(Frame::Welcome),
            Just(Frame::Busy),
            offer,
            any::<u64>().prop_map(|id| Frame::Ready { id }),
            any::<u64>().prop_map(|id| Frame::Data { id }),
            any::<u64>().prop_map(|id| Frame::Taken { id }),
            (any::<u64>(), ".{0,40}").prop_map(|(id, expected)| Frame::Refused { id, expected }),
        ]
    }

    fn process_map() -> ProcessMap {
        ProcessMap { processes: vec![0..2, 2..4], mine: 1 }
    }

    proptest! {
        #[test]
        fn frames_round_trip_exactly(frames in prop::collection::vec(frame(), 0..5)) {
            let mut bytes = Vec::new();
            frames.iter().for_each(|frame| frame.write(&mut bytes).unwrap());
            let mut rest = &bytes[..];
            for frame in frames {
                prop_assert_eq!(Frame::read(&mut rest).unwrap(), Some(frame));
            }
            prop_assert_eq!(Frame::read(&mut rest).unwrap(), None);
        }

        #[test]
        fn frames_from_changed_bytes_never_panic(
            frame in frame(),
            changes: Vec<(prop::sample::Index, u8)>,
            others: Vec<u8>,
        ) {
            let mut bytes = Vec::new();
            frame.write(&mut bytes).unwrap();
            let len = bytes.len();
            changes.iter().for_each(|(at, byte)| bytes[at.index(len)] = *byte);
            for bytes in [bytes, others] {
                if let Ok(Some(Frame::Offer(offer))) = Frame::read(&mut &bytes[..])
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
        assert_eq!(offer(1, 2, "float32", &[3, 5]), Ok((Kind::Float, 60)));
        assert_eq!(offer(1, 2, "int64", &[]), Ok((Kind::Int64, 8)));
        assert_eq!(offer(1, 2, "int64", &[0, 5]), Ok((Kind::Int64, 0)));
        for (source, destination, kind, shape) in [
            (2, 2, "float32", &[3][..]),
            (1, 1, "float32", &[3]),
            (1, 9, "float32", &[3]),
            (1, 2, "float31", &[3]),
            (1, 2, "float32", &[-1]),
            (1, 2, "float32", &[1 << 62, 2]),
            (1, 2, "float32", &[1 << 62]),
        ] {
            assert!(offer(source, destination, kind, shape).is_err(), "{kind} {shape:?}");
        }
    }
}
