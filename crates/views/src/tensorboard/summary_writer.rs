//! An event file for TensorBoard: scalars and histograms over the steps of a run.

use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;

use super::messages::{EventMessage, Histogram, SessionLog, Summary, Value};
use engine::files::{Appender, Place};

/// A writer of one event file in the folder of a run. Follows `torch.utils.tensorboard.SummaryWriter`.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// use ddp_mp_views::SummaryWriter;
///
/// let mut writer = SummaryWriter::create(folder)?; // tensorboard --logdir FOLDER
/// for step in 0..10 {
///     writer.scalar("train/loss", step, 1.0 / (step + 1) as f64)?;
/// }
/// writer.flush()?; // otherwise when it is dropped, and then without an error
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SummaryWriter {
    out: Appender,
}

/// Bytes of pending records after which they are written to the file.
const MOST_PENDING: usize = 1 << 16;

/// Number of buckets of a histogram, all of the same width.
const BUCKETS: usize = 64;

impl SummaryWriter {
    /// Creates a new file in `folder`, and the folder if needed. Files of earlier runs stay unchanged.
    ///
    /// # Errors
    /// When the folder or the file cannot be created.
    pub fn create(folder: &Path) -> io::Result<Self> {
        Place::create_folder(folder)?;
        let now = seconds() as u64;
        let pid = std::process::id();
        let name =
            |number: u32| folder.join(format!("events.out.tfevents.{now:010}.{pid}.{number}"));
        let mut number = 0;
        let out = loop {
            match Appender::create_new(&name(number)) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                out => break out?,
            }
        };
        let mut created = Self { out };
        let file_version = Some("brain.Event:2".into());
        created.write(0, EventMessage { file_version, ..EventMessage::default() })?;
        Ok(created)
    }

    /// Makes TensorBoard leave out what earlier files in the folder have from `step` on: the run goes on before it. Follows
    /// `SummaryWriter(purge_step=)`.
    ///
    /// # Errors
    /// When it cannot be written, like the functions below.
    pub fn purge_from(&mut self, step: u64) -> io::Result<()> {
        let session_log = Some(SessionLog { status: 1 });
        self.write(step, EventMessage { session_log, ..EventMessage::default() })
    }

    /// Writes a number at `step`.
    ///
    /// # Errors
    /// When it cannot be written, like the functions below.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> io::Result<()> {
        let simple_value = Some(value as f32);
        self.value(step, Value { tag: tag.into(), simple_value, histogram: None })
    }

    /// Writes a histogram of `values`. Infinite values and NaN are left out.
    ///
    /// # Errors
    /// The errors of [`scalar`](Self::scalar).
    pub fn histogram(&mut self, tag: &str, step: u64, values: &[f32]) -> io::Result<()> {
        let histogram = Some(histogram(values));
        self.value(step, Value { tag: tag.into(), simple_value: None, histogram })
    }

    /// Writes all pending records to the file. This also happens after each 64 KiB, and on drop.
    ///
    /// # Errors
    /// The errors of [`scalar`](Self::scalar).
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn value(&mut self, step: u64, value: Value) -> io::Result<()> {
        let summary = Some(Summary { value: vec![value] });
        self.write(step, EventMessage { summary, ..EventMessage::default() })
    }

    /// Writes a record: its length and contents, each with a checksum.
    fn write(&mut self, step: u64, event: EventMessage) -> io::Result<()> {
        let event = EventMessage { wall_time: seconds(), step: step as i64, ..event };
        let contents = event.encode_to_vec();
        let length = (contents.len() as u64).to_le_bytes();
        for part in [&length[..], &contents] {
            self.out.write_all(part)?;
            self.out.write_all(&masked_crc(part).to_le_bytes())?;
        }
        if self.out.pending() < MOST_PENDING { Ok(()) } else { self.flush() }
    }
}

