//! The properties of an option beside its value. They stand in its declaration: `#[arg(long, add = ...)]`.

use clap::Arg;
use clap::builder::ArgExt;

use super::Config;

/// Where the values of an option may differ. Without this property they are the same wherever a run continues, and in
/// all its processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MayDiffer {
    /// On resume, with a note: users change such an option on purpose.
    OnResumeWithNote,
    /// On resume: the option does not change what is trained, only how far the run goes or on what.
    OnResume,
    /// On resume and between processes: the option does not change the result, or only rank 0's value counts.
    BetweenProcesses,
}

/// Marks an option that `-h` lists. `--help` lists all.
#[derive(Debug, Clone, Copy)]
pub struct InShortHelp;

/// What a run does with the path that an option names. Of two options that exclude each other, the later one here is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Use {
    /// Reads a file.
    Reads,
    /// Writes a file in each process, or adds lines to it.
    WritesEach,
    /// Adds lines to a file, which may be that of stdout.
    Appends,
    /// Writes a whole file.
    Writes,
    /// Adds files of its own to a folder.
    Fills,
    /// Reads or writes checkpoints in a folder.
    Keeps,
}

/// States in the help what holds without this option of a run, where its declaration has no default value.
#[derive(Debug, Clone, Copy)]
pub(super) struct DefaultInWords(pub &'static str);

/// Refuses a value other than the default, from a flag or a file, where the function returns a problem with others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conflict(pub fn(&Config) -> Option<String>);

/// Refuses a flag with this text unless the condition holds: it would have no effect. A file may have the key.
#[derive(Debug, Clone, Copy)]
pub(super) struct OnlyIf(pub fn(&Config) -> bool, pub &'static str);

/// A command that trains a few steps only, and refuses flags of whole runs. A file may have the keys for training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// `bench step`.
    BenchStep,
    /// `bench scaling`.
    BenchScaling,
    /// `verify`.
    Verify,
}

impl Tool {
    /// Returns what the command does instead of what its refused flags ask for.
    pub(super) fn purpose(self) -> &'static str {
        match self {
            Tool::BenchStep => "bench step measures single steps",
            Tool::BenchScaling => "bench scaling measures single steps in one process",
            Tool::Verify => {
                "verify chooses the training variants itself, and runs --steps steps of each"
            }
        }
    }
}

/// The commands that refuse a flag.
#[derive(Debug, Clone, Copy)]
pub(super) struct RefusedBy(pub &'static [Tool]);

impl RefusedBy {
    /// An option of a whole run.
    pub(super) const TOOLS: Self = Self(&[Tool::BenchStep, Tool::BenchScaling, Tool::Verify]);
    /// An option that only training and `bench step` have.
    pub(super) const ONE_PROCESS: Self = Self(&[Tool::BenchScaling, Tool::Verify]);
    /// An option that only `bench scaling` refuses.
    pub(super) const SCALING: Self = Self(&[Tool::BenchScaling]);
    /// A fault, which `verify` can find.
    pub(super) const BENCH: Self = Self(&[Tool::BenchStep, Tool::BenchScaling]);
    /// An option that `verify` chooses itself.
    pub(super) const VERIFY: Self = Self(&[Tool::Verify]);
}

/// Returns whether `tool` refuses the option `arg`.
pub(crate) fn is_refused_by(arg: &Arg, tool: Tool) -> bool {
    arg.get::<RefusedBy>().is_some_and(|by| by.0.contains(&tool))
}

impl ArgExt for MayDiffer {}
impl ArgExt for InShortHelp {}
impl ArgExt for Use {}
impl ArgExt for DefaultInWords {}
impl ArgExt for Conflict {}
impl ArgExt for OnlyIf {}
impl ArgExt for RefusedBy {}
