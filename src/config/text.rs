//! Values that are written as text, or as a plain number.

use std::fmt;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::Error;
use crate::launch::{Fault, Nproc};
use crate::runtime::LONGEST;

/// The number of ranks: `auto`, `gpu`, `cpu`, or a plain number.
pub(super) mod nproc {
    use super::*;

    pub(in crate::config) fn serialize<S: Serializer>(
        nproc: &Nproc,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match nproc {
            Nproc::Auto => to.serialize_str("auto"),
            Nproc::Gpu => to.serialize_str("gpu"),
            Nproc::Cpu => to.serialize_str("cpu"),
            Nproc::Count(count) => to.serialize_u64(*count as u64),
        }
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Nproc, D::Error> {
        TextOrNumber::deserialize(from)?.to_string().parse().map_err(D::Error::custom)
    }
}

/// A duration: `500ms`, `30s`, `10m`; a plain number is in seconds.
pub(super) mod duration {
    use super::*;

    pub(in crate::config) fn serialize<S: Serializer>(
        duration: &Duration,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(&humantime::format_duration(*duration).to_string())
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Duration, D::Error> {
        parse(&TextOrNumber::deserialize(from)?.to_string()).map_err(D::Error::custom)
    }

    pub(in crate::config) fn parse(text: &str) -> Result<Duration, Error> {
        let with_unit = if text.parse::<u64>().is_ok() { &format!("{text}s") } else { text };
        let parsed = humantime::parse_duration(with_unit);
        parsed.map(|it| it.min(LONGEST)).map_err(|_| {
            Error::Input(format!(
                "{text:?} is not a duration; use for example 500ms, 30s or 10m; a plain number is seconds"
            ))
        })
    }
}

/// An optional duration, in the same format.
pub(super) mod some_duration {
    use super::*;

    pub(in crate::config) fn serialize<S: Serializer>(
        time: &Option<Duration>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match time {
            Some(time) => duration::serialize(time, to),
            None => to.serialize_none(),
        }
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Duration>, D::Error> {
        duration::deserialize(from).map(Some)
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text or a whole number")]
enum TextOrNumber {
    Text(String),
    Number(i64),
}

impl fmt::Display for TextOrNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextOrNumber::Text(text) => f.write_str(text),
            TextOrNumber::Number(number) => write!(f, "{number}"),
        }
    }
}

impl Serialize for Fault {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

pub(super) fn some_fault<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Fault>, D::Error> {
    String::deserialize(from)?.parse().map(Some).map_err(D::Error::custom)
}
