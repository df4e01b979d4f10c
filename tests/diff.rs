//! `--record` and `ddp-mp diff`: a record shows every bit that differs, and where; equal runs have equal records.

use std::fs;
use std::path::Path;

use ddp_mp::checkpoint::TensorFile;
use ddp_mp::commands::{self, DiffFlags};
use ddp_mp::views::{LogFormat, Printer};
use serde_json::Value;

use crate::harness::{
    events, in_parallel, program_in, refused, run_command, run_command_to, run_end,
    runs_every_case, some_of, words,
};

/// A model with parameters and buffers, which trains in a fraction of a second.
const CNN: &str = "--model=cnn --channels=4,4 --dataset=digits --loss=cross-entropy --batch-size=8 --momentum=0.9 \
                   --lr=0.05 --nproc-per-node=2 --quiet --max-steps=6";
/// Its steps.
const STEPS: u64 = 6;

/// Runs the program in `folder`; it must end with this exit code.
fn run_in(code: i32, folder: &Path, args: &[&str]) -> (String, String) {
    run_command_to(code, program_in(folder, args))
}

/// Trains with `args`, and writes a record with this name into `folder`. Returns stderr.
fn record(code: i32, folder: &Path, name: &str, args: &[&str]) -> String {
    run_in(code, folder, &[&[&*format!("--record={name}")], args].concat()).1
}

/// As [`record`], of the CNN.
fn record_cnn(code: i32, folder: &Path, name: &str, args: &[&str]) {
    record(code, folder, name, &[&words(CNN)[..], args].concat());
}

/// Runs `ddp-mp diff` in `folder`.
fn diff(code: i32, folder: &Path, a: &str, b: &str) -> (String, String) {
    run_in(code, folder, &["diff", a, b])
}

/// The error of `ddp-mp diff` for files that it refuses.
fn diff_refused(folder: &Path, a: &str, b: &str) -> String {
    let (a, b) = (folder.join(a), folder.join(b));
    let flags = DiffFlags { a, b, rtol: None, rename: Vec::new() };
    commands::diff(&flags, &Printer::new(LogFormat::Text)).unwrap_err().to_string()
}

/// Runs it on equal records, and returns what it prints.
fn diff_equal(folder: &Path, a: &str, b: &str) -> String {
    let (stdout, stderr) = diff(0, folder, a, b);
    assert_eq!(stderr, "", "{a} {b}: {stdout}");
    stdout
}

/// Numbers that look random, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 20) % end
    }
}

/// The names and bits of the tensors that the header of a record lists under `key`.
fn tensors(header: &Value, key: &str) -> Vec<(String, u64)> {
    let bits = |tensor: &Value| {
        let shape = tensor["shape"].as_array().unwrap();
        let numel: u64 = shape.iter().map(|size| size.as_u64().unwrap()).product();
        numel * if tensor["dtype"] == "int64" { 64 } else { 32 }
    };
    let all = header[key].as_array().unwrap();
    all.iter().map(|tensor| (tensor["name"].as_str().unwrap().to_owned(), bits(tensor))).collect()
}

/// The line of `text` about `stage`.
fn line<'a>(text: &'a str, stage: &str) -> &'a str {
    text.lines().find(|line| line.starts_with(&format!("  {stage}"))).unwrap_or("")
}

