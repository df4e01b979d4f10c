//! Files that a run writes: never over its inputs, whole after a kill, and cleaned up on a full disk.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{
    events, program, program_in, program_under, run_command, run_command_to, run_to, some_of, words,
};

const SHORT: [&str; 2] = ["--nproc-per-node=2", "--num-samples=640"];

/// A short run in `folder` with flags that one line holds.
fn short_in(folder: &Path, flags: &str) -> Command {
    program_in(folder, &[&SHORT[..], &words(flags)].concat())
}

/// Runs it; it must end with this exit code.
fn run_in(code: i32, folder: &Path, flags: &str) -> (String, String) {
    run_command_to(code, short_in(folder, flags))
}

/// Runs it with wrong input: returns stderr.
fn run_refused_in(folder: &Path, flags: &str) -> String {
    let (stdout, stderr) = run_in(2, folder, flags);
    assert_eq!(stdout, "", "{flags}: {stderr}");
    stderr
}

fn make_pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// The names of all files and folders below `folder`, sorted.
fn names_in(folder: &Path) -> Vec<String> {
    let mut find = Command::new("find");
    let found = find.arg(folder).args(["-mindepth", "1"]).output().unwrap().stdout;
    let mut names: Vec<String> =
        String::from_utf8(found).unwrap().lines().map(String::from).collect();
    names.sort();
    names
}

#[test]
fn output_path_equal_to_an_input_or_output_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("c.toml"), "lr = 0.1\n").unwrap();
    fs::write(at("d.csv"), "1,2\n3,4\n5,6\n").unwrap();
    fs::create_dir_all(at("sub/idx")).unwrap();
    fs::write(at("sub/idx/train-labels-idx1-ubyte"), "labels").unwrap();
    symlink("c.toml", at("link")).unwrap();
    symlink("new.json", at("dangling")).unwrap();
    symlink(".", at("here")).unwrap();
    fs::hard_link(at("d.csv"), at("hard")).unwrap();
    run_in(0, folder.path(), "--checkpoint-dir=run --max-epochs=1");
    let before = names_in(folder.path());
    // Of each, the first flag is refused, because the second has the same file.
    let flags = [
        "--metrics=c.toml --config=c.toml",
        "--metrics=sub/../c.toml --config=link",
        "--metrics=here/here/c.toml --config=c.toml",
        "--trace=c.toml --config=c.toml",
        "--tensorboard=c.toml --config=c.toml",
        "--checkpoint-dir=c.toml/run --config=c.toml",
        "--metrics=d.csv --dataset=csv:d.csv",
        "--report=d.csv --dataset=csv:hard",
        "--metrics=hard --dataset=npy:x,d.csv",
        "--metrics=./d.csv --dataset=safetensors:d.csv",
        "--metrics=here/sub/idx/train-labels-idx1-ubyte --dataset=idx:sub/idx",
        "--metrics=d.csv --init-from=d.csv",
        "--metrics=run/step-00000010/model.safetensors --init-from=run",
        "--metrics=run/step-00000010/trainer.json --resume=run/step-00000010",
        "--metrics=run/latest --resume=run/latest",
        "--tensorboard=run/step-00000010/board --resume=run/latest",
        "--checkpoint-dir=run/step-00000010 --resume=run",
        "--metrics=new.json --trace=new.json",
        "--report=here/new.json --trace=dangling",
        "--report=new --trace=new/trace.json",
        "--tensorboard=new --metrics=new",
        "--prometheus=new --metrics=new",
        "--prometheus=c.toml --config=c.toml",
        "--tensorboard=new/board --metrics=new",
        "--checkpoint-dir=new --metrics=new",
        "--checkpoint-dir=new --metrics=new/latest",
        "--checkpoint-dir=new --metrics=here/new/.lock",
        "--checkpoint-dir=new --report=new/step-00000001/page.html",
        "--checkpoint-dir=new --tensorboard=new/.unfinished/board",
        "--metrics=t.1.json --trace=t.json --spawn=processes",
    ];
    for flags in some_of(flags, 4) {
        let stderr = run_refused_in(folder.path(), flags);
        let mut names = flags.split_whitespace().map(|flag| flag.split('=').next().unwrap());
        let (one, other) = (names.next().unwrap(), names.next().unwrap());
        let is_told = stderr.contains(&format!("{one}: ")) && stderr.contains(other);
        assert!(is_told, "{flags}: {stderr}");
        assert_eq!(names_in(folder.path()), before, "{flags}: {stderr}");
    }
    assert_eq!(fs::read_to_string(at("c.toml")).unwrap(), "lr = 0.1\n");
    assert_eq!(fs::read_to_string(at("d.csv")).unwrap(), "1,2\n3,4\n5,6\n");
    // In a folder beside what belongs there is room for others.
    let beside = "--checkpoint-dir=all --metrics=all/metrics.jsonl --tensorboard=all/board --trace=all/trace.json \
                  --report=all/page.html --config=c.toml";
    for again in ["", " --resume=auto --max-epochs=2"] {
        run_in(0, folder.path(), &format!("{beside}{again}"));
    }
}

