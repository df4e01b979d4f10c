//! The error file, from which torchrun shows why a worker failed.

use std::io;
use std::path::Path;
use std::time::SystemTime;

use serde_json::json;

use crate::error::escaped;
use crate::files::WholeFile;

/// Writes `report` to the file that torchrun's agent reads, complete or not at all: half a file would break the
/// agent's own report.
///
/// Follows `torch.distributed.elastic.multiprocessing.errors.record`. For a program that is not Python, the agent
/// shows only `py_callstack`, if it is set, so the whole text goes there. The time is in whole seconds, as text;
/// the agent accepts no other form.
///
/// # Errors
/// When the file cannot be written.
pub fn write_error_file(file: &Path, report: &str) -> io::Result<()> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let report = &*escaped(report); // the agent prints it
    let timestamp = since.map_or(0, |time| time.as_secs()).to_string();
    let text = json!({ "message": {
        "message": report,
        "extraInfo": { "py_callstack": report, "timestamp": timestamp },
    }});
    let whole = WholeFile::begin(file)?;
    serde_json::to_writer(whole.file(), &text)?;
    whole.replace()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn error_file_has_the_report_and_a_timestamp_in_seconds() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("error.json");
        write_error_file(&file, "rank 1 failed:\n  \"why\"").unwrap();
        let text = fs::read_to_string(&file).unwrap();
        let read: serde_json::Value = serde_json::from_str(&text).unwrap();
        let extra = &read["message"]["extraInfo"];
        assert_eq!(extra["py_callstack"], "rank 1 failed:\n  \"why\"");
        assert!(extra["timestamp"].as_str().unwrap().parse::<u64>().unwrap() > 1_700_000_000);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write_error_file(&file.join("error.json"), "").is_err());
    }
}
