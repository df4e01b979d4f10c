//! `--trace`: what it shows is what has happened, in the format that Perfetto and chrome://tracing read.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use ddp_mp::{Backend, ReduceOp, Spawn, views};
use serde_json::Value;
use tch::Tensor;
use tempfile::TempDir;

use crate::harness::{TIMEOUT, run_to, words};

/// A slice, as a viewer sees it.
#[derive(Debug, Clone)]
struct Slice {
    name: String,
    category: String,
    lane: (u64, u64),
    from: f64,
    to: f64,
    args: Value,
}

impl Slice {
    fn holds(&self, time: f64) -> bool {
        // Times are of nanoseconds, in microseconds.
        self.from - 0.0005 <= time && time <= self.to + 0.0005
    }
}

/// What is in a trace that follows the format.
#[derive(Debug)]
struct Trace {
    slices: Vec<Slice>,
    /// The name of each arrow, and where it begins and ends.
    arrows: Vec<(String, Slice, Slice)>,
    /// The names of counters, with their values.
    counters: BTreeMap<String, Vec<f64>>,
    lanes: HashMap<(u64, u64), String>,
    other: Value,
}

impl Trace {
    fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap();
        let whole: Value = serde_json::from_str(&text).unwrap();
        let events = whole["traceEvents"].as_array().unwrap();
        let mut trace = Self {
            slices: Vec::new(),
            arrows: Vec::new(),
            counters: BTreeMap::new(),
            lanes: HashMap::new(),
            other: whole["otherData"].clone(),
        };
        let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
        let name = |event: &Value| event["name"].as_str().unwrap().to_owned();
        let lane = |event: &Value| (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        let mut ends: HashMap<u64, [Option<&Value>; 2]> = HashMap::new();
        for event in events {
            let from = number(event, "ts");
            assert!(from >= 0.0, "{event}");
            match event["ph"].as_str().unwrap() {
                "X" => trace.slices.push(Slice {
                    name: name(event),
                    category: event["cat"].as_str().unwrap().into(),
                    lane: lane(event),
                    from,
                    to: from + number(event, "dur"),
                    args: event["args"].clone(),
                }),
                "M" if name(event) == "thread_name" => {
                    let named = event["args"]["name"].as_str().unwrap();
                    assert!(trace.lanes.insert(lane(event), named.into()).is_none());
                }
                "M" => {}
                "C" => {
                    let args = event["args"].as_object().unwrap();
                    let value = args.values().next().unwrap().as_f64().unwrap();
                    trace.counters.entry(name(event)).or_default().push(value);
                }
                end @ ("s" | "f") => {
                    let arrow = ends.entry(event["id"].as_u64().unwrap()).or_default();
                    assert!(arrow[usize::from(end == "f")].replace(event).is_none(), "{event}");
                }
                other => panic!("{other}: {event}"),
            }
        }
        trace.slices.sort_by(|a, b| a.from.total_cmp(&b.from));
        trace.check_nesting();
        for [begin, end] in ends.into_values() {
            let (begin, end) = (begin.unwrap(), end.unwrap());
            assert_eq!((name(begin), &begin["cat"]), (name(end), &end["cat"]));
            assert_eq!(end["bp"], "e");
            assert!(number(begin, "ts") <= number(end, "ts"), "{begin} {end}");
            // A viewer takes the innermost slice.
            let around = |event: &Value| {
                let holds = |it: &&Slice| it.lane == lane(event) && it.holds(number(event, "ts"));
                let length = |it: &&Slice| it.to - it.from;
                let around = trace.slices.iter().filter(|it| it.category != "wait").filter(holds);
                around.min_by(|a, b| length(a).total_cmp(&length(b))).unwrap().clone()
            };
            trace.arrows.push((name(begin), around(begin), around(end)));
        }
        trace
    }

    /// Slices of a lane lie within each other or apart.
    fn check_nesting(&self) {
        let mut open: HashMap<(u64, u64), Vec<&Slice>> = HashMap::new();
        for slice in &self.slices {
            assert!(self.lanes.contains_key(&slice.lane), "{slice:?}");
            let open = open.entry(slice.lane).or_default();
            open.retain(|around| around.to > slice.from);
            if let Some(around) = open.last() {
                assert!(around.holds(slice.to), "{around:?} {slice:?}");
            }
            open.push(slice);
        }
    }