/// A flip in a random step, rank, tensor and bit is found there, in threads and in processes.
/// Long: each flip is a run of training.
#[test]
fn diff_names_the_step_rank_and_tensor_of_a_flipped_bit() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    record_cnn(0, folder, "good.record", &[]);
    let text = fs::read_to_string(folder.join("good.record")).unwrap();
    let header: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let flips: Vec<u64> = (0..if runs_every_case() { 20 } else { 5 }).collect();
    in_parallel(&flips, |&number| {
        let mut numbers = Numbers(number);
        let (step, rank) = (numbers.below(STEPS), numbers.below(2));
        let places = ["gradient", "average", "parameter", "buffer", "batch"];
        let place = places[number as usize % places.len()];
        let all = match place {
            "batch" => vec![("rank".to_owned(), 8 * 64 * 32)], // 8 images of 8 x 8
            "buffer" => tensors(&header, "buffers"),
            _ => tensors(&header, "parameters"),
        };
        let flipped = numbers.below(all.len() as u64) as usize;
        let before: u64 = all[..flipped].iter().map(|(_, bits)| bits).sum();
        let bit = before + numbers.below(all[flipped].1);
        let fault = format!("--inject-fault=flip={bit}:rank={rank},at=step,step={step},in={place}");
        let name = format!("{number}.record");
        let spawn = ["--spawn=threads", "--spawn=processes"][number as usize % 2];
        // Runs whose replicas differ at the end fail; so do those whose loss is no longer finite.
        let file = format!("--record={name}");
        run_command(program_in(folder, &[&words(CNN)[..], &[&file, &fault, spawn]].concat()));
        let (stdout, _) = diff(1, folder, "good.record", &name);
        assert!(
            stdout.contains(&format!("Step {step} is the first that differs")),
            "{fault}: {stdout}"
        );
        let stage = line(&stdout, if place == "batch" { "batch" } else { place });
        let expected = match place {
            "batch" => format!("differs on rank {rank}"),
            _ => format!(" on rank {rank}: `{}`", all[flipped].0),
        };
        assert!(stage.contains(&expected), "{fault} {spawn}: {stdout}");
        let earlier = stdout.lines().skip_while(|line| !line.starts_with("  samples"));
        for line in earlier.take_while(|line| *line != stage) {
            assert!(line.ends_with("the same"), "{fault}: {stdout}");
        }
    });
}

#[test]
fn equal_runs_have_equal_records_and_the_bits_of_a_run_without() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let hash = |record: Option<&str>, args: &[&str]| {
        let record = record.map(|name| format!("--record={}", folder.join(name).display()));
        let record: Vec<&str> = record.as_deref().into_iter().collect();
        run_end(&[&words(CNN)[..], &record, args].concat())["parameters_hash"].clone()
    };
    let none = hash(None, &[]);
    assert_eq!(hash(Some("a.record"), &[]), none);
    let all = [
        ("processes.record", &["--spawn=processes"][..]),
        ("zero.record", &["--zero", "--spawn=processes"]),
        ("shared.record", &["--share-model"]),
        ("overlap.record", &["--simulate-cluster=bandwidth=10Gbit/s,latency=10us"]),
    ];
    for (name, args) in some_of(all, 2) {
        assert_eq!(hash(Some(name), args), none, "{args:?}");
        let stdout = diff_equal(folder, "a.record", name);
        assert!(stdout.ends_with("Equal: the start and 6 steps (0 to 5).\n"), "{name}: {stdout}");
    }
    assert!(folder.join("processes.1.record").exists());
    // A missing file of a process, and files of two runs.
    fs::rename(folder.join("processes.1.record"), folder.join("1")).unwrap();
    let error = diff_refused(folder, "a.record", "processes.record");
    assert!(error.contains("processes.record: it has no start of rank 1; put"), "{error}");
    fs::rename(folder.join("1"), folder.join("processes.1.record")).unwrap();
    fs::copy(folder.join("a.record"), folder.join("processes.record")).unwrap();
    let error = diff_refused(folder, "a.record", "processes.record");
    assert!(error.contains("processes.0.record exists, too; remove the one"), "{error}");
    assert_eq!(hash(Some("some.record"), &["--record-every=4", "--zero"]), none);
    for (name, count) in [("a.record", 12), ("shared.record", 12), ("some.record", 4)] {
        let lines = fs::read_to_string(folder.join(name)).unwrap();
        let steps = lines.lines().filter(|line| line.starts_with("{\"event\":\"step\"")).count();
        assert_eq!(steps, count, "{name}");
    }
}

