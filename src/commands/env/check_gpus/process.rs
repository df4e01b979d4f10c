//! The process of a check: it is started, watched, and killed if a part takes too long.

use std::io::{self, BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crossbeam::channel::{RecvTimeoutError, unbounded};

use super::check::{Check, Found, LOAD, Message, Verdict};
use engine::error::{Error, Result};
use engine::launch::{how_ended, this_program};
use engine::os::{self, limits::not_started};
use engine::runtime::Deadline;
use views::Printer;

/// The variable with the check that a process is to make.
const CHECK: &str = "DDP_MP_CHECK";

/// How long a process that was killed may take to end. One that waits in the driver does not.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// What to say of a process that was killed and has not ended.
const STUCK: &str = ", and its process waits in the driver and cannot be killed";

/// Returns the check that this process is to make. `None` if it is no process of a check.
pub(super) fn asked_for() -> Option<Check> {
    serde_json::from_str(&std::env::var(CHECK).ok()?).ok()
}

/// Makes `check` in a process of its own, with the variable `switch` set to 1. Prints what its libraries write.
///
/// # Errors
/// [`Error::Input`] when no process or thread can be started.
pub(super) fn run(check: Check, switch: Option<&str>, printer: &Printer) -> Result<Found> {
    let watched = this_program().and_then(|mut command| {
        command.args(std::env::args_os().skip(1));
        command.env(CHECK, serde_json::to_string(&check)?);
        command.envs(switch.map(|switch| (switch, "1")));
        watch(command, printer)
    });
    watched.map_err(|error| Error::unsupported(not_started("a process for a check", &error)))
}

/// Starts `command` and reads its messages, until the last one or until a part has taken too long. Then kills the process.
fn watch(mut command: Command, printer: &Printer) -> io::Result<Found> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    os::tie_to_this_process(&mut command, &[]);
    let mut child = command.spawn()?;
    let (lines_tx, lines) = unbounded();
    let (stdout, process) = (child.stdout.take(), child.id());
    let read = move || {
        for line in stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).split(b'\n')) {
            let Ok(line) = line else { break };
            // Nobody receives them any more if the process was killed and did not end.
            let _ = lines_tx.send(String::from_utf8_lossy(&line).into_owned());
        }
        os::wait_for_end(process); // the channel is closed once it has ended
    };
    if let Err(error) = thread::Builder::new().name("check".into()).spawn(read) {
        let _ = child.kill();
        return Err(error);
    }
    let mut part = (LOAD.0.to_owned(), LOAD.1);
    let mut end = Deadline::after(Duration::from_secs(part.1));
    let last = loop {
        let message = end.recv(&lines).map(|line| (serde_json::from_str(&line), line));
        match message {
            Ok((Ok(Message::Begins(what, seconds)), _)) => {
                part = (what, seconds);
                end = Deadline::after(Duration::from_secs(seconds));
            }
            Ok((Ok(Message::Ends(found)), _)) => break Ok(found),
            // Of NCCL, with NCCL_DEBUG. It may come without an end.
            Ok((Err(_), _)) if end.is_over() => break Err(RecvTimeoutError::Timeout),
            Ok((Err(_), line)) if !line.is_empty() => printer.info(&line),
            Ok(_) => {}
            Err(error) => break Err(error),
        }
    };
    let _ = child.kill(); // fails only if it has ended
    let end = Deadline::after(KILL_TIMEOUT);
    while end.recv(&lines).is_ok() {}
    let how = child.try_wait().ok().flatten().map(how_ended);
    let (what, seconds) = part;
    Ok(match (last, how) {
        (Ok(found), _) => found,
        (Err(RecvTimeoutError::Disconnected), how) => Found::problem(
            Verdict::Dies,
            format!("dies{what}: its process {}", how.unwrap_or_default()),
        ),
        (Err(RecvTimeoutError::Timeout), how) => {
            let stuck = if how.is_none() { STUCK } else { "" };
            Found::problem(Verdict::Hangs, format!("hangs{what} ({seconds} s){stuck}"))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use views::LogFormat;

    /// Watches a shell that runs `script`, where loading may take a minute.
    fn found_by(script: &str) -> Found {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        watch(command, &Printer::new(LogFormat::Text).quiet(true)).unwrap()
    }

    #[test]
    fn limit_is_that_of_the_part_that_began_last() {
        let begins = |limit: u64| format!(r#"echo '{{"begins":[" at work",{limit}]}}';"#);
        let [begins_long, begins_short] = [60, 1].map(begins);
        let ends = r#"echo 'NCCL INFO'; echo '{"ends":{"result":"wrong","problem":"is wrong"}}'; exec sleep 1000"#;
        for (script, result, problem) in [
            (ends.to_owned(), Verdict::Wrong, "is wrong"),
            (format!("{begins_long} {ends}"), Verdict::Wrong, "is wrong"),
            (format!("{begins_short} exec sleep 1000"), Verdict::Hangs, "hangs at work (1 s)"),
            (format!("{begins_short} exec yes"), Verdict::Hangs, "hangs at work (1 s)"),
            (format!("printf 'half a line'; echo; {ends}"), Verdict::Wrong, "is wrong"),
            (
                format!("{begins_long} kill -11 $$"),
                Verdict::Dies,
                "dies at work: its process was killed by SIGSEGV",
            ),
            (
                "exit 3".into(),
                Verdict::Dies,
                "dies while loading CUDA: its process ended with exit code 3",
            ),
        ] {
            assert_eq!(found_by(&script), Found::problem(result, problem.into()), "{script}");
        }
    }
}
