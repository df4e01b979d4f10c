//! The program as a user meets it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::harness::{
    as_torchrun, events, files_below, program, program_in, program_under, refused, repository, run,
    run_command_to, run_end, run_events, run_to, said, some_of, words,
};

/// What is printed for help and for mistakes: tests/cmd/*.trycmd.
#[test]
fn terminal_output_matches_the_snapshots() {
    let mut files = files_below(&repository("tests/cmd"));
    files.retain(|file| file.extension().is_some_and(|extension| extension == "trycmd"));
    for file in &files {
        // Commands between two blocks would not run.
        let text = fs::read_to_string(file).unwrap();
        let (mut in_block, mut blocks) = (false, 0);
        for (index, line) in text.lines().enumerate() {
            let is_fence = line.starts_with("```");
            in_block ^= is_fence;
            blocks += usize::from(is_fence && in_block);
            let is_command = line.starts_with("$ ");
            let place = format!("{}:{}", file.display(), index + 1);
            assert!(in_block || !is_command, "{place}: outside of a block");
        }
        assert!(!in_block && blocks > 0, "{}: a block does not end", file.display());
    }
    let cases = trycmd::TestCases::new();
    cases.env("CUDA_VISIBLE_DEVICES", "").env("RUST_BACKTRACE", "0");
    for file in some_of(files, 2) {
        cases.case(file);
    }
}

#[test]
fn example_configs_run_from_anywhere() {
    let elsewhere = tempfile::tempdir().unwrap();
    let files = files_below(&repository("configs"));
    assert!(files.len() >= 3);
    for file in some_of(files, 3) {
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("# "), "{} does not say what it shows", file.display());
        let args = ["--config", file.to_str().unwrap(), "--max-steps=3"];
        let few = if text.contains("model = \"gpt\"") { 3 } else { 2 }; // a gpt takes minutes
        run_command_to(0, program_in(&elsewhere, &args[..few]));
    }
}

/// In child processes too, and when the run is resumed from another folder.
#[test]
fn paths_of_a_config_are_in_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("conf")).unwrap();
    let rows: String = (0..40).map(|row| format!("{},{}\n", row % 7, row % 3)).collect();
    fs::write(at("data.csv"), rows).unwrap();
    let config = "dataset = \"csv:../data.csv\"\ncheckpoint_dir = \"run\"\nnproc_per_node = 2\n";
    fs::write(at("conf/run.toml"), config).unwrap();
    for (working_folder, args) in [
        ("", ["--config=conf/run.toml", "--spawn=processes", "--max-epochs=1"]),
        ("conf", ["--config=run.toml", "--max-restarts=1", "--resume=auto"]),
    ] {
        let (_, stderr) = run_command_to(0, program_in(at(working_folder), &args));
        assert!(at("conf/run/latest").exists(), "{stderr}");
        let is_resumed = working_folder == "conf";
        assert_eq!(stderr.contains("resuming from run/step-"), is_resumed, "{stderr}");
        assert_eq!(
            stderr.contains("--dataset was \"csv:conf/../data.csv\""),
            is_resumed,
            "{stderr}"
        );
    }
    assert!(!at("run").exists());
}

/// A shell puts the home folder in the place of `~/` in words of their own only.
#[test]
fn leading_tilde_of_any_path_is_the_home_folder() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("home/data")).unwrap();
    fs::create_dir(at("here")).unwrap();
    let rows: String = (0..40).map(|row| format!("{},{}\n", row % 7, row % 3)).collect();
    fs::write(at("home/data/rows.csv"), rows).unwrap();
    fs::write(at("home/run.toml"), "metrics = \"~/metrics\"\ncheckpoint_dir = \"~/run\"\n")
        .unwrap();
    let run_here = |args: &[&str]| {
        let mut command = program_in(at("here"), args);
        command.env("HOME", at("home"));
        let (stdout, _) = run_command_to(0, command);
        assert_eq!(fs::read_dir(at("here")).unwrap().count(), 0, "{args:?}");
        stdout
    };
    let files = "--config=~/run.toml --dataset=csv:~/data/rows.csv --record ~/record --trace=~/t";
    run_here(&words(files));
    for written in ["metrics", "run/latest", "record", "t"] {
        assert!(at("home").join(written).exists(), "{written}");
    }
    let files = "--dataset csv:~/data/rows.csv --init-from=~/run --record=~/other";
    run_here(&words(&format!("{files} --spawn=processes")));
    let equal = run_here(&["diff", "~/record", "~/record"]);
    assert!(equal.contains("Equal: "), "{equal}");
}