#[test]
fn runs_with_other_options_are_compared_as_far_as_they_can_be() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let two = ["--nproc-per-node=2", "--max-steps=3", "--quiet"];
    for (name, args) in [
        ("a", &[][..]),
        ("seed", &["--seed=1"]),
        ("batch", &["--batch-size=16"]),
        ("lr", &["--lr=0.01"]),
        ("decay", &["--weight-decay=0.1"]),
        ("one", &["--nproc-per-node=1", "--batch-size=64"]),
        ("mlp", &["--model=mlp"]),
        ("some", &["--max-steps=6", "--record-every=2"]),
    ] {
        let kept = two
            .iter()
            .filter(|flag| !args.iter().any(|arg| arg.split('=').next() == flag.split('=').next()));
        let all: Vec<&str> = kept.copied().chain(args.iter().copied()).collect();
        record(0, folder, name, &all);
    }
    for (other, code, expected) in [
        (
            "seed",
            1,
            &["option seed: A has 0, B has 1", "The runs differ before step 0", "compare the seed"]
                [..],
        ),
        ("batch", 1, &["Step 0 is", "samples     differs on all ranks", "the batch size"]),
        (
            "lr",
            1,
            &[
                "Equal: the start.",
                "lr          differs on all ranks",
                "compare the learning rates (--lr)",
            ],
        ),
        ("decay", 1, &["parameters  2 of 2 on all ranks: `weight`, `bias`", "weight decay"]),
        ("one", 1, &["different numbers of ranks", "gradients   not compared", "averages    "]),
        (
            "some",
            0,
            &["Equal: the start and 2 steps (0 to 2).", "Only A has 1 step more", "Only B has 1"],
        ),
    ] {
        let (stdout, stderr) = diff(code, folder, "a", other);
        assert_eq!(stderr, "", "{other}: {stdout}");
        for text in expected {
            assert!(stdout.contains(text), "{other}: {text}: {stdout}");
        }
    }
    let (stdout, stderr) = diff(2, folder, "a", "mlp");
    assert_eq!(stdout, "");
    let expected = "the models differ: a has `weight`, float32 [1, 20], mlp has";
    assert!(stderr.contains(expected), "{stderr}");
}

#[test]
fn a_resumed_run_appends_to_its_record() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let all = ["--nproc-per-node=2", "--quiet", "--checkpoint-dir=run", "--save-every=4"];
    record(0, folder, "whole", &["--nproc-per-node=2", "--quiet", "--max-steps=10"]);
    // Killed after a checkpoint and two more steps, which the next start repeats.
    let kill = "--inject-fault=kill:rank=1,at=step,step=6";
    let killed = [&all[..], &["--max-steps=10", "--record=parts", kill]].concat();
    assert_eq!(run_command(program_in(folder, &killed)).0, None);
    let killed = fs::read_to_string(folder.join("parts")).unwrap();
    assert!(killed.ends_with('\n') && killed.contains("\"step\":5,\"rank\":1"), "{killed}");
    // A part of a line, as after a failure of the machine.
    fs::write(folder.join("parts"), &killed[..killed.len() - 20]).unwrap();
    let resumed = [&all[..], &["--max-steps=10", "--resume=auto"]].concat();
    record(0, folder, "parts", &resumed);
    let stdout = diff_equal(folder, "whole", "parts");
    assert!(stdout.contains("Equal: the start and 10 steps (0 to 9)."), "{stdout}");
    // Without --resume nothing is overwritten.
    let before = fs::read(folder.join("parts")).unwrap();
    let stderr = record(2, folder, "parts", &["--nproc-per-node=2"]);
    assert!(stderr.contains("this record exists; remove it, or use another name"), "{stderr}");
    assert_eq!(fs::read(folder.join("parts")).unwrap(), before);
}