#[test]
fn file_of_stdout_is_refused_as_another_output() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let out = || Stdio::from(fs::File::create(&path).unwrap());
    for flag in ["--trace=out", "--report=out", "--trace=/dev/stdout"] {
        let output = short_in(folder.path(), flag).stdout(out()).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flag}: {stderr}");
        assert!(stderr.contains("stdout of this process goes to that file"), "{stderr}");
    }
    // Metrics come between the lines that are there anyway, and over none of them.
    let flags = ["--metrics=/dev/stdout", "--log-every=1", "--log-format=json"];
    let mut command = program(&[&SHORT[..], &flags].concat());
    assert!(command.stdout(out()).status().unwrap().success());
    let text = fs::read_to_string(&path).unwrap();
    let events = events(&text);
    let count = |kind: &str| events.iter().filter(|it| it["event"] == kind).count();
    assert_eq!(["start", "train", "epoch", "end"].map(count), [1, 10, 2, 1], "{text}");
}

/// The records of a TensorBoard file; panics if the last is not whole.
fn records(path: &Path) -> usize {
    let bytes = fs::read(path).unwrap();
    let (mut rest, mut count) = (&bytes[..], 0);
    while !rest.is_empty() {
        let len = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        rest = &rest[8 + 4 + len + 4..];
        count += 1;
    }
    count
}