    fn named(&self, name: &str) -> impl Iterator<Item = &Slice> {
        self.slices.iter().filter(move |it| it.name == name)
    }

    fn of(&self, category: &str) -> impl Iterator<Item = &Slice> {
        self.slices.iter().filter(move |it| it.category == category)
    }
}

/// Runs the program with `--trace`, in the file `new/trace.json` of the folder that it returns with stderr.
fn traced(code: i32, line: &str) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/trace.json");
    let trace = ["--trace", path.to_str().unwrap()];
    let (_, stderr) = run_to(code, &[&words(line)[..], &trace].concat());
    (folder, stderr)
}

#[test]
fn trace_shows_every_step_of_every_rank() {
    let (folder, stderr) = traced(
        0,
        "--nproc-per-node=3 --num-samples=96 --batch-size=4 --model=mlp --hidden=64,64 \
        --bucket-cap-mb=0.01 --val-fraction=0.25",
    );
    assert!(stderr.contains("new/trace.json: open it in ui.perfetto.dev"), "{stderr}");
    let trace = Trace::read(&folder.path().join("new/trace.json"));
    let (ranks, steps, parameters) = (3, 6, 6);
    assert_eq!(trace.lanes.len(), ranks);
    assert!(trace.lanes.values().any(|it| it == "rank 2 (CPU:2)"));
    assert_eq!(trace.of("step").count(), ranks * steps);
    for phase in ["data", "forward", "backward", "optimizer"] {
        assert_eq!(trace.named(phase).count(), ranks * steps, "{phase}");
        let in_a_step = |it: &Slice| {
            let step = format!("step {}", it.args["step"]);
            trace.named(&step).any(|s| s.lane == it.lane && s.holds(it.from) && s.holds(it.to))
        };
        assert!(trace.named(phase).all(in_a_step), "{phase}");
    }
    assert_eq!(trace.named("validation").count(), ranks);
    assert_eq!(trace.of("gradient").count(), ranks * steps * parameters);
    // Each gradient goes to its bucket, and each bucket to the update.
    let buckets: Vec<&Slice> =
        trace.of("collective").filter(|it| it.name.contains("(bucket ")).collect();
    let number = buckets.len() / ranks / steps;
    assert!(number > 1 && buckets.len() == ranks * steps * number, "{}", buckets.len());
    let arrows = |name: &str| trace.arrows.iter().filter(|it| it.0 == name).collect::<Vec<_>>();
    let [gradients, updates] = ["gradient", "update"].map(arrows);
    assert_eq!(gradients.len(), ranks * steps * parameters);
    assert_eq!(updates.len(), buckets.len());
    for (_, from, to) in gradients {
        let bucket = from.name.split_once(' ').unwrap().1;
        assert_eq!(to.name, format!("all_reduce {bucket}"), "{from:?}");
        assert_eq!(to.args["step"], from.args["step"]);
    }
    for (_, from, to) in updates {
        assert!(from.name.starts_with("all_reduce (bucket "), "{from:?}");
        assert_eq!((&to.name[..], &to.args["step"]), ("optimizer", &from.args["step"]));
    }
    // Who comes last waits for nobody, and the others for this one.
    for wait in trace.of("wait") {
        let within = |it: &&Slice| it.lane == wait.lane && it.holds(wait.from) && it.holds(wait.to);
        let within = trace.of("collective").find(within).unwrap();
        let last = within.args["waited_for_rank"].as_u64().unwrap();
        assert_eq!(wait.name, format!("waiting for rank {last}"));
        let group = (&within.args["group"], &within.args["sequence"]);
        let its = trace.of("collective").find(|it| {
            it.lane.1 == 64 * last && (&it.args["group"], &it.args["sequence"]) == group
        });
        assert!((its.unwrap().from - wait.to).abs() < 0.01 || its.unwrap().from > wait.to);
    }
    let samples = &trace.counters["rank 1: samples per second"];
    assert!(samples.len() == steps && samples.iter().all(|it| *it > 0.0));
    let bytes = &trace.counters["rank 1: bytes in collectives"];
    // In the first step the ranks also agree on the buckets.
    assert!(bytes[0] > bytes[1] && bytes[1] > 0.0, "{bytes:?}");
    assert!(bytes[1..].iter().all(|it| *it == bytes[1]), "{bytes:?}");
    let places = |it: &Slice| it.args["at"].as_str().unwrap().contains(".rs:");
    assert!(trace.of("phase").all(places) && trace.of("collective").all(places));
    assert_eq!(trace.other["entries_not_kept"]["rank 0"], 0);
}