#[test]
fn files_that_are_no_records_are_refused_in_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    record(0, folder, "good", &["--nproc-per-node=2", "--max-steps=3", "--quiet"]);
    let good = fs::read_to_string(folder.join("good")).unwrap();
    let lines: Vec<&str> = good.lines().collect();
    let later = lines[0].replace("\"format\":2", "\"format\":3,\"new\":{}");
    let earlier = lines[0].replace("\"format\":2", "\"format\":1");
    let without_header = lines[1..].join("\n");
    let damaged = good.replacen("\"step\":1", "\"step\":one", 1);
    let shorter = good.replacen("\"gradients\":[", "\"gradients\":[null,", 1);
    let bad_hash = good.replacen("\"averages\":[{\"hash\":\"", "\"averages\":[{\"hash\":\"xx", 1);
    for (text, expected) in [
        ("", "the record is empty"),
        ("hello\n", "this file is not a record"),
        ("{}\n", "this file is not a record"),
        (&*later, "this record has format 3, and this program reads format 2"),
        (&earlier, "this record has format 1, and this program reads format 2"),
        (&without_header, "the header is missing"),
        (&damaged, "is no line of a record"),
        (&shorter, "it has not one fingerprint for each tensor of the header"),
        (&bad_hash, "is not a hash of 16 hexadecimal digits"),
        (&lines[0][..40], "this file is not a record"),
    ] {
        fs::write(folder.join("bad"), text).unwrap();
        let error = diff_refused(folder, "good", "bad");
        assert!(error.contains(expected) && error.lines().count() == 1, "{expected}: {error}");
    }
    // A record that was cut anywhere is a record of the steps before.
    for end in some_of((lines[0].len() + 1..good.len()).step_by(211), 6) {
        fs::write(folder.join("bad"), &good[..end]).unwrap();
        let (code, stdout, stderr) = run_command(program_in(folder, &["diff", "good", "bad"]));
        let nothing = stderr.contains("have no step in common")
            || stderr.contains("; put the files of all processes beside each other");
        assert!(code == Some(0) || (code == Some(2) && nothing), "{end}: {stdout}{stderr}");
    }
    let error = refused("--record=new --strategy=dp");
    assert!(error.contains("--record: needs --strategy ddp"), "{error}");
    let error = refused("--record-every=2");
    assert!(error.contains("--record-every: has no effect without --record; add it"), "{error}");
}

/// A file of `--keep` has the tensors of each stage, also where ranks have parts of the averages only.
#[test]
fn kept_tensors_are_the_same_in_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let layouts = [&[][..], &["--share-model"], &["--zero", "--spawn=processes"]];
    let kept = layouts.iter().enumerate().map(|(number, args)| {
        let keep = format!("--keep={number}");
        let flags = [&keep, "--keep-step=4", "--keep-rank=1"];
        run_in(0, folder, &[&words(CNN)[..], &flags, args].concat());
        fs::read(folder.join(number.to_string())).unwrap()
    });
    let kept: Vec<Vec<u8>> = kept.collect();
    assert!(kept.iter().all(|file| *file == kept[0]));
    let names = TensorFile::read(&folder.join("0")).unwrap().tensors().unwrap();
    for name in [
        "batch.0.inputs",
        "batch.0.targets",
        "output.0",
        "loss.0",
        "before.",
        "gradient.",
        "average.",
        "parameter.",
        "buffer.",
    ] {
        assert!(names.keys().any(|key| key.starts_with(name)), "{name}: {:?}", names.keys());
    }
    let late = ["--nproc-per-node=2", "--max-steps=3", "--keep=late", "--keep-step=9"];
    let (_, stderr) = run_in(0, folder, &late);
    let expected = "--keep-step 9: the run had no such step, so late was not written";
    assert!(stderr.contains(expected), "{stderr}");
    let (_, stderr) = run_in(2, folder, &["--keep=0", "--max-steps=1"]);
    assert!(stderr.contains("--keep 0: this file exists"), "{stderr}");
}

/// The rank of the fault must not average in another way than the others.
#[test]
fn flip_of_a_gradient_is_found_also_where_ranks_have_parts_of_the_averages() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let run = ["--nproc-per-node=2", "--max-steps=6", "--quiet"];
    let flip = "--inject-fault=flip=28:rank=1,at=step,step=3,in=gradient";
    for way in some_of(["--share-model", "--zero"], 1) {
        let kept = |name: &str, more: &[&str]| {
            let keep = format!("--keep={name}{way}");
            let args = [&run[..], &[way, &keep, "--keep-step=3", "--keep-rank=1"], more].concat();
            run_in(0, folder, &args);
            format!("{name}{way}")
        };
        let (good, bad) = (kept("good", &[]), kept("bad", &[flip]));
        let (stdout, _) = diff(1, folder, &good, &bad);
        assert!(stdout.contains("\n  gradient.weight  1 of 20  [0][0] "), "{stdout}");
        run_in(0, folder, &[&run[..], &[way, flip]].concat());
    }
}

