//! Reads the files of `--record` that the processes of one run have written.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, Result, Shown};
use crate::files::{RECOGNIZED_BY, mistaken, open_regular};
use crate::os::limits::explain;
use crate::telemetry::{
    RECORD_FORMAT, RecordHeader, RecordLine, RecordedStart, RecordedStep, StepOfRank, process_path,
};

/// The record of a run.
#[derive(Debug)]
pub(super) struct Record {
    /// Its name, as the user gave it.
    pub name: String,
    /// The header of the newest start of the first process.
    pub header: RecordHeader,
    /// The state before the first step of a start, by the number of that step and by rank.
    pub starts: BTreeMap<u64, BTreeMap<usize, RecordedStart>>,
    /// By number and by rank. A step that a resumed run has repeated is here once, as the last run made it.
    pub steps: BTreeMap<u64, BTreeMap<usize, RecordedStep>>,
    /// Where a rank failed before it had anything of the step.
    pub failed: Option<StepOfRank>,
}

/// The first field of a header, in which records of other versions are alike.
#[derive(Deserialize)]
struct AnyHeader {
    format: u32,
}

impl Record {
    /// Reads the record at `path`. If there is none, it may be that of several processes, `a.0.record`, `a.1.record` and
    /// so on for `a.record`.
    ///
    /// # Errors
    /// [`Error::Input`] with the file, the line and the remedy.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let of_processes: Vec<PathBuf> = (0..)
            .map(|process| process_path(path, [process, usize::MAX]))
            .take_while(|path| path.is_file())
            .collect();
        let is_one = path.exists() || of_processes.is_empty();
        if is_one && let Some(other) = of_processes.first() {
            return Err(refused(
                path,
                format!("{} exists, too; remove the one that is not of this run", other.shown()),
            ));
        }
        let paths = if is_one { vec![path.to_owned()] } else { of_processes };
        let mut record: Option<Self> = None;
        for path in &paths {
            let file = open_regular(path).map_err(|error| refused(path, explain(error)))?;
            let mut of_process = None;
            read_file(path, file, &mut of_process)?;
            let Some(of_process) = of_process else { continue };
            match &mut record {
                None => record = Some(of_process),
                Some(record) => {
                    record.merge(of_process).map_err(|problem| refused(path, problem))?
                }
            }
        }
        let mut record = record.ok_or_else(|| refused(path, "the record is empty"))?;
        record.name = path.shown().into_owned();
        let of_starts = record.starts.values().flat_map(BTreeMap::keys);
        let ranks: BTreeSet<usize> = of_starts.copied().collect();
        if let Some(missing) = (0..record.header.world_size).find(|rank| !ranks.contains(rank)) {
            return Err(refused(
                path,
                format!(
                    "it has no start of rank {missing}; put the files of all processes beside each other"
                ),
            ));
        }
        Ok(record)
    }

    /// Adds the lines of another process of the run.
    fn merge(&mut self, other: Self) -> std::result::Result<(), String> {
        let Self { name: _, header, starts, steps, failed } = other;
        self.check_model(&header)?;
        for (step, ranks) in starts {
            self.starts.entry(step).or_default().extend(ranks);
        }
        for (step, ranks) in steps {
            self.steps.entry(step).or_default().extend(ranks);
        }
        // The newest start may be of fewer processes, without the one that failed.
        let failed = failed.filter(|failed| failed.rank < self.header.world_size);
        self.failed = self.failed.into_iter().chain(failed).min_by_key(|failed| failed.step);
        Ok(())
    }

    fn check_model(&self, header: &RecordHeader) -> std::result::Result<(), String> {
        let Self { header: known, .. } = self;
        if header.parameters == known.parameters && header.buffers == known.buffers {
            return Ok(());
        }
        Err("this start trains another model; record each in a file of its own".into())
    }
}

