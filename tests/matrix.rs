//! `--inject-fault` on ranks that are processes: every kind at every stage names the rank, once, and leaves nobody behind.
//!
//! `make test-launchers` does the same under torchrun, and `failures` on threads.

use serde_json::Value;

use crate::shared::faults;

fn everywhere(kind: &str, kept: usize, check: impl Fn(&str, &Value, &str) + Sync) {
    // A stall alone is found by waiting.
    let timeout = if kind == "stall" { "--timeout=15s" } else { "--timeout=50s" };
    let more = ["--spawn=processes", "--grace-period=1s", timeout];
    faults::everywhere(kind, kept, &more, |fault, failure, stderr| {
        check(&format!("{fault}: {stderr}"), failure, stderr);
    });
}

#[test]
fn error_or_panic_at_any_stage_names_its_rank() {
    for (kind, kept, start) in [
        ("error", 2, "injected by --inject-fault error"),
        ("panic", 1, "panicked at crates/engine/src/"),
    ] {
        everywhere(kind, kept, |what, failure, stderr| {
            assert!(failure["error"].as_str().unwrap().starts_with(start), "{what}");
            assert_eq!(stderr.matches("injected by --inject-fault").count(), 1, "{what}");
        });
    }
}

#[test]
fn kill_at_any_stage_names_its_rank() {
    everywhere("kill", 3, |what, failure, _| {
        let told = format!("rank {} (process ", failure["rank"]);
        let error = failure["error"].as_str().unwrap();
        assert!(error.starts_with(&told) && error.contains(" was killed by SIGKILL"), "{what}");
    });
}

/// Long: it waits for time-outs.
#[test]
fn stall_at_any_stage_names_its_rank() {
    everywhere("stall", 3, |what, failure, _| {
        assert!(failure["error"].as_str().unwrap().contains(" waited 15s in "), "{what}");
    });
}
