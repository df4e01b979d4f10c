//! Reads the files of `--record` that the processes of one run have written.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::diff::{Refused, Rename};
use crate::files::{explain_path, numbered_path, open_regular};
use crate::mistaken::{RECOGNIZED_BY, mistaken};
use crate::record::{
    FINGERPRINT_FORMAT, Fingerprint, FingerprintedRun, StepFingerprint, StepOfRank,
};
use crate::text::Shown;

/// The lines of a step, by rank.
pub(crate) type Ranks = BTreeMap<usize, StepFingerprint>;

/// The lines of a run, by the number of the step.
pub(crate) type Lines = BTreeMap<u64, Ranks>;

/// The record of a run.
#[derive(Debug)]
pub(crate) struct Record {
    /// Its name, as the user gave it.
    pub name: String,
    /// The header of the newest start of the first process.
    pub header: FingerprintedRun,
    /// The parameters and buffers before the first step of a start; nothing else is known there.
    pub starts: Lines,
    /// A step that a resumed run has repeated is here once, as the last run made it.
    pub steps: Lines,
    /// Where a rank failed before it had anything of the step.
    failed: Option<StepOfRank>,
}

impl Record {
    /// Reads the record at `path`. If there is none, it may be that of several processes, `a.0.record`, `a.1.record` and
    /// so on for `a.record`.
    ///
    /// # Errors
    /// With the file, the line and the remedy.
    pub(crate) fn read(path: &Path) -> Result<Self, Refused> {
        let of_processes: Vec<PathBuf> = (0..)
            .map(|process| numbered_path(path, process))
            .take_while(|path| path.is_file())
            .collect();
        let is_one = path.exists() || of_processes.is_empty();
        if is_one && let Some(other) = of_processes.first() {
            let problem = "exists, too; remove the one that is not of this run";
            return Err(refused(path, format!("{} {problem}", other.shown())));
        }
        let paths = if is_one { vec![path.to_owned()] } else { of_processes };
        let mut record: Option<Self> = None;
        for path in &paths {
            let refused = |problem| refused(path, problem);
            let Some(of_process) = read_file(path).map_err(refused)? else { continue };
            match &mut record {
                None => record = Some(of_process),
                Some(record) => record.merge(of_process).map_err(refused)?,
            }
        }
        let mut record = record.ok_or_else(|| refused(path, "the record is empty"))?;
        record.name = path.shown().into_owned();
        let of_starts = record.starts.values().flat_map(BTreeMap::keys);
        let ranks: BTreeSet<usize> = of_starts.copied().collect();
        if let Some(missing) = (0..record.header.world_size).find(|rank| !ranks.contains(rank)) {
            let remedy = "put the files of all processes beside each other";
            return Err(refused(path, format!("it has no start of rank {missing}; {remedy}")));
        }
        Ok(record)
    }

    /// Adds the lines of another process of the run.
    fn merge(&mut self, other: Self) -> Result<(), String> {
        self.check_model(&other.header)?;
        for (mine, theirs) in [(&mut self.starts, other.starts), (&mut self.steps, other.steps)] {
            for (step, ranks) in theirs {
                mine.entry(step).or_default().extend(ranks);
            }
        }
        // The newest start may be of fewer processes, without the one that failed.
        let failed = other.failed.filter(|failed| failed.rank < self.header.world_size);
        self.failed = self.failed.into_iter().chain(failed).min_by_key(|failed| failed.step);
        Ok(())
    }

    /// Replaces parts of the names of its tensors and modules.
    pub(crate) fn rename(&mut self, renames: &[Rename]) {
        let rename = |name: &mut String| {
            for rename in renames {
                *name = name.replace(&rename.from, &rename.to);
            }
        };
        let Self { header, steps, .. } = self;
        let tensors = header.parameters.iter_mut().chain(&mut header.buffers);
        tensors.for_each(|tensor| rename(&mut tensor.name));
        for line in steps.values_mut().flat_map(BTreeMap::values_mut) {
            let modules = line.outputs.iter_mut().chain(&mut line.output_gradients);
            modules.for_each(|tensor| rename(&mut tensor.module));
        }
    }

    fn check_model(&self, header: &FingerprintedRun) -> Result<(), String> {
        let Self { header: known, .. } = self;
        if header.parameters == known.parameters && header.buffers == known.buffers {
            return Ok(());
        }
        Err("this start trains another model; record each in a file of its own".into())
    }

    /// Adds a line of a rank to its starts or its steps.
    fn insert(&mut self, line: StepFingerprint, is_start: bool) -> Result<(), String> {
        let lens = [&line.gradients, &line.averages, &line.parameters].map(Vec::len);
        let Self { header, starts, steps, .. } = self;
        if lens != [header.parameters.len(); 3] || line.buffers.len() != header.buffers.len() {
            return Err("it has not one fingerprint for each tensor of the header".into());
        }
        let lines = if is_start { starts } else { steps };
        lines.entry(line.step).or_default().insert(line.rank, line);
        Ok(())
    }

