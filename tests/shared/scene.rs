//! A scene that several processes play: each is the test binary once more, started with a variable that says its part.

use std::env;
use std::process::{Command, Stdio};

use ddp_mp::launch::{LaunchOptions, Nproc};

use crate::harness::shared_memory;

const SCENE: &str = "DDP_MP_SCENE";

/// Returns the command that starts this test binary as number `process` of those that play the scene `name`, with so many
/// `ranks` each. They meet at `port`. The test `child` plays it, with [`mine`].
pub(crate) fn process(
    child: &str,
    name: &str,
    process: usize,
    ranks: &[usize],
    port: u16,
) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([child, "--exact", "--nocapture"]);
    let part = format!("{name} {process} {} {} 127.0.0.1 {port}", ranks.len(), ranks[process]);
    command.env(SCENE, part).stdout(Stdio::piped()).stderr(Stdio::piped());
    // As the program does it for itself: on a busy machine a spinning thread keeps the one that it waits for from running.
    command.env("GOMP_SPINCOUNT", "10000");
    command
}

/// Returns the name of the scene that this process plays, and how it is launched; `None` if no test has started it.
pub(crate) fn mine() -> Option<(String, LaunchOptions)> {
    let part = env::var(SCENE).ok()?;
    let words: Vec<&str> = part.split(' ').collect();
    let number = |place: usize| words[place].parse::<usize>().unwrap();
    let options = LaunchOptions {
        nnodes: Some(number(2)),
        node_rank: (number(2) > 1).then_some(number(1)),
        master_addr: Some(words[4].into()),
        master_port: Some(number(5) as u16),
        nproc: Nproc::Count(number(3)),
        shared_memory: shared_memory(),
        ..LaunchOptions::default()
    };
    Some((words[0].into(), options))
}