/// Of several processes, each writes its own file. The one that fails may be any of them, also between recorded steps.
#[test]
fn failure_of_any_process_is_a_difference() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let some = ["--spawn=processes", "--record-every=10"];
    record_cnn(0, folder, "good", &some);
    // Of a process that was killed, the others write it.
    in_parallel(&some_of(["error:rank=0", "error:rank=1", "kill:rank=1"], 2), |fault| {
        let name = &fault.replace([':', '='], "-");
        let fault = format!("--inject-fault={fault},at=step,step=5");
        record_cnn(1, folder, name, &[&some[..], &[&fault]].concat());
        let (stdout, _) = diff(1, folder, "good", name);
        assert!(stdout.contains("B failed in step 5: see the error of the run."), "{stdout}");
    });
}

/// Writes the record `from` as `to`, with a change of each line.
fn edit(folder: &Path, from: &str, to: &str, change: impl Fn(&mut Value)) {
    let text = fs::read_to_string(folder.join(from)).unwrap();
    let changed = text.lines().map(|line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        change(&mut line);
        format!("{line}\n")
    });
    fs::write(folder.join(to), changed.collect::<String>()).unwrap();
}

/// What a difference of two records is called, where one was written from the other.
#[test]
fn differences_are_named_as_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let flags = ["--nproc-per-node=3", "--max-steps=5", "--lr=0.07", "--quiet"];
    record(0, folder, "good", &flags);
    let is_at = |line: &Value, rank: u64| {
        line["event"] == "step" && line["step"] == 3 && line["rank"] == rank
    };
    let compare = |code: i32, change: &dyn Fn(&mut Value)| {
        edit(folder, "good", "other", change);
        let (stdout, stderr) = diff(code, folder, "good", "other");
        stdout + &stderr
    };
    let hash = serde_json::json!({"hash": "0123456789abcdef"});
    for (tensor, name) in ["inputs", "targets"].into_iter().enumerate() {
        let text = compare(1, &|line| {
            if is_at(line, 1) {
                line["batch"][tensor] = hash.clone();
            }
        });
        assert!(text.contains(&format!("batch       differs on rank 1: {name}\n")), "{text}");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let remedy = "compare the data files and what the loop makes of them, or look at rank 1:";
        assert!(text.contains(remedy), "{text}");
    }

    // One rank fails in the step after, and the others stop before they have averaged.
    let text = compare(1, &|line| {
        if is_at(line, 2) {
            for key in ["gradients", "averages", "parameters"] {
                line[key][0] = hash.clone();
            }
        } else if is_at(line, 0) || is_at(line, 1) {
            for key in ["averages", "parameters"] {
                line[key].as_array_mut().unwrap().fill(Value::Null);
            }
            line["stopped"] = true.into();
        }
    });
    for expected in [
        "gradients   1 of 2 on rank 2: `weight`\n",
        "averages    1 of 2 on rank 2: `weight`; not recorded on ranks 0 and 1, which stopped in this step\n",
        "parameters  1 of 2 on rank 2: `weight`; not recorded on ranks 0 and 1, which stopped in this step\n",
    ] {
        assert!(text.contains(expected), "{text}");
    }

    // Of a frozen parameter there is no gradient.
    let text = compare(2, &|line| match line["event"].as_str() {
        Some("header") => {
            let frozen = line["parameters"].as_array_mut().unwrap().remove(0);
            line["buffers"].as_array_mut().unwrap().push(frozen);
        }
        _ => {
            for key in ["gradients", "averages", "parameters"] {
                if let Some(hashes) = line[key].as_array_mut() {
                    hashes.remove(0);
                }
            }
            line["buffers"] = vec![hash.clone()].into();
        }
    });
    assert!(text.contains("the models differ: good trains `weight`, and other does not"), "{text}");
    let text = compare(0, &|line| {
        let more = match line["event"].as_str() {
            Some("header") => {
                serde_json::json!({"name": "old.weight", "dtype": "float32", "shape": [3]})
            }
            _ => hash.clone(),
        };
        line["buffers"] = vec![more].into();
    });
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = "good has no such tensor: buffers and frozen parameters of other, `old.weight`.";
    assert!(text.contains(expected), "{text}");
}