#[test]
fn killed_run_leaves_whole_lines_and_records() {
    let folder = tempfile::tempdir().unwrap();
    let flags = "--log-every=1 --metrics=metrics --tensorboard=board --inject-fault=kill:rank=0,at=step,step=7 \
                 --model=mlp --max-grad-norm=1";
    let (code, _, stderr) = run_command(short_in(folder.path(), flags));
    assert_eq!(code, None, "killed: {stderr}");
    let text = fs::read_to_string(folder.path().join("metrics")).unwrap();
    let rows = events(&text);
    let steps: Vec<u64> = rows.iter().map(|it| it["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6, 7]);
    assert!(text.ends_with('\n'));
    let board = fs::read_dir(folder.path().join("board")).unwrap().next().unwrap().unwrap();
    // The version, and for each step loss, lr, gradient norm, time and speed.
    assert_eq!(records(&board.path()), 1 + 7 * 5);
}

#[test]
fn pipes_and_devices_work_or_are_refused_without_a_hang() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    make_pipe(&at("pipe"));
    fs::write(at("mine.csv"), "1,2\n").unwrap();
    fs::create_dir_all(at("damaged/step-00000001")).unwrap();
    make_pipe(&at("damaged/step-00000001/trainer.json"));
    make_pipe(&at("latest"));
    symlink("loop", at("loop")).unwrap();
    // A file that is larger than any disk, and takes no room.
    fs::File::create(at("zeros.csv")).unwrap().set_len(1 << 40).unwrap();
    fs::create_dir(at("idx")).unwrap();
    for part in ["images-idx3", "labels-idx1"] {
        make_pipe(&at(&format!("idx/train-{part}-ubyte.gz")));
    }
    for (flags, problem) in some_of(
        [
            ("--config=pipe", "--config pipe: nothing was written to this pipe within 10 s"),
            ("--config=/dev/zero", "--config /dev/zero: this is longer than 1048576 bytes"),
            ("--config=.", "--config .: Is a directory"),
            ("--init-from=pipe", "--init-from: pipe: this is a pipe; use a regular file"),
            ("--init-from=/dev/zero", "--init-from: /dev/zero: this is a device"),
            ("--init-from=latest", "--init-from: latest: this is a pipe"),
            ("--resume=pipe", "checkpoint pipe: this is a pipe, but a checkpoint is a folder"),
            ("--resume=latest", "checkpoint latest: this is a pipe"),
            (
                "--resume=zeros.csv/step-00000001",
                "checkpoint zeros.csv/step-00000001: Not a directory",
            ),
            ("--resume=loop", "loop: Too many levels of symbolic links"),
            ("--resume=/dev/zero", "checkpoint /dev/zero: this is a device, but a checkpoint is"),
            ("--resume=damaged", "trainer.json cannot be read: this is a pipe"),
            ("--resume=damaged/step-00000001", "trainer.json cannot be read: this is a pipe"),
            ("--dataset=csv:pipe", "pipe: this is a pipe"),
            ("--dataset=csv:zeros.csv", "zeros.csv: it contains a zero byte, so it is not text"),
            ("--config=/dev/null --spawn=processes", "--config: /dev/null can be read only once"),
            ("--config=/dev/null --max-restarts=1", "--config: /dev/null can be read only once"),
            ("--dataset=csv:/dev/zero", "/dev/zero: this is a device"),
            ("--dataset=npy:pipe,pipe", "pipe: this is a pipe"),
            ("--dataset=safetensors:/dev/random", "/dev/random: this is a device"),
            ("--dataset=idx:idx", "idx/train-images-idx3-ubyte.gz: this is a pipe"),
            ("--metrics=pipe", "--metrics pipe: this pipe has no reader; start its reader first"),
            ("--metrics=.", "--metrics .: Is a directory"),
            ("--trace=pipe", "this is a pipe"),
            ("--trace=idx", "Is a directory"),
            ("--report=/dev/zero", "this is a device"),
            ("--report=..", "that is not a file name"),
            ("--trace=.. --spawn=processes", "that is not a file name"),
            ("--trace=mine.csv", "this program did not write that file"),
            ("--report=mine.csv", "this program did not write that file"),
            ("--prometheus=pipe", "--prometheus pipe: this is a pipe"),
            ("--tensorboard=pipe", "--tensorboard pipe: "),
            ("--checkpoint-dir=pipe", "pipe cannot be used for checkpoints"),
            ("--trace=new/", "--trace new/: that is not a file name"),
            ("--prometheus=new/", "--prometheus new/: that is not a file name"),
            ("--keep=new/", "--keep new/: that is not a file name"),
            ("--keep=loop", "--keep loop: Too many levels of symbolic links"),
            ("--metrics=loop --checkpoint-dir=new", "--metrics loop: Too many levels"),
            ("--record=mine.csv/x --checkpoint-dir=new", "--record mine.csv/x: Not a directory"),
            ("--tensorboard=loop --checkpoint-dir=new", "--tensorboard loop: Too many levels"),
            ("--trace=/dev/null --spawn=processes", "this is a device"),
        ],
        4,
    ) {
        let stderr = run_refused_in(folder.path(), flags);
        assert!(stderr.contains(problem), "{flags}: {stderr}");
        assert_eq!(fs::read_to_string(at("mine.csv")).unwrap(), "1,2\n", "{flags}");
        assert!(!at("new").exists(), "{flags} leaves a file");
    }
    for flags in
        ["--config=/dev/null", "--metrics=/dev/null", "--record=/dev/null --spawn=processes"]
    {
        run_in(0, folder.path(), flags);
    }
    assert!(!Path::new("/dev/null.0").exists());
}

#[test]
fn config_is_read_from_stdin_and_metrics_written_to_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    make_pipe(&folder.path().join("pipe"));
    // The shell keeps the pipe open, so that neither `cat` nor the program has to be first.
    let script = "exec 3<>pipe; cat <pipe >rows 3>&- & printf 'lr = 0.5\\nlog-every = 1\\n' | \
                  \"$@\" --config /dev/stdin --metrics pipe 3>&-; code=$?; exec 3>&-; wait; exit $code";
    let program = program(&SHORT);
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(program.get_program()).args(program.get_args());
    command.env("CUDA_VISIBLE_DEVICES", "").current_dir(&folder);
    run_command_to(0, command);
    let rows = fs::read_to_string(folder.path().join("rows")).unwrap();
    assert_eq!(rows.matches("\"lr\":0.5").count(), 10, "{rows}");
}

/// Runs the program in a folder that is full, or whose files may not grow, so that it fails. Returns stderr and what is left.
fn run_out_of_room(setup: &str, flags: &str) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let program = program(&SHORT);
    let script = format!(
        "cd {} && {setup} && \"$@\" {flags}; code=$?; find . -mindepth 1 | sort; tail -qc1 metrics* 2>/dev/null | \
         od -An -c; exit $code",
        folder.path().display()
    );
    let mut command = Command::new("sh");
    if setup.contains("mount ") {
        command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh"]);
    }
    command.args(["-c", &script, "sh"]).arg(program.get_program()).args(program.get_args());
    command.env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
    let (stdout, stderr) = run_command_to(1, command);
    (stderr, stdout)
}