/// Adds the lines of a process to `record`.
fn read_file(path: &Path, file: File, record: &mut Option<Record>) -> Result<()> {
    let mut file = BufReader::new(file);
    let begin = file.fill_buf().map_err(|error| refused(path, explain(error)))?;
    let begin = begin[..begin.len().min(RECOGNIZED_BY)].to_vec();
    let mut lines = file.split(b'\n').zip(1..).peekable();
    while let Some((line, number)) = lines.next() {
        let line = line.map_err(|error| refused(path, explain(error)))?;
        let parsed = match serde_json::from_slice(&line) {
            Ok(parsed) => parsed,
            Err(error) => {
                if number == 1 {
                    return Err(not_a_record(path, &line, &begin));
                }
                // A killed run leaves a part of a line: at the end, or before the header of its next start.
                let is_cut = match lines.peek() {
                    None => true,
                    Some((Ok(next), _)) => next.starts_with(b"{\"event\":\"header\""),
                    Some((Err(_), _)) => false,
                };
                if is_cut {
                    continue;
                }
                return Err(refused(
                    path,
                    format!("line {number} is no line of a record: {error}"),
                ));
            }
        };
        add(parsed, record)
            .map_err(|problem| refused(path, format!("line {number}: {problem}")))?;
    }
    Ok(())
}

/// Adds a line to `record`.
fn add(line: RecordLine, record: &mut Option<Record>) -> std::result::Result<(), String> {
    let (parameters, buffers) = match (line, &mut *record) {
        (RecordLine::Header(header), _) if header.format != RECORD_FORMAT => {
            return Err(other_version(header.format));
        }
        (RecordLine::Header(header), None) => {
            *record = Some(Record {
                name: String::new(),
                header,
                starts: BTreeMap::new(),
                steps: BTreeMap::new(),
                failed: None,
            });
            return Ok(());
        }
        (RecordLine::Header(header), Some(known)) => {
            known.check_model(&header)?;
            known.header = header;
            return Ok(());
        }
        (_, None) => return Err("the header is missing".into()),
        (RecordLine::Failed(failed), Some(record)) => {
            record.failed = Some(failed);
            return Ok(());
        }
        (RecordLine::Start(start), Some(record)) => {
            let lens = ([start.parameters.len(); 3], start.buffers.len());
            // The run goes on from here: an earlier start may have come further.
            record.failed = None;
            for ranks in record.steps.range_mut(start.step..).map(|(_, ranks)| ranks) {
                ranks.remove(&start.rank);
            }
            record.steps.retain(|_, ranks| !ranks.is_empty());
            record.starts.entry(start.step).or_default().insert(start.rank, start);
            lens
        }
        (RecordLine::Step(step), Some(record)) => {
            let lens = [step.gradients.len(), step.averages.len(), step.parameters.len()];
            let lens = (lens, step.buffers.len());
            record.steps.entry(step.step).or_default().insert(step.rank, step);
            lens
        }
    };
    let Some(Record { header, .. }) = record else { return Ok(()) };
    if parameters != [header.parameters.len(); 3] || buffers != header.buffers.len() {
        return Err("it has not one hash for each tensor of the header".into());
    }
    Ok(())
}

fn other_version(format: u32) -> String {
    format!(
        "this record has format {format}, and this program reads format {RECORD_FORMAT}; record the run again with this \
         version"
    )
}

/// Returns the error of a file that begins so, and whose first line is not the header of this version.
fn not_a_record(path: &Path, line: &[u8], begin: &[u8]) -> Error {
    match serde_json::from_slice::<AnyHeader>(line) {
        Ok(AnyHeader { format }) if format != RECORD_FORMAT => refused(path, other_version(format)),
        _ => {
            let instead = "name a file that --record has written";
            let unknown = || format!("this file is not a record; {instead}");
            refused(path, mistaken(begin, "a record", instead).unwrap_or_else(unknown))
        }
    }
}

fn refused(path: &Path, problem: impl std::fmt::Display) -> Error {
    Error::data(format!("{}: {problem}", path.shown()))
}