/// A rank that is late does not come to the step in which another one fails.
#[test]
fn failed_step_is_named_also_if_a_rank_stopped_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    record_cnn(0, folder, "good", &[]);
    for (fault, expected) in [
        ("error", "B failed in step 3: see the error of the run."),
        ("nan", "Step 3 is the first that differs:"),
    ] {
        let inject = format!("--inject-fault={fault}:rank=1,at=step,step=3");
        record_cnn(1, folder, fault, &[&inject]);
        let text = fs::read_to_string(folder.join(fault)).unwrap();
        let mut lines = events(&text);
        lines.retain(|line| line["event"] != "failed"); // as of a rank that is killed
        lines.retain(|line| line["rank"] != 0 || line["step"] != 3);
        for line in &mut lines {
            line.as_object_mut().unwrap().remove("stopped");
            if line["rank"] == 0 && line["step"] == 2 && line["event"] == "step" {
                line["stopped"] = true.into();
                line["parameters"].as_array_mut().unwrap().fill(Value::Null);
            }
        }
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(folder.join(fault), text).unwrap();
        let (stdout, _) = diff(1, folder, "good", fault);
        assert!(stdout.contains("Equal: the start and 2 steps (0 to 1)."), "{fault}: {stdout}");
        assert!(stdout.contains(expected), "{fault}: {stdout}");
    }
}

/// A start after a failure replaces what the run has kept, and the steps that it has recorded.
#[test]
fn restarted_run_keeps_and_records_its_steps() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let run = ["--nproc-per-node=2", "--max-steps=6", "--quiet", "--keep-step=3"];
    for (name, args) in [
        ("good", &[][..]),
        ("bad", &["--max-restarts=1", "--inject-fault=error:rank=1,at=step,step=5"]),
    ] {
        let files = [format!("--keep={name}"), format!("--record={name}.record")];
        let args = [&run[..], args, &[&files[0], &files[1]]].concat();
        run_in(0, folder, &args);
    }
    for (a, b) in [("good", "bad"), ("good.record", "bad.record")] {
        let stdout = diff_equal(folder, a, b);
        assert!(!stdout.contains("Only "), "{stdout}");
    }
}

/// Layers of the built-in models have the names of PyTorch's modules.
#[test]
fn first_layer_whose_output_differs_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let flags = ["--model=mlp", "--hidden=16,16", "--nproc-per-node=2", "--max-steps=3", "--quiet"];
    let all = [&flags[..], &["--record-modules"]].concat();
    record(0, folder, "relu", &all);
    record(0, folder, "gelu", &[&all[..], &["--activation=gelu"]].concat());
    record(0, folder, "without", &flags);
    let (stdout, _) = diff(1, folder, "relu", "gelu");
    for text in [
        "  outputs     differs on all ranks: `1`, `2`, `3`, ...\n",
        "  backward    differs on all ranks: `4`, `3`, `2`, ...\n",
        "What goes into `1` is the same.",
        "and all before is equal: no rounding.",
    ] {
        assert!(stdout.contains(text), "{text}: {stdout}");
    }
    // The bits of the run are the same, and one record has nothing to compare.
    let stdout = diff_equal(folder, "relu", "without");
    assert!(stdout.contains("Equal: the start and 3 steps"), "{stdout}");
    let text = fs::read_to_string(folder.join("relu")).unwrap();
    let step = events(&text).into_iter().find(|line| line["event"] == "step").unwrap();
    let modules = |key: &str| -> Vec<String> {
        let tensors = step[key].as_array().unwrap();
        tensors.iter().map(|tensor| tensor["module"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(modules("outputs"), ["0", "1", "2", "3", "4"]);
    assert_eq!(modules("output_gradients"), ["4", "3", "2", "1", "0"]);
}

/// Rounding is close, also where it has grown, and another rate is not.
#[test]
fn runs_that_differ_by_rounding_are_close() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let flags = ["--model=mlp", "--hidden=16,16", "--max-steps=12", "--momentum=0.9", "--quiet"];
    for (name, args) in [
        ("two", &["--nproc-per-node=2"][..]),
        ("one", &["--nproc-per-node=1", "--batch-size=64"]),
        ("bf16", &["--nproc-per-node=2", "--amp=bf16"]),
        ("decay", &["--nproc-per-node=2", "--amp=bf16", "--weight-decay=5"]),
        ("rate", &["--nproc-per-node=2", "--lr=0.002"]),
    ] {
        record(0, folder, name, &[&flags[..], args].concat());
    }
    for (other, code, expected) in [
        ("one", 0, "Close: the bits differ from step 0 on, and no tensor is farther than"),
        ("bf16", 0, "but they grow as rounding does: everywhere, and nothing jumps."),
        ("decay", 1, "The first jump is in step 0:"),
        ("rate", 1, "compare the learning rates (--lr) and the schedules"),
    ] {
        let (stdout, _) = run_in(code, folder, &["diff", "two", other, "--rtol"]);
        let text = stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(expected), "{other}: {stdout}");
        diff(1, folder, "two", other); // the bits differ in any case
    }
    let (stdout, _) = run_in(0, folder, &["diff", "two", "bf16", "--rtol=0.5"]);
    assert!(stdout.contains("no tensor is farther than"), "{stdout}");
    let (_, stderr) = run_in(2, folder, &["diff", "two", "bf16", "--rtol=2"]);
    assert!(stderr.contains("write a number from 0 to 1"), "{stderr}");
}