#[test]
fn full_disk_is_reported_and_leaves_no_partial_file() {
    let long = "--log-every=1 --max-epochs=100 >/dev/null";
    let cases = [
        (
            "--model=mlp --hidden=128,128 --checkpoint-dir=run",
            "run/.unfinished/model.safetensors failed",
        ),
        (&*format!("--metrics=metrics {long}"), "writing --metrics metrics"),
        (&*format!("--tensorboard=board {long}"), "writing --tensorboard"),
        ("--trace=trace.json --max-epochs=20", "writing --trace"),
        ("--report=page.html --max-epochs=20", "writing --report"),
        ("--keep=kept --keep-step=3 --model=mlp --hidden=128,128", "kept: "),
        ("--log-format=json --max-epochs=600 >stdout", "writing to stdout"),
    ]
    .map(|(flags, problem)| (flags.to_owned(), problem));
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--mount", "true"]);
    let may_mount = unshare.status().is_ok_and(|it| it.success());
    let limits = [
        ("ulimit -f 64", "File too large (os error 27); raise the limit on file sizes (ulimit -f)"),
        (
            "mkdir full && mount -t tmpfs -o size=48k tmpfs full && cd full",
            "No space left on device (os error 28); free some space, or use another disk",
        ),
    ];
    for (setup, why) in &limits[..if may_mount { 2 } else { 1 }] {
        for (flags, problem) in some_of(&cases, 2) {
            let (stderr, left) = run_out_of_room(setup, flags);
            assert!(stderr.contains(problem) && stderr.contains(why), "{setup}: {flags}: {stderr}");
            for part in [".ddp-mp-", ".unfinished", "trace.json", "page.html", "kept"] {
                assert!(!left.contains(part), "{setup}: {flags}: {left}");
            }
            // The last byte of the metrics is the end of a row.
            assert!(!flags.contains("--metrics") || left.contains("\\n"), "{setup}: {left}");
        }
    }
    let (stderr, _) = run_out_of_room("true", "--metrics=/dev/full");
    assert!(stderr.contains("No space left on device"), "{stderr}");
    run_to(2, &["--trace=/dev/full"]);
    let (stderr, _) = run_out_of_room("ulimit -f 1", "--prometheus=run.prom");
    assert_eq!(stderr.matches("writing --prometheus").count(), 1, "{stderr}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new");
    let limited = program_under("ulimit -f 1", &["new", path.to_str().unwrap()]);
    let (_, stderr) = run_command_to(1, limited);
    assert!(stderr.contains("File too large"), "{stderr}");
}

/// A run makes none of its files before its checkpoint has been read.
#[test]
fn a_refused_checkpoint_leaves_no_file_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    run_in(0, folder.path(), "--checkpoint-dir=run --max-steps=4");
    let outputs = "--trace=made/t --report=made/r --record=made/r.record --metrics=made/m --tensorboard=made/b \
                   --prometheus=made/p.prom";
    for refused in ["--resume=run --seed=7", "--init-from=none --checkpoint-dir=made/c"] {
        let (_, stderr) = run_in(2, folder.path(), &format!("{refused} {outputs}"));
        assert!(!stderr.contains("try '--help'"), "{refused}: {stderr}");
        assert!(!folder.path().join("made").exists(), "{refused}: {stderr}");
    }
}

/// A link may lead to a folder on another disk that is made later.
#[test]
fn folder_behind_a_dangling_link_is_created() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["run", "board", "deep", "rows", "hashes"] {
        symlink(format!("disk/{name}"), folder.path().join(name)).unwrap();
    }
    let flags =
        "--checkpoint-dir=run --tensorboard=board --trace=deep/t --metrics=rows --record=hashes";
    let (_, stderr) = run_in(0, folder.path(), flags);
    for name in ["run/latest", "board", "deep/t", "rows", "hashes"] {
        assert!(folder.path().join("disk").join(name).exists(), "{name}: {stderr}");
    }
    assert!(fs::read_dir(folder.path().join("board")).unwrap().count() > 0);
    assert!(fs::symlink_metadata(folder.path().join("run")).unwrap().is_symlink());
}

/// Folders and files whose names would break a line, or a command of a shell.
#[test]
fn names_with_line_breaks_stay_on_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["trace=t\n.json", "report=r\n.html", "checkpoint-dir=c\n", "metrics=m\n"];
    let mut args: Vec<String> = flags.iter().map(|flag| format!("--{flag}")).collect();
    args.push("--max-steps=2".into());
    let mut command = program(&SHORT);
    command.args(args).current_dir(&folder);
    let (_, stderr) = run_command_to(0, command);
    for note in [
        "the trace is in t\\u000a.json: open it",
        "the report is in r\\u000a.html: open it",
        "saved in c\\u000a; to continue",
    ] {
        assert!(stderr.contains(note), "{note}: {stderr}");
    }
    assert!(stderr.lines().all(|line| line.starts_with("ddp-mp: ")), "{stderr}");
}