#[test]
fn deleted_working_directory_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let gone = folder.path().join("gone");
    let setup = format!("mkdir {0} && cd {0} && rmdir {0}", gone.display());
    for args in [&["--max-epochs=1"][..], &["env"], &["comm", "all_reduce"]] {
        let (_, stderr) = run_command_to(2, program_under(&setup, args));
        assert!(
            stderr.contains("the working directory was deleted; change to another"),
            "{args:?}: {stderr}"
        );
    }
}

#[test]
fn stall_warning_that_never_comes_is_refused() {
    let text = refused("--stall-warning=20s --timeout=1s");
    assert!(text.contains("a warning after 20s never comes within a timeout of 1s"), "{text}");
    assert_eq!(said(["--timeout=1s".into()]), None);
}

/// Paragraphs of `#key = value`, here as flags, which win over the file.
#[test]
fn digits_config_variants_change_the_parameters() {
    let text = fs::read_to_string(repository("configs/digits.toml")).unwrap();
    let flag = |line: &str| {
        let (key, value) = line.strip_prefix('#')?.split_once(" = ")?;
        let value = value.replace(['"', '[', ']', ' '], "");
        let value = if value == "true" { String::new() } else { format!("={value}") };
        (!key.contains(' ')).then(|| format!("--{key}{value}"))
    };
    let flags_of = |text: &str| text.lines().filter_map(flag).collect::<Vec<String>>();
    let variants = text.split("\n\n").map(flags_of).filter(|flags| !flags.is_empty());
    let variants: Vec<Vec<String>> = variants.collect();
    assert_eq!(variants.len(), 3, "{variants:?}");
    // All epochs, so that both milestones come, and more steps than the warm-up has.
    let config = ["--config=configs/digits.toml", "--num-samples=128", "--batch-size=16"];
    let mut hashes = vec![hash(&config)];
    for flags in variants {
        let more: Vec<&str> = flags.iter().map(String::as_str).collect();
        let one = hash(&[&config[..], &more].concat());
        assert!(!hashes.contains(&one), "this changes nothing: {flags:?}");
        hashes.push(one);
    }
}

