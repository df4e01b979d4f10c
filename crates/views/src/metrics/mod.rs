//! The file of `--metrics`: lines of JSON. A run that starts again appends to it.

use std::io;
use std::path::Path;

use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;

use super::View;
use super::json_lines::JsonLines;
use engine::error::{Result, Shown};
use engine::events::{Event, Observer, Wants};
use engine::files::{LinesBefore, lines_before};

/// The file. Rank 0 alone writes to it.
#[derive(Debug)]
pub struct Metrics {
    lines: Mutex<JsonLines>,
    /// The number of this start among those that wrote to the file, from 1.
    run: u64,
}

#[derive(Serialize)]
struct Row<'a, M> {
    event: &'a str,
    run: u64,
    #[serde(flatten)]
    metrics: &'a M,
}

/// The kinds of rows: the field `event`.
const TRAIN: &str = "train";
const VALIDATION: &str = "validation";

/// The first bytes of every row.
const BEGINS: &[u8] = b"{\"event\":\"";

impl Metrics {
    /// Refuses a file at `path` that this program did not write. Changes nothing.
    ///
    /// # Errors
    /// When its first or last line is not a row of metrics, or when the file cannot be read.
    pub fn check(path: &Path) -> io::Result<()> {
        lines_before(path).and_then(|before| last_run(before.as_ref())).map(drop)
    }

    /// Opens the file at `path` for appending. Creates its folder if needed.
    ///
    /// # Errors
    /// When the file cannot be opened, or when its first or last line is not a row of metrics.
    pub fn open(path: &Path) -> io::Result<Self> {
        let (lines, run) = JsonLines::open(format!("--metrics {}", path.shown()), path, last_run)?;
        Ok(Self { lines: Mutex::new(lines), run: run.saturating_add(1) })
    }

    /// Writes a row.
    fn row(&self, event: &str, metrics: &impl Serialize) -> Result<()> {
        self.lines.lock().line(&Row { event, run: self.run, metrics })
    }
}

impl Observer for Metrics {
    fn wants(&self) -> Wants {
        Wants { metrics: true, ..Wants::default() }
    }

    fn event(&self, event: &Event) -> anyhow::Result<()> {
        match event {
            Event::Metrics(metrics) => self.row(TRAIN, metrics)?,
            Event::Validation(metrics) => self.row(VALIDATION, metrics)?,
            _ => {}
        }
        Ok(())
    }
}

impl View for Metrics {}

/// Returns the number of the start that wrote the last row; 0 if there is none.
fn last_run(lines: Option<&LinesBefore>) -> io::Result<u64> {
    let Some(LinesBefore { first, last, cut, .. }) = lines else { return Ok(0) };
    let row = |line: &[u8]| -> Option<u64> {
        let row: Value = serde_json::from_slice(line).ok()?;
        let is_known = [TRAIN, VALIDATION].contains(&row["event"].as_str()?);
        let has_numbers = ["step", "epoch"].iter().all(|key| row[*key].is_u64());
        let is_ours = is_known && has_numbers && line.starts_with(BEGINS);
        is_ours.then(|| row["run"].as_u64().unwrap_or(0)) // older rows have none
    };
    // A row may have been cut off when the machine failed.
    let is_begun = cut.starts_with(BEGINS) || BEGINS.starts_with(cut);
    let runs = row(first).and_then(|_| row(cut).or(row(last).filter(|_| is_begun)));
    runs.ok_or_else(|| {
        io::Error::other(
            "this program did not write that file: one of its lines is not a row of metrics; remove it, or use another \
             name",
        )
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn write(path: &Path, step: u64) -> io::Result<()> {
        let file = Metrics::open(path)?;
        let row = serde_json::json!({"step": step, "epoch": 0, "loss": 0.5});
        file.row(TRAIN, &row).map_err(io::Error::other)
    }

    #[test]
    fn metrics_are_appended_only_to_files_of_this_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/metrics");
        for step in [5, 7] {
            write(&path, step).unwrap();
        }
        let two = "{\"event\":\"train\",\"run\":1,\"epoch\":0,\"loss\":0.5,\"step\":5}\n\
                   {\"event\":\"train\",\"run\":2,\"epoch\":0,\"loss\":0.5,\"step\":7}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), two);
        let long = format!("# {}\n{two}", "x".repeat(1 << 20));
        for foreign in [
            "\n",
            "hello\n",
            "{}\n",
            "{\"event\":\"end\",\"step\":1,\"epoch\":1}\n",
            "{\"event\":\"train\"}\n",
            &format!("a,b\n{two}"),
            &format!("{two}1,2\n"),
            &format!("{two}1,2"),
            &format!("{two}\n"),
            &two[..20],
            &long,
        ] {
            fs::write(&path, foreign).unwrap();
            let error = write(&path, 9).unwrap_err().to_string();
            assert!(error.contains("did not write that file"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), foreign);
        }
        // Rows of older versions, however long, and a row that was cut off, which stays unchanged.
        let old = "{\"event\":\"validation\",\"step\":1,\"epoch\":0,\"loss\":null}\n".repeat(9000);
        for (before, run) in [("", 1), (two, 3), (&two[..two.len() - 1], 3), (&old, 1)] {
            fs::write(&path, before).unwrap();
            write(&path, 9).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            let added = text.strip_prefix(before).unwrap().trim_start();
            assert!(added.starts_with(&format!("{{\"event\":\"train\",\"run\":{run},")), "{added}");
            assert_eq!(text.lines().count(), before.lines().count() + 1);
        }
        for cut in 1..two.len() / 2 - 1 {
            let before = &two[..two.len() - cut - 1];
            fs::write(&path, before).unwrap();
            write(&path, 9).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.starts_with(&format!("{before}\n{{\"event\":\"train\",")), "{text}");
        }
    }
}
