//! The messages of TensorFlow's protocol buffers that TensorBoard's files consist of: event.proto and summary.proto.

use prost::{Message, Oneof};

/// One record of a file: TensorFlow's message `Event`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct EventMessage {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    #[prost(int64, tag = "2")]
    pub step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub what: Option<What>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum What {
    /// The version of the format, in the first record.
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// What has happened to a run: message `SessionLog`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLog {
    /// 1: it has started, at the step of the record.
    #[prost(int32, tag = "1")]
    pub status: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub tag: String,
    #[prost(oneof = "Kind", tags = "2, 5")]
    pub kind: Option<Kind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Kind {
    #[prost(float, tag = "2")]
    SimpleValue(f32),
    #[prost(message, tag = "5")]
    Histogram(Histogram),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Histogram {
    #[prost(double, tag = "1")]
    pub min: f64,
    #[prost(double, tag = "2")]
    pub max: f64,
    #[prost(double, tag = "3")]
    pub num: f64,
    #[prost(double, tag = "4")]
    pub sum: f64,
    #[prost(double, tag = "5")]
    pub sum_squares: f64,
    /// The upper end of each bucket, where the next one begins.
    #[prost(double, repeated, tag = "6")]
    pub bucket_limit: Vec<f64>,
    #[prost(double, repeated, tag = "7")]
    pub bucket: Vec<f64>,
}
