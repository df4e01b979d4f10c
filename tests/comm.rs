//! `ddp-mp comm`, against arithmetic on whole numbers.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::harness::{in_parallel, run, run_refused, run_to, runs_every_case, some_of, words};

/// The operations, in the order in which they are shown.
fn ops() -> Vec<&'static str> {
    words(
        "send_recv isend_irecv broadcast scatter gather all_gather reduce all_reduce \
         reduce_scatter all_to_all barrier",
    )
}

/// The lines of `ddp-mp comm` with these flags.
fn lines(flags: &str) -> Vec<String> {
    let args: Vec<&str> = ["comm"].into_iter().chain(flags.split_whitespace()).collect();
    let (stdout, stderr) = run_to(0, &args);
    assert!(stderr.starts_with("ddp-mp: no GPU is visible: "), "{flags}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{flags}: {stderr}");
    stdout.lines().map(String::from).collect()
}

fn objects(flags: &str) -> Vec<Value> {
    let lines = lines(&format!("{flags} --log-format=json"));
    lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What rank `rank` has at the indices of part `part`.
fn part(rank: usize, part: usize, numel: usize) -> Vec<usize> {
    (part * numel..(part + 1) * numel).map(|i| (rank + 1) * (i + 1)).collect()
}

/// What `rank` has before and after, and how many elements it sends and receives; `None` where that is up to
/// how a reduction is shared out.
fn expected(
    op: &str,
    rank: usize,
    world_size: usize,
    numel: usize,
) -> (Value, Value, Option<[usize; 2]>) {
    let (others, is_root, is_last) = (world_size - 1, rank == 0, rank + 1 == world_size);
    let before_me = (rank + world_size - 1) % world_size;
    let mine = || json!(part(rank, 0, numel));
    let all = |of: &dyn Fn(usize) -> Vec<usize>| json!((0..world_size).map(of).collect::<Vec<_>>());
    let parts = |rank| all(&|p| part(rank, p, numel));
    let sum = |p| {
        let sum = |i| (0..world_size).map(|rank| part(rank, p, numel)[i]).sum();
        json!((0..numel).map(sum).collect::<Vec<usize>>())
    };
    let if_root = |value: Value| if is_root { value } else { Value::Null };
    let n = |count: usize| count * numel;
    let is = usize::from;
    match op {
        "send_recv" => {
            let after = if is_root { Value::Null } else { json!(part(before_me, 0, numel)) };
            (mine(), after, Some([n(is(!is_last)), n(is(!is_root))]))
        }
        "isend_irecv" if world_size == 1 => (mine(), Value::Null, Some([0, 0])),
        "isend_irecv" => (mine(), json!(part(before_me, 0, numel)), Some([n(1), n(1)])),
        "broadcast" => {
            let bytes = if is_root { [n(others), 0] } else { [0, n(1)] };
            (mine(), json!(part(0, 0, numel)), Some(bytes))
        }
        "scatter" => {
            let bytes = if is_root { [n(others), 0] } else { [0, n(1)] };
            (if_root(parts(0)), json!(part(0, rank, numel)), Some(bytes))
        }
        "gather" => {
            let bytes = if is_root { [0, n(others)] } else { [n(1), 0] };
            (mine(), if_root(all(&|r| part(r, 0, numel))), Some(bytes))
        }
        "all_gather" => (mine(), all(&|r| part(r, 0, numel)), Some([n(others), n(others)])),
        "reduce" => (mine(), if is_root { sum(0) } else { mine() }, None),
        "all_reduce" => (mine(), sum(0), None),
        "reduce_scatter" => (parts(rank), sum(rank), Some([n(others), n(others)])),
        "all_to_all" => (parts(rank), all(&|r| part(r, rank, numel)), Some([n(others), n(others)])),
        "barrier" => (Value::Null, json!((0..world_size).collect::<Vec<_>>()), Some([0, 0])),
        other => panic!("{other}"),
    }
}

#[test]
fn every_operation_shows_the_right_values_on_every_rank() {
    let ops = ops();
    // The numbers of elements on both sides of `few` below are among them.
    let sizes = [(1, 2), (2, 3), (3, 64), (3, 65), (3, 100), (4, 1), (5, 51), (5, 52), (2, 0)];
    for (world_size, numel) in sizes {
        let flags = format!("--nproc-per-node={world_size} --numel={numel} --dtype=int64");
        let objects = objects(&flags);
        assert_eq!(objects.len(), ops.len() * world_size);
        for (i, object) in objects.iter().enumerate() {
            let (op, rank) = (ops[i / world_size], i % world_size);
            let what = format!("{op}, rank {rank} of {world_size}, {numel} elements");
            let (before, after, elements) = expected(op, rank, world_size, numel);
            assert_eq!((&object["op"], &object["rank"]), (&json!(op), &json!(rank)));
            assert_eq!(object["before"], before, "before {what}");
            assert_eq!(object["after"], after, "after {what}");
            if let Some([sent, received]) = elements {
                let bytes = json!([8 * sent, 8 * received]);
                assert_eq!(json!([object["sent"], object["received"]]), bytes, "{what}");
            }
        }
        // What one sends another receives. Every element goes to the rank that reduces it, and from there to
        // all or to rank 0, which reduces the first 64 itself. Few elements of an all_reduce go to all ranks, which
        // reduce them for themselves.
        let others = world_size - 1;
        let few = 8 * numel <= usize::min(512, 2048 / world_size);
        let results = [
            ("reduce", numel * others + numel.saturating_sub(64)),
            ("all_reduce", numel * others * if few { world_size } else { 2 }),
        ];
        for (op, elements) in results {
            let total = |field: &str| {
                let of_op = objects.iter().filter(|object| object["op"] == op);
                of_op.map(|object| object[field].as_u64().unwrap() as usize).sum::<usize>()
            };
            let bytes = 8 * elements;
            assert_eq!([total("sent"), total("received")], [bytes; 2], "{op}, {flags}");
        }
    }
}

#[test]
fn processes_show_what_threads_show() {
    for flags in ["--nproc-per-node=3 --numel=3", "--nproc-per-node=2 --numel=1000 --dtype=float64"]
    {
        let threads = objects(flags);
        assert_eq!(objects(&format!("{flags} --spawn=processes --shared-memory=require")), threads);
        let over_tcp = objects(&format!("{flags} --spawn=processes --shared-memory=off"));
        for (tcp, threads) in over_tcp.iter().zip(&threads) {
            let keys = ["op", "rank", "before", "after"];
            assert_eq!(keys.map(|key| &tcp[key]), keys.map(|key| &threads[key]));
        }
        assert_eq!(over_tcp.len(), threads.len());
    }
}

#[test]
fn json_lines_have_the_documented_fields() {
    let lines = lines("gather --nproc-per-node=2 --numel=2 --log-format=json");
    let expected = [
        r#"{"op":"gather","rank":0,"before":[1.0,2.0],"after":[[1.0,2.0],[2.0,4.0]],"sent":0,"received":8}"#,
        r#"{"op":"gather","rank":1,"before":[2.0,4.0],"after":null,"sent":8,"received":0}"#,
    ];
    assert_eq!(lines, expected);
}

#[test]
fn every_dtype_and_reduce_op_is_right_or_refused() {
    let floats = ["float64", "float32", "float16", "bfloat16"];
    let integers = ["int64", "int32", "int16", "int8", "uint8"];
    let ops = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"];
    let kinds = floats.into_iter().chain(integers).chain(["bool"]);
    let all: Vec<(&str, &str)> = kinds.flat_map(|kind| ops.map(|op| (kind, op))).collect();
    let refused = AtomicUsize::new(0);
    in_parallel(&some_of(all, 12), |&(kind, op)| {
        let flags =
            format!("all_reduce --nproc-per-node=3 --numel=4 --dtype={kind} --reduce-op={op}");
        let is_bitwise = ["band", "bor", "bxor"].contains(&op);
        let is_possible = match kind {
            "bool" => is_bitwise || ["min", "max"].contains(&op),
            _ if floats.contains(&kind) => !is_bitwise,
            _ => op != "avg",
        };
        if !is_possible {
            let args: Vec<&str> = ["comm"].into_iter().chain(flags.split(' ')).collect();
            let (code, stdout, stderr) = run(&args);
            let reason = format!(
                "ddp-mp: --reduce-op {op} --dtype {kind}: all_reduce({op}) does not take {kind} tensors: "
            );
            assert_eq!((code, stdout.as_str()), (Some(2), ""), "{flags}");
            assert!(stderr.starts_with(&reason), "{stderr}");
            assert_eq!(stderr.lines().count(), 1, "{stderr}");
            refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let reduced = |i: i64| {
            let [a, b, c] = [1, 2, 3].map(|rank| rank * (i + 1));
            match op {
                "sum" => a + b + c,
                "avg" => (a + b + c) / 3, // whole, for these
                "product" => a * b * c,
                "min" => a,
                "max" => c,
                "band" => a & b & c,
                "bor" => a | b | c,
                _ => a ^ b ^ c,
            }
        };
        let shown = |value: i64| match kind {
            "bool" => json!(true),
            "int8" => json!(value as i8),
            "uint8" => json!(value as u8),
            _ if floats.contains(&kind) => json!(value as f64),
            _ => json!(value),
        };
        let expected: Vec<Value> = (0..4).map(|i| shown(reduced(i))).collect();
        for (rank, object) in objects(&flags).iter().enumerate() {
            let before: Vec<Value> = (1..=4).map(|i| shown((rank as i64 + 1) * i)).collect();
            assert_eq!(object["before"], json!(before), "{flags}");
            assert_eq!(object["after"], json!(expected), "{flags}");
        }
    });
    let refused = refused.into_inner();
    assert!(refused == 4 * 3 + 5 + 3 || !runs_every_case(), "{refused}");
}

#[test]
fn unsupported_reduce_op_is_refused_before_any_output() {
    // The walk comes to a reduction late.
    run_refused(&["comm", "--reduce-op=bor", "--nproc-per-node=2"]);
    let (code, _, stderr) = run(&["comm", "broadcast", "--reduce-op=bor", "--nproc-per-node=2"]);
    let problem = "--reduce-op bor: broadcast does not reduce elements; remove it";
    assert!(code == Some(2) && stderr.contains(problem), "{stderr}");
}

#[test]
fn text_fits_80_columns_and_is_the_same_in_every_run() {
    for flags in some_of(
        [
            "--nproc-per-node=1",
            "--nproc-per-node=4",
            "--nproc-per-node=8",
            "--nproc-per-node=9 --numel=5",
            "--nproc-per-node=30 --numel=3 --reduce-op=avg",
            "--nproc-per-node=4 --numel=100000 --dtype=int64",
            "--nproc-per-node=8 --numel=1000 --reduce-op=product --dtype=float64",
            "--nproc-per-node=5 --numel=40 --reduce-op=bxor --dtype=bool",
            "--nproc-per-node=2 --numel=0",
        ],
        3,
    ) {
        let lines = lines(flags);
        for line in &lines {
            assert!(line.len() <= 80, "{flags}: {line}");
            assert!(line.is_ascii() && line.trim_end() == line, "{flags}: {line:?}");
        }
        let titles: Vec<&str> =
            lines.iter().map(String::as_str).filter(|line| ops().contains(line)).collect();
        assert_eq!(titles, ops(), "{flags}");
        assert_eq!(lines, self::lines(flags));
    }
}
