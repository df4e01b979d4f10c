//! The process of a check: it is started, watched, and killed if a part takes too long.

use std::io::{self, BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use super::check::{Check, Message, Part};
use crate::error::{Error, Result};
use crate::launch::{how_ended, this_program};
use crate::os::{self, limits::not_started};
use crate::runtime::Deadline;
use crate::telemetry::Printer;

/// The variable with the check that a process is to make.
const CHECK: &str = "DDP_MP_CHECK";

/// How long a process that was killed may take to end. One that waits in the driver does not.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// What came of a check.
#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    /// The check has ended, with this as its last message.
    Ended(Message),
    /// This part has taken longer than its limit.
    Hangs { part: Part, is_killed: bool },
    /// The process has ended in this part, as the text says.
    Dies(Part, String),
}

/// Returns the check that this process is to make. `None` if it is no process of a check.
pub(super) fn asked_for() -> Option<Check> {
    serde_json::from_str(&std::env::var(CHECK).ok()?).ok()
}

/// Makes `check` in a process of its own, with the variable `switch` set to 1. Prints what its libraries write.
///
/// # Errors
/// [`Error::Input`] when no process or thread can be started.
pub(super) fn run(check: Check, switch: Option<&str>, printer: &Printer) -> Result<Outcome> {
    let watched = this_program().and_then(|mut command| {
        command.args(std::env::args_os().skip(1));
        command.env(CHECK, serde_json::to_string(&check)?);
        command.envs(switch.map(|switch| (switch, "1")));
        watch(command, Part::limit, printer)
    });
    watched.map_err(|error| Error::unsupported(not_started("a process for a check", &error)))
}

/// Starts `command` and reads its messages, until the last one or until a part has taken longer than its `limit`.
fn watch(
    mut command: Command,
    limit: impl Fn(Part) -> Duration,
    printer: &Printer,
) -> io::Result<Outcome> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    os::tie_to_this_process(&mut command, &[]);
    let mut child = command.spawn()?;
    let (lines_tx, lines_rx) = unbounded();
    let (stdout, process) = (child.stdout.take(), child.id());
    let read = move || read(stdout, process, &lines_tx);
    if let Err(error) = thread::Builder::new().name("check".into()).spawn(read) {
        let _ = child.kill();
        return Err(error);
    }
    let mut part = Part::Load;
    let mut end = Deadline::after(limit(part));
    loop {
        match end.recv(&lines_rx) {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(Message::Begins(next)) => {
                    part = next;
                    end = Deadline::after(limit(part));
                }
                Ok(last) => {
                    kill(&mut child, &lines_rx);
                    return Ok(Outcome::Ended(last));
                }
                // Of NCCL, with NCCL_DEBUG. It may come without an end.
                Err(_) if !end.is_over() => {
                    if !line.is_empty() {
                        printer.info(&line);
                    }
                }
                Err(_) => return Ok(hangs(&mut child, &lines_rx, part)),
            },
            Err(RecvTimeoutError::Timeout) => return Ok(hangs(&mut child, &lines_rx, part)),
            Err(RecvTimeoutError::Disconnected) => {
                let text = kill(&mut child, &lines_rx).map(how_ended);
                return Ok(Outcome::Dies(part, text.unwrap_or_default()));
            }
        }
    }
}

/// Kills a process that is late.
fn hangs(child: &mut Child, lines: &Receiver<String>, part: Part) -> Outcome {
    Outcome::Hangs { part, is_killed: kill(child, lines).is_some() }
}

/// Sends the lines of a process, and drops the sender once it has ended.
fn read(stdout: Option<ChildStdout>, process: u32, lines: &Sender<String>) {
    for line in stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).split(b'\n')) {
        let Ok(line) = line else { break };
        // Nobody receives them any more if the process was killed and did not end.
        let _ = lines.send(String::from_utf8_lossy(&line).into_owned());
    }
    os::wait_for_end(process);
}

/// Kills a process if it has not ended, and returns how it ended. `None` if it does not end.
fn kill(child: &mut Child, lines: &Receiver<String>) -> Option<ExitStatus> {
    let _ = child.kill(); // fails only if it has ended
    let end = Deadline::after(KILL_TIMEOUT);
    loop {
        match end.recv(lines) {
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => return child.wait().ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::LogFormat;

    /// Watches a shell that runs `script`, where loading may take a minute and all else a second.
    fn outcome_of(script: &str) -> Outcome {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let limit = |part| Duration::from_secs(if part == Part::Load { 60 } else { 1 });
        watch(command, limit, &Printer::new(LogFormat::Text).quiet(true)).unwrap()
    }

    #[test]
    fn limit_is_that_of_the_part_that_began_last() {
        let begins = r#"sleep 2; echo '{"begins":"work"}';"#;
        let ends = r#"echo 'NCCL INFO'; echo '{"wrong":[1,2]}'; exec sleep 1000"#;
        let part = Part::Work;
        for (script, expected) in [
            (ends.to_owned(), Outcome::Ended(Message::Wrong(1, 2))),
            (format!("{begins} {ends}"), Outcome::Ended(Message::Wrong(1, 2))),
            (format!("{begins} exec sleep 1000"), Outcome::Hangs { part, is_killed: true }),
            (format!("{begins} exec yes"), Outcome::Hangs { part, is_killed: true }),
            (format!("printf 'half a line'; echo; {ends}"), Outcome::Ended(Message::Wrong(1, 2))),
            (format!("{begins} kill -11 $$"), Outcome::Dies(part, "was killed by SIGSEGV".into())),
            ("exit 3".into(), Outcome::Dies(Part::Load, "ended with exit code 3".into())),
        ] {
            assert_eq!(outcome_of(&script), expected, "{script}");
        }
    }
}