/// A step has one part of a large tensor, unless the record has whole ones.
#[test]
fn large_tensors_are_recorded_in_parts() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let flags = ["--model=mlp", "--hidden=300,300", "--max-steps=8", "--quiet"];
    let two = [&flags[..], &["--nproc-per-node=2"]].concat();
    record(0, folder, "parts", &two);
    record(0, folder, "processes", &[&two[..], &["--spawn=processes", "--zero"]].concat());
    record(0, folder, "whole", &[&two[..], &["--record-whole"]].concat());
    diff_equal(folder, "parts", "processes");
    let text = fs::read_to_string(folder.join("parts")).unwrap();
    let lines = events(&text);
    let parts: Vec<Option<u64>> = lines
        .iter()
        .filter(|line| line["event"] == "step" && line["rank"] == 0)
        .map(|line| line["parameters"][2]["part"].as_u64())
        .collect();
    assert!(parts.contains(&Some(0)) && parts.contains(&Some(1)), "{parts:?}");
    let start = lines.iter().find(|line| line["event"] == "start").unwrap();
    assert!(start["parameters"][2]["part"].is_null());
    let error = diff_refused(folder, "parts", "whole");
    assert!(error.contains("whole tensors; record both runs with --record-whole"), "{error}");
}

/// A port may have other names.
#[test]
fn names_of_a_port_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let flags = ["--model=mlp", "--hidden=16", "--max-steps=3", "--quiet", "--record-modules"];
    record(0, folder, "ours", &flags);
    edit(folder, "ours", "theirs", |line| {
        let text = line.to_string().replace("\"0.", "\"net.first.").replace("\"2.", "\"net.last.");
        *line = serde_json::from_str(&text).unwrap();
        if line["event"] == "header" {
            line["parameters"].as_array_mut().unwrap().reverse();
        } else {
            for key in ["gradients", "averages", "parameters"] {
                if let Some(tensors) = line[key].as_array_mut() {
                    tensors.reverse();
                }
            }
        }
    });
    let error = diff_refused(folder, "ours", "theirs");
    assert!(error.contains("the models differ: "), "{error}");
    let renames = ["--rename=0.=net.first.", "--rename=2.=net.last."];
    let (stdout, _) = run_in(0, folder, &[&["diff", "ours", "theirs"], &renames[..]].concat());
    assert!(stdout.contains("Equal: the start and 3 steps"), "{stdout}");
    let (_, stderr) = run_in(2, folder, &["diff", "ours", "theirs", "--rename=first"]);
    assert!(stderr.contains("write OLD=NEW"), "{stderr}");
}
