//! The heartbeat message: proof of life, plus what each rank of the process is doing.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::messages::{from_json, unreadable};
use crate::error::Result;
use crate::runtime::{OpEntry, RankStatus, RunContext};

/// The most operations that a heartbeat carries for each rank.
const MAX_OPS_PER_RANK: usize = 8;

/// The most bytes that a heartbeat carries of a call site: its end.
const MAX_CALL_SITE_BYTES: usize = 200;

/// Proof that a process is alive, and the status of each of its ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Heartbeat {
    /// The time from the start of the process's run until it sent this.
    pub sent: Duration,
    /// For how long the process was suspended until then; its clock stood still.
    pub suspended: Duration,
    pub ranks: Vec<RankStatus>,
}

/// Returns the status of `rank`, which must be a rank of this process.
pub(super) fn status_of(run: &RunContext, rank: usize) -> RankStatus {
    let mut seen = run.flight_recorder.recent_ops(rank, MAX_OPS_PER_RANK);
    for op in &mut seen {
        let line = op.source_line.to_string();
        let start = (line.len().saturating_sub(MAX_CALL_SITE_BYTES)..)
            .find(|&index| line.is_char_boundary(index));
        op.source_line = line[start.unwrap_or_default()..].to_owned().into();
    }
    RankStatus { at: run.activity[rank].now(), seen }
}

impl Heartbeat {
    /// Reads the heartbeat of a process with `ranks` ranks.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if `bytes` are not such a heartbeat.
    pub(super) fn from_bytes(key: &str, bytes: &[u8], ranks: usize) -> Result<Self> {
        let heartbeat: Self = from_json(key, bytes)?;
        if heartbeat.ranks.len() != ranks {
            let sent = heartbeat.ranks.len();
            let why = format!("a process with {ranks} ranks sent the status of {sent}");
            return Err(unreadable(key, &why));
        }
        for RankStatus { seen, .. } in &heartbeat.ranks {
            // The call site is printed to a terminal.
            let is_wrong = |op: &OpEntry| {
                let line = op.source_line.to_string();
                line.len() > MAX_CALL_SITE_BYTES || line.contains(char::is_control)
            };
            if seen.len() > MAX_OPS_PER_RANK || seen.iter().any(is_wrong) {
                return Err(unreadable(key, "the status of a rank is too long"));
            }
        }
        Ok(heartbeat)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;
    use strum::IntoEnumIterator;

    use super::super::messages::to_json;
    use super::*;
    use crate::operation::{OpId, Operation};

    const KEY: &str = "some/key";

    fn at() -> impl Strategy<Value = OpId> {
        let operations = Operation::iter().collect::<Vec<_>>();
        (prop::sample::select(operations), 0..1u64 << 56)
            .prop_map(|(operation, sequence)| OpId { operation, sequence })
    }

    fn seen() -> impl Strategy<Value = OpEntry> {
        let call_site = "[a-zä/]{0,90}";
        let times = any::<(Duration, Option<Duration>, Option<[Duration; 2]>)>();
        let group_and_size = any::<(Option<u32>, Option<u16>, u64)>();
        (at(), group_and_size, call_site, any::<bool>(), times).prop_map(
            |(at, (group, bucket, amount), call_site, on_comm_thread, times)| {
                let (started_at, finished_at, on_gpu) = times;
                let source_line = call_site.into();
                OpEntry {
                    at,
                    group,
                    bucket,
                    amount,
                    source_line,
                    on_comm_thread,
                    started_at,
                    finished_at,
                    on_gpu,
                }
            },
        )
    }

    fn heartbeat() -> impl Strategy<Value = Heartbeat> {
        let doing = (at(), prop::collection::vec(seen(), 0..=MAX_OPS_PER_RANK));
        let ranks =
            prop::collection::vec(doing.prop_map(|(at, seen)| RankStatus { at, seen }), 0..4);
        (any::<[Duration; 2]>(), ranks).prop_map(|([sent, suspended], ranks)| Heartbeat {
            sent,
            suspended,
            ranks,
        })
    }

    /// Checks that reading `bytes` does not panic, and that an error names the key.
    fn read(bytes: &[u8], count: usize) {
        match Heartbeat::from_bytes(KEY, bytes, count) {
            Ok(heartbeat) => assert_eq!(heartbeat.ranks.len(), count),
            Err(error) => assert!(error.to_string().contains(KEY), "{error}"),
        }
    }

    proptest! {
        #[test]
        fn heartbeat_from_random_bytes_never_panics(bytes: Vec<u8>, count in 0..9usize) {
            read(&bytes, count);
        }

        #[test]
        fn heartbeat_from_changed_bytes_never_panics(
            heartbeat in heartbeat(),
            changes: Vec<(Index, u8)>,
            len: Index,
            cut: bool,
        ) {
            let mut bytes = to_json(KEY, &heartbeat).unwrap();
            let whole = bytes.len();
            changes.iter().for_each(|(at, byte)| bytes[at.index(whole)] = *byte);
            if cut {
                bytes.truncate(len.index(whole + 1));
            }
            read(&bytes, heartbeat.ranks.len());
        }

        #[test]
        fn heartbeat_round_trip_is_exact(heartbeat in heartbeat()) {
            let bytes = to_json(KEY, &heartbeat).unwrap();
            prop_assert_eq!(Heartbeat::from_bytes(KEY, &bytes, heartbeat.ranks.len()).unwrap(), heartbeat);
        }
    }

    #[test]
    fn heartbeat_invalid_status_is_refused() {
        let plain = OpId { operation: Operation::Step, sequence: 1 };
        let seen = |call_site: &str| OpEntry {
            source_line: call_site.to_owned().into(),
            ..OpEntry::new(plain, Duration::MAX)
        };
        let read = |seen: Vec<OpEntry>, count| {
            let ranks = vec![RankStatus { at: plain, seen }];
            let heartbeat = Heartbeat { sent: Duration::ZERO, suspended: Duration::ZERO, ranks };
            Heartbeat::from_bytes(KEY, &to_json(KEY, &heartbeat).unwrap(), count).map(drop)
        };
        assert!(read(vec![seen("src/a.rs:7"); MAX_OPS_PER_RANK], 1).is_ok());
        for (result, reason) in [
            (read(vec![], 2), "a process with 2 ranks sent the status of 1"),
            (read(vec![seen(""); MAX_OPS_PER_RANK + 1], 1), "the status of a rank is too long"),
            (read(vec![seen("\u{1b}[2J")], 1), "the status of a rank is too long"),
            (
                read(vec![seen(&"x".repeat(MAX_CALL_SITE_BYTES + 1))], 1),
                "the status of a rank is too long",
            ),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
