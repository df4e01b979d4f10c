//! `ddp-mp comm`, against arithmetic on whole numbers.

use serde_json::{Value, json};

use crate::harness::{run, run_refused, run_to, some_of, words};

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
    let sizes = [(1, 2), (2, 3), (3, 64), (3, 100), (3, 65), (4, 1), (5, 52), (5, 51), (2, 0)];
    for (world_size, numel) in some_of(sizes, 5) {
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
fn json_lines_have_the_documented_fields() {
    let lines = lines("gather --nproc-per-node=2 --numel=2 --log-format=json");
    let expected = [
        r#"{"op":"gather","rank":0,"before":[1.0,2.0],"after":[[1.0,2.0],[2.0,4.0]],"sent":0,"received":8}"#,
        r#"{"op":"gather","rank":1,"before":[2.0,4.0],"after":null,"sent":8,"received":0}"#,
    ];
    assert_eq!(lines, expected);
}

#[test]
fn unsupported_reduce_op_is_refused_before_any_output() {
    // The walk comes to a reduction late.
    run_refused(&["comm", "--reduce-op=bor", "--nproc-per-node=2"]);
    let (code, _, stderr) = run(&["comm", "broadcast", "--reduce-op=bor", "--nproc-per-node=2"]);
    let problem = "--reduce-op bor: broadcast does not reduce elements; remove it";
    assert!(code == Some(2) && stderr.contains(problem), "{stderr}");
}