#[test]
fn trace_of_each_process_uses_one_clock() {
    let (folder, stderr) = traced(0, "--nproc-per-node=2 --spawn=processes --num-samples=64");
    let folder = folder.path().join("new");
    assert!(!folder.join("trace.json").exists(), "each has its number");
    assert!(stderr.contains("the traces of 2 processes are beside "), "{stderr}");
    let [first, second] =
        ["trace.0.json", "trace.1.json"].map(|name| Trace::read(&folder.join(name)));
    assert_eq!(first.other["clock_error_at_start_us"], 0.0);
    let error = second.other["clock_error_at_start_us"].as_f64().unwrap();
    assert!(error > 0.0 && second.other["clock"] == "that of process 0", "{}", second.other);
    assert!(first.lanes.contains_key(&(0, 0)) && second.lanes.contains_key(&(1, 64)));
    // What all do together overlaps in time, as far as the clocks are known.
    let mut together = 0;
    for mine in first.of("collective") {
        let key = |it: &Slice| (it.name.clone(), it.args["sequence"].clone());
        let Some(other) = second.of("collective").find(|it| key(it) == key(mine)) else { continue };
        // A broadcast's root need not wait for the others.
        if mine.name.starts_with("all_reduce") || mine.name == "barrier" {
            assert!(mine.from - error <= other.to && other.from - error <= mine.to);
            together += 1;
        }
    }
    assert!(together > 0);
}

#[test]
fn concurrent_operations_have_tracks_of_their_own() {
    // Ranks that share memory reduce after backward.
    let (folder, _) = traced(
        0,
        "--nproc-per-node=2 --spawn=processes --shared-memory=off --num-samples=320 \
        --model=mlp --hidden=256,256,256 --bucket-cap-mb=0.1",
    );
    for name in ["trace.0.json", "trace.1.json"] {
        // Reading it checks that nothing overlaps in a lane.
        let trace = Trace::read(&folder.path().join("new").join(name));
        let beside = trace.of("collective").filter(|it| it.lane.1 % 64 > 0);
        assert!(beside.count() > 5 && trace.of("step").count() == 5);
        assert!(trace.arrows.iter().filter(|it| it.0 == "update").count() > 5);
    }
}

/// Long: it waits for a time-out.
#[test]
fn trace_of_a_failed_run_marks_unfinished_operations() {
    let fault = "--nproc-per-node=2 --inject-fault=stall:rank=1,at=step,step=3";
    let (folder, _) = traced(1, &format!("{fault} --timeout=6s --grace-period=500ms"));
    let trace = Trace::read(&folder.path().join("new/trace.json"));
    let unfinished = |it: &&Slice| it.args["unfinished"] == true;
    let waits = trace.of("collective").find(unfinished).unwrap();
    assert_eq!((waits.lane.1, &waits.args["step"]), (0, &3.into()), "{waits:?}");
    assert_eq!(waits.args["waited_for_rank"], 1, "{waits:?}");
    assert!(trace.of("step").any(|it| it.name == "step 3" && it.lane.1 == 64));
}

#[test]
fn library_run_writes_a_trace_of_its_newest_operations() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.json");
    let view = Arc::new(views::Trace::open(&path, [0, 1]).unwrap());
    let spawn = Spawn::new(2).timeout(TIMEOUT).observe(view.clone());
    spawn
        .run(|rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            for step in 0..20_000 {
                group.enter_step(step)?;
                group.all_reduce(&mut Tensor::from_slice(&[1i64]), ReduceOp::Sum)?;
            }
            Ok(())
        })
        .unwrap();
    view.write().unwrap();
    // The newest are kept.
    let trace = Trace::read(&path);
    assert!(trace.named("step 19999").count() == 2 && trace.named("step 0").count() == 0);
    let lost = trace.other["entries_not_kept"]["rank 1"].as_u64().unwrap();
    assert_eq!(lost, 2 * 20_000 - (1 << 15));
}