#[test]
fn stdout_closed_by_the_reader_is_no_failure() {
    // Far more than fits into a pipe.
    let mut child = program(&["sampler", "--len=200000", "--world-size=1", "--rank=0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.trim().parse::<usize>().is_ok());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// Runs it with a full disk as stdout, so that it fails. Returns stderr.
fn with_full_stdout(line: &str) -> String {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = program(&words(line)).stdout(full).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{line}: {stderr}");
    stderr
}

#[test]
fn full_stdout_fails_every_command_and_hides_no_earlier_failure() {
    const FULL: &str = "writing to stdout: No space left on device";
    let commands = "--help, -h, --version, completions bash, help, sampler --help, env, help bench, \
                    env --log-format=json, sampler --len=4 --world-size=2 --log-format=json, \
                    verify --nproc-per-node=2 --steps=2, bench step --nproc-per-node=1 --steps=1, \
                    bench all-reduce --nproc-per-node=2 --max-bytes=4 --iters=1";
    for line in some_of(commands.split(", "), 5) {
        let stderr = with_full_stdout(line);
        assert_eq!(stderr.matches(FULL).count(), 1, "{line}: {stderr}");
    }
    let fault = "--nproc-per-node=2 --inject-fault=error:rank=0,at=init --log-format=json";
    for (line, expected) in [
        ("--nproc-per-node=2", FULL),
        ("comm --nproc-per-node=2", &format!("rank 0 (CPU:0) failed in its function: {FULL}")),
        (fault, "rank 0 (CPU:0) failed in init: injected by"),
    ] {
        let stderr = with_full_stdout(line);
        assert!(stderr.contains(expected), "{line}: {stderr}");
    }
}

#[test]
fn sampler_json_has_one_object_per_rank() {
    let args = "sampler --len=10 --world-size=4 --no-shuffle --epoch=2 --log-format=json";
    let (stdout, _) = run_to(0, &words(args));
    let expected = "{\"rank\":0,\"epoch\":2,\"indices\":[0,4,8]}\n\
                    {\"rank\":1,\"epoch\":2,\"indices\":[1,5,9]}\n\
                    {\"rank\":2,\"epoch\":2,\"indices\":[2,6,0]}\n\
                    {\"rank\":3,\"epoch\":2,\"indices\":[3,7,1]}\n";
    assert_eq!(stdout, expected);
}

#[test]
fn sampler_text_has_one_line_per_sample() {
    let args = ["sampler", "--len=5", "--world-size=2", "--no-shuffle"];
    let stdout = |more: &[&str]| run(&[&args, more].concat()).1;
    assert_eq!(
        stdout(&[]),
        "rank  sample\n   0  0\n   0  2\n   0  4\n   1  1\n   1  3\n   1  0  (padding)\n"
    );
    assert_eq!(stdout(&["--rank=1", "--exact-mean"]), "1\n3\n");
    assert_eq!(stdout(&["--rank=0", "--exact-mean", "--drop-last"]), "0\n2\n");
    // As many ranks as there may be do not each shuffle all samples.
    let many = ["sampler", "--len=100000", "--world-size=1048576", "--log-format=json"];
    let mut command = program(&many);
    command.stdout(Stdio::null());
    assert_eq!(command.status().unwrap().code(), Some(0));
}

#[test]
fn events_have_the_documented_fields_in_order() {
    let args = ["--nproc-per-node=2", "--max-epochs=1", "--log-format=json"];
    let (stdout, _) = run_to(0, &args);
    let fields = |line: &str| {
        // serde_json's map would sort them.
        let keys = line
            .split('"')
            .skip(1)
            .step_by(2)
            .filter(|word| line.contains(&format!("\"{word}\":")));
        keys.map(String::from).collect::<Vec<_>>().join(" ")
    };
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines.len(), 4);
    assert!(lines[0].starts_with(
        "{\"event\":\"start\",\"world_size\":2,\"nnodes\":1,\"backend\":\"threaded\",\
         \"device\":\"CPU\",\"model\":\"linear\",\"parameters\":21}"
    ));
    for (rank, line) in lines[1..3].iter().enumerate() {
        let start = format!(
            "{{\"event\":\"epoch\",\"rank\":{rank},\"local_rank\":{rank},\"device\":\"CPU:{rank}\",\
             \"epoch\":0,\"batch_size\":32,\"steps\":64,\"loss\":0."
        );
        assert!(line.starts_with(&start), "{line}");
        assert!(line.contains("\"samples_per_second\":"), "{line}");
    }
    let end = "event seconds steps loss us_per_step parameters_hash replicas_equal bucket_bytes backward_us \
               communication_us overlapped bytes_sent_by_rank bytes_received_by_rank \
               data_wait_seconds_by_rank collective_seconds_by_rank \
               peak_memory_bytes";
    // On a busy machine a rank may have waited for the other.
    let always =
        |line: &str| fields(line).replace(" straggler rank seconds phase phase_seconds", "");
    assert_eq!(always(lines[3]), end);
    let (_, stdout, _) = run(&[&args[..], &["--amp=fp16"]].concat());
    assert_eq!(always(stdout.lines().last().unwrap()), format!("{end} skipped_steps scale"));
}

/// Not only under a launcher, which sets it: users of PyTorch and OpenMP expect it everywhere.
#[test]
fn omp_num_threads_is_respected_without_a_launcher() {
    let mut command = program(&["--nproc-per-node=2", "--max-steps=1"]);
    command.env("OMP_NUM_THREADS", "3");
    let (_, stderr) = run_command_to(0, command);
    assert!(stderr.contains("2 ranks on the CPU, 3 threads each (OMP_NUM_THREADS)"), "{stderr}");
}

/// Runs what the second of two workers of `torchrun --no-python --nproc-per-node=2` runs.
fn under_torchrun(code: i32, line: &str) -> (String, String) {
    let mut command = program(&words(line));
    as_torchrun(&mut command, 1, 2, 29500);
    command.envs([("TORCHELASTIC_RUN_ID", "none"), ("TORCHELASTIC_USE_AGENT_STORE", "True")]);
    run_command_to(code, command)
}

#[test]
fn env_reports_the_launcher_and_the_reason() {
    let (stdout, _) = under_torchrun(0, "env");
    for row in [
        "launcher              torchrun, process 1 of 2\n",
        "  because             RANK=1 WORLD_SIZE=2\n",
        "  meet at             127.0.0.1:29500, where torchrun's agent listens\n",
    ] {
        assert!(stdout.contains(row), "{stdout}");
    }
    let (stdout, _) = under_torchrun(0, "env --launch=slurm");
    assert!(stdout.contains("launcher              unknown\n"), "{stdout}");
    assert!(stdout.contains("would fail            not set: SLURM_PROCID, "), "{stdout}");
}

#[test]
fn one_process_commands_are_refused_in_several() {
    for line in ["comm barrier", "bench all-reduce --max-bytes=4"] {
        let (stdout, stderr) = under_torchrun(2, line);
        assert_eq!(stdout, "", "{line}");
        assert!(stderr.contains("this is process 1 of 2 (torchrun: RANK=1"), "{stderr}");
    }
    under_torchrun(0, "--launch=local --nproc-per-node=2");
}

#[test]
fn env_json_is_one_object() {
    let report = run_end(&["env", "--nproc-per-node=3"]);
    assert_eq!(report["plan"]["world_size"], 3);
    assert_eq!(report["plan"]["backend"], "threaded");
    assert_eq!(report["libtorch"], ddp_mp::ffi::version());
    let options = &report["options"];
    assert_eq!(options.as_array().unwrap().len(), 2, "{options}");
    assert_eq!(options[0], json!({"key": "nproc_per_node", "value": 3, "origin": "flag"}));
    assert_eq!(options[1], json!({"key": "log_format", "value": "json", "origin": "flag"}));
    assert!(report["libtorch_folder"].as_str().unwrap().starts_with('/'));
    assert_eq!(
        (&report["data"]["dataset"], &report["data"]["training"]),
        (&"random".into(), &4096.into())
    );
}

#[test]
fn env_opens_the_dataset() {
    let env = |flags: &str| run_to(0, &words(&format!("env {flags}"))).0;
    let row = |stdout: &str, name: &str| {
        let line = stdout.lines().find(|line| line.trim_start().starts_with(name));
        line.map(|line| line.trim_start()[name.len()..].trim().to_string())
    };
    let digits = env("--dataset=digits --loss=cross-entropy --val-fraction=0.2 --nproc-per-node=2");
    for (name, value) in [
        ("data ", "digits"),
        ("training ", "1438 samples"),
        ("validation ", "359 samples"),
        ("model ", "64 numbers -> 10"),
        ("would run", "2 ranks, backend threaded"),
    ] {
        assert_eq!(row(&digits, name).as_deref(), Some(value), "{digits}");
    }
    // Too few samples for as many ranks: seen only once the file is open.
    let many = env("--dataset=digits --nproc-per-node=1798");
    assert!(row(&many, "would fail").is_some_and(|it| it.starts_with("1798 ranks for 1797")));
}

#[test]
fn additional_rank_takes_no_second_dataset() {
    // 80 MB of data.
    let data = ["--num-samples=200000", "--in-features=100", "--batch-size=20000"];
    let memory = |ranks: &str| {
        run_end(&[&data[..], &[ranks]].concat())["peak_memory_bytes"].as_f64().unwrap()
    };
    let further = (memory("--nproc-per-node=4") - memory("--nproc-per-node=1")) / 3.;
    assert!(further < 40e6, "{further} bytes a rank");
}

/// The hash of what a run has trained.
fn hash(args: &[&str]) -> Value {
    end(args)["parameters_hash"].clone()
}

/// The `end` event of a run.
fn end(args: &[&str]) -> Value {
    run_end(&[&["--nproc-per-node=2"], args].concat())
}

#[test]
fn last_batch_is_dropped_and_the_wait_for_data_is_told() {
    let without = end(&["--batch-size=100", "--drop-last-batch", "--num-workers=1"]);
    assert_eq!(without["steps"], 20, "2048 samples a rank");
    let waited = without["data_wait_seconds_by_rank"].as_array().unwrap();
    assert!(waited.len() == 2 && waited.iter().all(|it| it.as_f64() > Some(0.)), "{waited:?}");
}

/// The validation events of a run.
fn validations(args: &[&str]) -> Vec<Value> {
    let mut events = run_events(args);
    events.retain(|event| event["event"] == "validation");
    events
}

#[test]
fn validation_counts_every_sample_once_for_any_world_size() {
    // With a learning rate of 0 all numbers of ranks have the same model. 359 images go round between none.
    let digits = ["--dataset=digits", "--loss=cross-entropy", "--val-fraction=0.2", "--lr=0"];
    let of = |ranks: &str| validations(&[&digits[..], &["--model=mlp", ranks]].concat()).remove(0);
    let alone = of("--nproc-per-node=1");
    assert!(alone["accuracy"].as_f64() > Some(0.), "{alone}");
    let together = of("--nproc-per-node=3");
    assert_eq!(together["accuracy"], alone["accuracy"]);
    let loss = |event: &Value| event["loss"].as_f64().unwrap();
    assert!((loss(&together) - loss(&alone)).abs() < 1e-6 * loss(&alone), "{together}");
    // Random data, every other epoch and after the last, with DataParallel too.
    for strategy in ["--strategy=ddp", "--strategy=dp"] {
        let random =
            ["--val-fraction=0.1", "--max-epochs=5", "--val-every=2", "--nproc-per-node=2"];
        let events = validations(&[&random[..], &[strategy, "--lr=0.1"]].concat());
        let epochs: Vec<_> = events.iter().map(|event| event["epoch"].as_u64()).collect();
        assert_eq!(epochs, [Some(1), Some(3), Some(4)]);
        assert!(
            events[1]["loss"].as_f64() < events[0]["loss"].as_f64()
                && events[0]["accuracy"].is_null()
        );
    }
}

#[test]
fn digits_reach_98_percent_accuracy() {
    let config = repository("configs/digits.toml");
    let args = ["--config", config.to_str().unwrap(), "--nproc-per-node=2", "--val-fraction=0.2"];
    let last = validations(&args).pop().unwrap();
    assert!(last["accuracy"].as_f64() >= Some(0.98), "{last}");
}

#[test]
fn metrics_and_tensorboard_change_no_bit_and_cover_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (board, lines) = (path("board"), path("numbers/metrics.jsonl"));
    let plain = ["--max-epochs=2", "--val-fraction=0.1", "--max-grad-norm=1"];
    let more = ["--log-every=20", "--tensorboard", &board, "--metrics", &lines];
    let flags = [&plain[..], &more].concat();
    let with = end(&flags);
    assert_eq!(with["parameters_hash"], hash(&plain));
    let text = fs::read_to_string(&lines).unwrap();
    let events = events(&text);
    let of = |kind: &str| events.iter().filter(move |it| it["event"] == kind).collect::<Vec<_>>();
    // 1844 samples a rank, 58 steps an epoch: after 20, 40 and 58.
    let steps: Vec<_> = of("train").iter().map(|it| it["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [20, 40, 58, 78, 98, 116]);
    assert_eq!(of("validation").len(), 2);
    // What was told of an epoch is its mean, taken together.
    let told: f64 = of("train")[3..]
        .iter()
        .zip([20., 20., 18.])
        .map(|(it, steps)| it["loss"].as_f64().unwrap() * if steps == 18. { 17.625 } else { steps })
        .sum();
    let loss = with["loss"].as_f64().unwrap();
    assert!((told / 57.625 - loss).abs() < 1e-9 * loss, "{told} {loss}");
    for event in of("train") {
        assert!(event["grad_norm"].as_f64() > Some(0.), "{event}");
        assert_eq!(event["lr"], 0.001);
    }
    let files: Vec<_> = fs::read_dir(&board).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "by rank 0 alone");
    assert!(files[0].to_str().unwrap().contains("events.out.tfevents."));
}

#[test]
fn best_validation_is_reported_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--dataset=digits", "--nproc-per-node=2", "--val-fraction=0.2", "--max-epochs=2"];
    let end_of = |more: &[&str]| {
        let (_, stderr) = run_command_to(0, program_in(&folder, &[&args[..], more].concat()));
        (stderr.lines().last().unwrap().to_string(), stderr)
    };
    let (best, stderr) = end_of(&["--loss=cross-entropy", "--model=mlp", "--lr=0.1"]);
    assert!(best.starts_with("ddp-mp: best: epoch 1, loss "), "{best}");
    assert!(best.contains(", accuracy ") && best.ends_with(" %"), "{best}");
    assert!(!stderr.contains("treats their numbers as values"), "{stderr}");
    let (best, stderr) = end_of(&["--checkpoint-dir=run"]);
    assert!(best.ends_with(" (run/best)"), "{best}");
    let note = "digits has classes, and --loss mse treats their numbers as values; --loss cross-entropy treats them \
        as classes";
    assert!(stderr.contains(note), "{stderr}");
}

#[test]
fn activation_flag_applies_to_the_whole_model() {
    for model in
        some_of([&["--model=mlp"][..], &["--model=cnn", "--in-features=64", "--num-samples=64"]], 1)
    {
        let of = |name: &str| hash(&[model, &[&format!("--activation={name}")]].concat());
        let all = ["relu", "tanh", "gelu", "sigmoid"].map(of);
        assert_eq!(all[0], hash(model), "the default");
        for (number, one) in all.iter().enumerate() {
            assert!(!all[..number].contains(one), "{all:?}");
        }
    }
}

#[test]
fn flags_that_change_the_schedule_change_no_bit() {
    let expected = hash(&["--model=mlp"]);
    for flags in [
        &["--no-overlap"][..],
        &["--static-graph", "--num-workers=3", "--prefetch-factor=1"],
        &["--find-unused-parameters", "--check-replicas-every=3"],
    ] {
        assert_eq!(hash(&[&["--model=mlp"], flags].concat()), expected, "{flags:?}");
    }
    // With DataParallel, rank 0 has sent its parameters before they are compared.
    run_to(0, &["--strategy=dp", "--check-replicas-every=3"]);
    assert_ne!(hash(&["--model=mlp", "--comm-hook=bf16"]), expected);
    let end = end(&["--model=mlp", "--bucket-cap-mb=0.001"]);
    assert_eq!(end["parameters_hash"], expected);
    assert!(end["bucket_bytes"].as_array().unwrap().len() > 1, "{end}");
    assert!(end["bytes_sent_by_rank"][1].as_u64() > Some(0) && end["overlapped"] == 0.0, "{end}");
    assert!(end["communication_us"].as_f64() < end["backward_us"].as_f64(), "{end}");
}

#[test]
fn epochs_that_end_before_max_steps_are_named() {
    let (_, stderr) = run_to(0, &["--nproc-per-node=2", "--num-samples=256", "--max-steps=9"]);
    let expected = "has ended after 4 steps, before --max-steps 9, because of --max-epochs 1\n";
    assert!(stderr.ends_with(expected), "{stderr}");
    for more in ["--max-steps=4", "--max-steps=3"] {
        let (_, _, stderr) = run(&["--nproc-per-node=2", "--num-samples=256", more]);
        assert!(!stderr.contains("before --max-steps"), "{more}: {stderr}");
    }
}

#[test]
fn env_shows_the_origin_of_each_option() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.toml");
    fs::write(&file, "lr = 0.5\nbatch_size = 8\nhidden = [4, 2]\nmodel = \"mlp\"\n").unwrap();
    let path = file.to_str().unwrap();
    let listed = |args: &[&str]| {
        let (stdout, _) = run_to(0, &[&["env"], args].concat());
        stdout.rsplit("\n\n").next().unwrap().to_owned()
    };
    let given = listed(&["--config", path, "--lr=0.1", "--timeout=90"]);
    let rows: Vec<(&str, &str)> = given
        .lines()
        .map(|row| row.split_once('#').unwrap())
        .map(|(a, b)| (a.trim(), b.trim()))
        .collect();
    let expected = [
        ("batch_size = 8", path),
        ("model = \"mlp\"", path),
        ("hidden = [4, 2]", path),
        ("lr = 0.1", "flag"),
        ("timeout = \"1m 30s\"", "flag"),
    ];
    assert_eq!(rows, expected);
    let all = listed(&["--all", "--config", path, "--lr=1e-300", "--timeout=90"]);
    assert!(all.contains("\nseed = 0  ") && all.contains("# max_steps is not set"), "{all}");
    assert!(all.contains("\nlr = 1e-300  "), "{all}");
    assert_eq!(listed(&[]), "all options have their defaults; --all lists them\n");
    let (stdout, _) = under_torchrun(0, "env");
    assert!(
        stdout.contains("\n# master_port = 29500 ") && stdout.contains(" # torchrun\n"),
        "{stdout}"
    );
}

