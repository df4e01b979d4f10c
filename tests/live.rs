//! `--live` without a terminal. tests/interop/live.py drives it in one.

use crate::harness::{run, run_to};

#[test]
fn live_without_a_terminal_is_a_note() {
    let args = ["--nproc-per-node=2", "--max-epochs=2"];
    let (_, plain, _) = run(&args);
    for spawn in ["--spawn=threads", "--spawn=processes"] {
        let (stdout, stderr) = run_to(0, &[&args[..], &["--live", spawn]].concat());
        let sorted = |text: &str| {
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(&stdout), sorted(&plain));
        let notes = stderr.matches("--live: stderr is not a terminal, so there is no live view");
        assert_eq!(notes.count(), 1, "{stderr}");
    }
}