    /// Returns the place where the run failed; `None` if it did not, or not in a recorded step.
    pub(crate) fn failure(&self) -> Option<StepOfRank> {
        if self.failed.is_some() {
            return self.failed;
        }
        let lines = || self.steps.values().flat_map(BTreeMap::values);
        if let Some(failed) = lines().find(|line| line.failed) {
            return Some(StepOfRank { step: failed.step, rank: failed.rank });
        }
        // A rank that is killed has no line of its step. The others stop in it, or in the step before, which that rank has
        // ended.
        let stopped = lines().rfind(|line| line.stopped)?.step;
        let is_step_before = self.steps[&stopped].values().any(StepFingerprint::is_whole);
        let has_stopped = |rank: usize| lines().any(|line| line.stopped && line.rank == rank);
        let rank = (0..self.header.world_size).find(|&rank| !has_stopped(rank))?;
        Some(StepOfRank { step: stopped.saturating_add(is_step_before.into()), rank })
    }
}

/// Reads the file of one process. Returns `None` if it is empty.
fn read_file(path: &Path) -> Result<Option<Record>, String> {
    let mut file = BufReader::new(open_regular(path).map_err(explain_path)?);
    let begin = file.fill_buf().map_err(explain_path)?;
    let begin = begin[..begin.len().min(RECOGNIZED_BY)].to_vec();
    let mut record = None;
    let mut lines = file.split(b'\n').zip(1..).peekable();
    while let Some((line, number)) = lines.next() {
        let line = line.map_err(explain_path)?;
        // A killed run leaves a part of a line: at the end, or before the header of its next start.
        let begins_start = |next: &Vec<u8>| next.starts_with(b"{\"event\":\"header\"");
        let is_cut = lines.peek().is_none_or(|(next, _)| next.as_ref().is_ok_and(begins_start));
        match serde_json::from_slice(&line) {
            Ok(parsed) => {
                add(parsed, &mut record).map_err(|problem| format!("line {number}: {problem}"))?
            }
            Err(_) if number == 1 => return Err(not_a_record(&line, &begin)),
            Err(_) if is_cut => {}
            Err(error) => return Err(format!("line {number} is no line of a record: {error}")),
        }
    }
    Ok(record)
}

/// Adds a line to `record`.
fn add(line: Fingerprint, record: &mut Option<Record>) -> Result<(), String> {
    match (line, &mut *record) {
        (Fingerprint::Header(header), _) if header.format != FINGERPRINT_FORMAT => {
            return Err(other_version(header.format.into()));
        }
        (Fingerprint::Header(header), _) if header.world_size == 0 => {
            return Err("`world_size` is 0; a run has at least one rank".into());
        }
        (Fingerprint::Header(header), None) => {
            let (name, starts, steps) = (String::new(), Lines::new(), Lines::new());
            *record = Some(Record { name, header, starts, steps, failed: None });
        }
        (Fingerprint::Header(header), Some(known)) => {
            known.check_model(&header)?;
            known.header = header;
        }
        (_, None) => return Err("the header is missing".into()),
        (Fingerprint::Failed(failed), Some(record)) => record.failed = Some(failed),
        (Fingerprint::Start { step, rank, parameters, buffers }, Some(record)) => {
            // The run goes on from here: an earlier start may have come further.
            record.failed = None;
            for ranks in record.steps.range_mut(step..).map(|(_, ranks)| ranks) {
                ranks.remove(&rank);
            }
            record.steps.retain(|_, ranks| !ranks.is_empty());
            // If this rank has stopped in the step before, others have made it, and the run has gone on.
            for line in record.steps.values_mut().filter_map(|ranks| ranks.get_mut(&rank)) {
                line.stopped = false;
            }
            let none = vec![None; parameters.len()];
            let known =
                StepFingerprint { step, rank, parameters, buffers, ..StepFingerprint::default() };
            record.insert(
                StepFingerprint { gradients: none.clone(), averages: none, ..known },
                true,
            )?;
        }
        (Fingerprint::Step(step), Some(record)) => record.insert(step, false)?,
    }
    Ok(())
}

fn other_version(format: u64) -> String {
    format!(
        "this record has format {format}, and this program reads format {FINGERPRINT_FORMAT}; record the run again with this \
         version"
    )
}

/// Returns the problem of a file that begins so, and whose first line is not the header of this version.
fn not_a_record(line: &[u8], begin: &[u8]) -> String {
    // Records of other versions are alike in this field of the header.
    let header: Value = serde_json::from_slice(line).unwrap_or_default();
    match header["format"].as_u64() {
        Some(format) if format != u64::from(FINGERPRINT_FORMAT) => other_version(format),
        _ => {
            let instead = "name a file that --record has written";
            let unknown = || format!("this file is not a record; {instead}");
            mistaken(begin, "a record", instead).unwrap_or_else(unknown)
        }
    }
}

fn refused(path: &Path, problem: impl Display) -> Refused {
    Refused::new(format!("{}: {problem}", path.shown()))
}
