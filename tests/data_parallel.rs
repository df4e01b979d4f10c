//! The old way, to compare: DDP's results, and all that goes through rank 0.

use std::sync::Mutex;

use crate::harness::{in_parallel, last_event, refused, run, run_end, some_of};

#[test]
fn data_parallel_has_the_bits_of_ddp() {
    // Last batches that are smaller, and last steps that are made of fewer batches.
    let lists = [
        "--num-samples=101 --max-epochs=2",
        "--num-samples=133 --max-epochs=3 --model=mlp --optimizer=adamw --schedule=cosine",
        "--num-samples=110 --max-epochs=2 --model=mlp --momentum=0.9 --weight-decay=0.1 \
             --max-grad-norm=0.1 --grad-accum-steps=3 --drop-last --no-shuffle",
        "--num-samples=300 --max-epochs=2 --model=cnn --in-features=64 --channels=4,5 --grad-accum-steps=2 \
             --loss=cross-entropy --out-features=3 --optimizer=adamw --max-grad-norm=0.5",
    ];
    let all = ["1", "2", "3", "4"].iter().flat_map(|ranks| lists.map(|flags| (*ranks, flags)));
    let cases = some_of(all, 3);
    let count = cases.len();
    let hashes = Mutex::new(Vec::new());
    in_parallel(&cases, |&(ranks, flags)| {
        let common = ["--nproc-per-node", ranks, "--batch-size=7", "--lr=0.01"];
        let flags: Vec<&str> = common.into_iter().chain(flags.split_whitespace()).collect();
        let [ddp, dp] = ["--strategy=ddp", "--strategy=dp"]
            .map(|strategy| run_end(&[&flags[..], &[strategy]].concat()));
        for key in ["parameters_hash", "steps", "loss"] {
            assert_eq!(dp[key], ddp[key], "{key}, {flags:?}");
        }
        hashes.lock().unwrap().push(dp["parameters_hash"].to_string());
    });
    let mut hashes = hashes.into_inner().unwrap();
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), count, "other flags give other bits");
}

#[test]
fn end_event_has_the_bytes_of_each_rank() {
    let moved = |strategy: &str| {
        let flags = ["--nproc-per-node=4", "--model=mlp", "--max-epochs=4", strategy];
        let end = run_end(&flags);
        let bytes = |key: &str| -> Vec<u64> {
            end[key].as_array().unwrap().iter().map(|bytes| bytes.as_u64().unwrap()).collect()
        };
        (bytes("bytes_sent_by_rank"), bytes("bytes_received_by_rank"))
    };
    let (sent, received) = moved("--strategy=dp");
    assert_eq!((sent.len(), received.len()), (4, 4));
    assert_eq!(
        sent.iter().sum::<u64>(),
        received.iter().sum::<u64>(),
        "whatever is sent is received"
    );
    for rank in 1..4 {
        // Three times as much; and the batches, which go one way.
        assert!(sent[0] > 3 * sent[rank] && received[0] > received[rank], "{sent:?} {received:?}");
    }
    let (sent, received) = moved("--strategy=ddp");
    let (least, most) = (sent.iter().min().unwrap(), received.iter().max().unwrap());
    assert!((*most as f64) < 1.1 * *least as f64, "{sent:?} {received:?}");
}

/// Long: it waits for a time-out.
#[test]
fn failing_rank_ends_the_run() {
    let all = (0..3).flat_map(|rank| ["error", "panic", "stall"].map(|kind| (rank, kind)));
    in_parallel(&some_of(all, 5), |&(rank, kind)| {
        let fault = format!("--inject-fault={kind}:rank={rank},at=step,step=3");
        let flags = ["--strategy=dp", "--nproc-per-node=3", "--log-format=json", &fault];
        // Only a stall is found by waiting.
        let (timeout, grace) = if kind == "stall" { ("8s", "500ms") } else { ("1h", "1h") };
        let times = [format!("--timeout={timeout}"), format!("--grace-period={grace}")];
        let (code, stdout, stderr) = run(&[&flags[..], &[&times[0], &times[1]]].concat());
        assert_eq!(code, Some(1), "{fault}: {stderr}");
        let failure = last_event(&stdout);
        assert_eq!(failure["event"], "failure", "{fault}");
        assert_eq!((&failure["rank"], &failure["operation"]), (&rank.into(), &"step".into()));
        assert_eq!(failure["sequence"], 3, "{fault}");
    });
}

#[test]
fn ddp_options_are_refused() {
    for (flags, needs) in [
        ("--bucket-cap-mb=1", "needs --strategy ddp; remove it, or use that strategy"),
        ("--no-overlap", "needs --strategy ddp; remove it, or use that strategy"),
        ("--comm-hook=fp16", "needs --strategy ddp; remove it, or use that strategy"),
        ("--no-broadcast-buffers", "needs --strategy ddp; remove it, or use that strategy"),
        ("--sync-batch-norm", "needs --strategy ddp; remove it, or use that strategy"),
        ("--amp=fp16", "fp16 needs --strategy ddp"),
    ] {
        let said = refused(&format!("--strategy=dp --model=cnn --in-features=64 {flags}"));
        let told = format!("{}: {needs}", flags.split('=').next().unwrap());
        assert!(said.starts_with(&told) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn one_rank_prints_no_note_about_rank_0() {
    let (code, _, stderr) = run(&["--strategy=dp", "--nproc-per-node=1"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!stderr.contains("through rank 0"), "{stderr}");
}