/// The first epoch takes longer than two seconds.
#[test]
fn long_epoch_shows_the_step_through_a_pipe() {
    let slow = "--inject-fault=slow=250ms:rank=0,at=step,step=0";
    let args = ["--nproc-per-node=2", "--max-steps=12", slow];
    // `run` would leave these lines out.
    let printed = |args: &[&str]| {
        let output = program(args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        assert!(output.status.success(), "{output:?}");
        (text(output.stdout), text(output.stderr))
    };
    let (stdout, stderr) = printed(&args);
    assert!(stderr.contains("ddp-mp: step ") && stderr.contains(" of 12, about "), "{stderr}");
    assert!(!stdout.contains("step "), "{stdout}");
    let (_, stderr) = printed(&[&args[..], &["--quiet"]].concat());
    assert!(!stderr.contains("step "), "{stderr}");
}

#[test]
fn kill_among_threads_says_what_it_ends() {
    let fault = "--inject-fault=kill:rank=1,at=step,step=0";
    for (spawn, told) in [("threads", true), ("processes", false)] {
        let (code, _, stderr) = run(&["--nproc-per-node=2", fault, &format!("--spawn={spawn}")]);
        assert_ne!(code, Some(0), "{stderr}");
        let note = "ends all 2 ranks of the process of rank 1 without a report";
        let found = stderr.contains(note) && stderr.contains("with --spawn=processes it ends one");
        assert_eq!(found, told, "{stderr}");
    }
}
