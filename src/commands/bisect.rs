//! `ddp-mp bisect`: the first tensors in which two commands differ, with their values.
//!
//! They record every step, and run once more to keep the tensors of the first step that differs.

use std::path::{self, Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use clap::Args;

use crate::session::{AlreadyReported, path_in_shell};
use compare::{Refused, compare_records, compare_tensors};
use engine::error::{Error, Shown};
use engine::events::StepOfRank;
use engine::files::Place;
use engine::os::{TemporaryFolder, TiedChild};
use views::Printer;

/// The flags of `bisect`.
#[derive(Debug, Clone, Args)]
pub struct BisectFlags {
    /// Run this shell command as the good side
    ///
    /// A command that trains with this program, and saves no checkpoints
    #[arg(long, value_name = "COMMAND")]
    pub good: String,
    /// Run this shell command as the bad side
    #[arg(long, value_name = "COMMAND")]
    pub bad: String,
    /// Keep both sides' records and tensors in DIR
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

/// Runs both commands, and prints the first tensors in which they differ.
///
/// # Errors
/// [`Error::Input`] if a command fails, or their files cannot be compared; [`AlreadyReported`] if they differ; and
/// an error when stdout cannot be written.
pub fn bisect(flags: &BisectFlags, program: &str, printer: &Printer) -> anyhow::Result<()> {
    if let Some(keep) = flags.keep.as_ref().filter(|keep| keep.exists()) {
        let problem = "it exists; remove it, or use another name";
        return Err(Error::usage(format!("--keep {}: {problem}", keep.shown())).into());
    }
    let sides = [("good", &*flags.good), ("bad", &*flags.bad)];
    if let Some((name, _)) = sides.iter().find(|side| side.1.contains("--checkpoint-dir")) {
        let problem =
            "remove --checkpoint-dir, because it runs twice, and must do the same each time";
        return Err(usage(name, problem));
    }
    let folder = create_folder(flags.keep.as_deref())?;
    let differ = by_records(sides, program, folder.path(), printer)?;
    if flags.keep.is_some() {
        folder.keep()?;
    }
    if differ { Err(anyhow::Error::msg(AlreadyReported)) } else { Ok(()) }
}

/// Creates the folder for the files of the runs: `keep`, which is removed if they fail, so that the next try creates it
/// again.
fn create_folder(keep: Option<&Path>) -> anyhow::Result<TemporaryFolder> {
    let Some(keep) = keep else {
        return TemporaryFolder::new().context("creating a folder for the runs");
    };
    TemporaryFolder::created_by(|| {
        let folder = path::absolute(keep)?; // the commands may run in other folders
        Place::create_folder(&folder)?;
        Ok(folder)
    })
    .with_context(|| format!("creating {}", keep.shown()))
}

/// Records both runs, and runs up to the first step that differs once more. `sides` are the names and the commands. Returns
/// whether they differ.
fn by_records(
    sides: [(&str, &str); 2],
    program: &str,
    folder: &Path,
    printer: &Printer,
) -> anyhow::Result<bool> {
    let file = |name: &str, ending: &str| folder.join(format!("{name}.{ending}"));
    for (name, command) in sides {
        let record = file(name, "record");
        let flag = format!("--record={} --record-whole", path_in_shell(&record));
        let said = run(name, &format!("{command} {flag}"), printer)?;
        if !record.exists() && !file(name, "0.record").exists() {
            return Err(usage(
                name,
                &format!(
                    "it has written no record; name a command of {program} that trains ({said})"
                ),
            ));
        }
    }
    let [good, bad] = sides.map(|(name, _)| file(name, "record"));
    let refused = |refused: Refused| Error::data(refused.to_string());
    let found = compare_records(&good, &bad).map_err(refused)?;
    printer.line(&found.lines.join("\n"))?;
    let Some(StepOfRank { step, rank }) = found.first else { return Ok(false) };
    for (name, command) in sides {
        let kept = file(name, "safetensors");
        let file = path_in_shell(&kept);
        let keep = format!("--keep={file} --keep-step={step} --keep-rank={rank}");
        // The command may have an end of its own.
        let has_end = command.contains("--max-steps");
        let end = if has_end { String::new() } else { format!(" --max-steps={}", step + 1) };
        let said = run(name, &format!("{command}{end} {keep}"), printer)?;
        if !kept.is_file() {
            printer.line(&format!("{name}: rank {rank} has no tensors of step {step} ({said})"))?;
            return Ok(true);
        }
    }
    let [good, bad] = sides.map(|(name, _)| file(name, "safetensors"));
    let (lines, is_equal) = compare_tensors(&good, &bad, ["good", "bad"]).map_err(refused)?;
    printer.line(&lines.join("\n"))?;
    if is_equal {
        let problem =
            "No tensor of that step differs in these runs: the difference is not reproducible.";
        printer.line(problem)?;
    }
    Ok(true)
}

fn usage(name: &str, problem: &str) -> anyhow::Error {
    Error::usage(format!("--{name}: {problem}")).into()
}

/// Runs `command` in the shell, without showing its output. Exit code 1 is right, too: a run whose replicas differ at the
/// end has it. Returns the last line on stderr.
fn run(name: &str, command: &str, printer: &Printer) -> anyhow::Result<String> {
    printer.info(&format!("{name}: {command}"));
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdout(Stdio::null());
    let ended = TiedChild::spawn(&mut shell).and_then(TiedChild::wait).context("starting sh")?;
    let problem = ended.stderr;
    // Mistakes in flags have their text first, and how to get help last.
    let mistake = problem.lines().find(|line| line.starts_with("error: "));
    let last = mistake.or(problem.lines().last()).unwrap_or("it printed nothing on stderr");
    if matches!(ended.status.code(), Some(0 | 1)) {
        return Ok(last.into());
    }
    Err(usage(name, &format!("it failed ({}): {last}", ended.status)))
}