impl Drop for SummaryWriter {
    fn drop(&mut self) {
        let _ = self.flush(); // `drop` cannot return the error
    }
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Returns the checksum of TFRecord files: a rotated CRC, so that the CRC of a record that contains one is not special.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn histogram(values: &[f32]) -> Histogram {
    let finite = || values.iter().filter(|x| x.is_finite()).map(|&x| f64::from(x));
    let num = finite().count();
    if num == 0 {
        return Histogram { bucket_limit: vec![0.0], bucket: vec![0.0], ..Histogram::default() };
    }
    let (min, max) = finite().fold((f64::MAX, f64::MIN), |(min, max), x| (min.min(x), max.max(x)));
    let width = (max - min) / BUCKETS as f64;
    let mut bucket = vec![0.0; BUCKETS];
    for x in finite() {
        // All values are in the first bucket if they are equal. The largest value is in the last bucket.
        let index = if width > 0.0 { ((x - min) / width) as usize } else { 0 };
        bucket[index.min(BUCKETS - 1)] += 1.0;
    }
    let mut bucket_limit: Vec<f64> = (1..=BUCKETS).map(|i| min + width * i as f64).collect();
    bucket_limit[BUCKETS - 1] = max;
    Histogram {
        min,
        max,
        num: num as f64,
        sum: finite().sum(),
        sum_squares: finite().map(|x| x * x).sum(),
        bucket_limit,
        bucket,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// Returns the paths of the files in a folder, the oldest first.
    fn files(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).unwrap();
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    /// Returns the records of a file, and checks their checksums.
    fn read(path: &Path) -> Vec<EventMessage> {
        let mut rest = &fs::read(path).unwrap()[..];
        let mut events = Vec::new();
        let mut take = |len: usize| {
            let (part, after) = rest.split_at(len);
            let (crc, after) = after.split_at(4);
            assert_eq!(crc, masked_crc(part).to_le_bytes());
            rest = after;
            (part, rest.is_empty())
        };
        loop {
            let length = u64::from_le_bytes(take(8).0.try_into().unwrap());
            let (contents, is_last) = take(length as usize);
            events.push(EventMessage::decode(contents).unwrap());
            if is_last {
                return events;
            }
        }
    }

    #[test]
    fn events_are_read_back_as_written() {
        // The check value of CRC-32C.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let mut board = SummaryWriter::create(&run).unwrap();
        board.scalar("loss", 7, 0.5).unwrap();
        board.histogram("weights", 8, &[1., 2., 2., f32::NAN, f32::INFINITY]).unwrap();
        board.flush().unwrap();
        let events = read(&files(&run)[0]);
        assert_eq!(events.len(), 3);
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        let values = events[1..].iter();
        let values = values.map(|it| (it.step, it.summary.as_ref().unwrap().value[0].clone()));
        let values: Vec<(i64, Value)> = values.collect();
        let loss = Value { tag: "loss".into(), simple_value: Some(0.5), histogram: None };
        assert_eq!(values[0], (7, loss));
        let histogram = values[1].1.histogram.as_ref().unwrap();
        assert_eq!((histogram.num, histogram.sum, histogram.sum_squares), (3., 5., 9.));
        assert_eq!((histogram.bucket[0], histogram.bucket[BUCKETS - 1]), (1., 2.));
        assert_eq!(histogram.bucket_limit.last(), Some(&2.));

        // A second file is created beside the first, and does not overwrite it.
        let mut other = SummaryWriter::create(&run).unwrap();
        assert_eq!(files(&run).len(), 2);
        // As PyTorch 2.15 writes it with `purge_step=8`: field 2 with the step, field 7 with `status: START`.
        other.purge_from(8).unwrap();
        other.flush().unwrap();
        let start = &read(&files(&run)[1])[1];
        assert_eq!(start.encode_to_vec()[9..], [0x10, 8, 0x3a, 2, 0x08, 1]);
    }

    #[test]
    fn unflushed_events_are_written_on_drop() {
        let folder = tempfile::tempdir().unwrap();
        let mut board = SummaryWriter::create(folder.path()).unwrap();
        let path = files(folder.path()).remove(0);
        let len = || fs::metadata(&path).unwrap().len() as usize;
        assert_eq!(len(), 0);
        let mut records = 1;
        while len() == 0 {
            board.histogram("weights", records, &[0.5; 100]).unwrap();
            records += 1;
        }
        assert!((MOST_PENDING..2 * MOST_PENDING).contains(&len()), "{}", len());
        board.scalar("loss", records, 0.5).unwrap();
        drop(board);
        let events = read(&path);
        assert_eq!(events.len() as u64, records + 1);
        assert_eq!(events.last().unwrap().step as u64, records);
    }

    #[test]
    fn histogram_of_nonfinite_and_extreme_values_is_valid() {
        let same = histogram(&[3.; 5]);
        assert_eq!((same.min, same.max, same.bucket[0]), (3., 3., 5.));
        assert_eq!(histogram(&[f32::NAN]).num, 0.);
        let whole = histogram(&[f32::MAX, f32::MIN]);
        assert!(whole.bucket_limit.iter().all(|limit| limit.is_finite()));
    }
}
