//! What the tests share: running ranks, running the program.

use std::borrow::Borrow;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, Read};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ddp_mp::ffi::fork_rng;
use ddp_mp::launch::SharedMemory;
use ddp_mp::{
    App, Backend, DdpOptions, DistributedDataParallel, ProcessGroup, Rank, Spawn, SpawnError,
};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde_json::Value;
use tch::Tensor;
use tch::nn::{self, Linear, LinearConfig, VarStore};
use wait_timeout::ChildExt;

/// Long enough for a machine under load, short enough to end a hang.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(600);

/// Returns a linear layer. It draws its values in turn with other tests: all threads have one generator, and some tests
/// compare what they draw from it.
pub(crate) fn linear<'a>(path: impl Borrow<nn::Path<'a>>, inputs: i64, outputs: i64) -> Linear {
    fork_rng(0, || nn::linear(path, inputs, outputs, LinearConfig::default())).unwrap()
}

/// Runs `f` on `world_size` ranks in a group, and returns what each rank returned, in their order.
pub(crate) fn try_ranks<T: Send + 'static>(
    world_size: usize,
    f: impl Fn(&Rank, Rc<ProcessGroup>) -> anyhow::Result<T> + Send + Sync + 'static,
) -> Result<Vec<T>, Box<SpawnError>> {
    Spawn::new(world_size)
        .threads_per_rank(1)
        .timeout(TIMEOUT)
        .run(move |rank| f(rank, rank.init_process_group(Backend::Threaded)?))
}

/// As [`try_ranks`], for ranks that must not fail.
pub(crate) fn ranks<T: Send + 'static>(
    world_size: usize,
    f: impl Fn(&Rank, Rc<ProcessGroup>) -> anyhow::Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    try_ranks(world_size, f).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns parameters of ones with these names, all of one shape, and their model, wrapped.
pub(crate) fn wrapped<const N: usize>(
    group: &Rc<ProcessGroup>,
    names: [&str; N],
    shape: &[i64],
    options: DdpOptions,
) -> ddp_mp::Result<([Tensor; N], DistributedDataParallel<()>)> {
    let vs = VarStore::new(group.device());
    let parameters = names.map(|name| vs.root().var(name, shape, nn::Init::Const(1.)));
    Ok((parameters, DistributedDataParallel::new((), &vs, group.clone(), options)?))
}

/// Returns the options that give each bucket `mb` MiB.
pub(crate) fn buckets_of(mb: f64) -> DdpOptions {
    DdpOptions { bucket_cap_mb: mb, first_bucket_mb: mb, ..DdpOptions::default() }
}

/// The text of a mismatch without the lines of this file at which the ranks have made their calls, each of which has one.
pub(crate) fn without_lines(text: &str, file: &str) -> String {
    let calls = text.matches(" called ").count();
    let place = format!(" at {file}:");
    let mut parts = text.split(&place);
    let mut rest = parts.next().expect("there is always one").to_owned();
    let mut lines = 0;
    for part in parts {
        rest += part.trim_start_matches(|it: char| it.is_ascii_digit());
        lines += 1;
    }
    assert!(lines >= calls.max(1), "{text}");
    rest
}

/// By what the program would take the tests' own launcher for its own.
const LAUNCHERS: &str = "\
    OMP_NUM_THREADS SLURM_STEP_ID RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMPI_COMM_WORLD_RANK \
    MPI_LOCALRANKID PALS_RANKID PMI_RANK SLURM_JOB_ID PET_NNODES MV2_COMM_WORLD_RANK \
    JSM_NAMESPACE_RANK FLUX_TASK_RANK OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY \
    DDP_MP_LEFT_OUT";

/// The program in the folder of the repository, seeing no GPU, with nothing of the tests' environment that it would react to.
/// It ends with the thread that starts it: a test that fails leaves nothing behind that would slow the others.
pub(crate) fn program(args: &[&str]) -> Command {
    let mut command = Command::new(program_path());
    if repository("").exists() {
        command.current_dir(repository(""));
    }
    without_launcher(command.args(args)).env_remove("RUST_BACKTRACE");
    let chooses = args.iter().any(|arg| arg.starts_with("--shared-memory"));
    if shared_memory() == SharedMemory::Off && args.contains(&"--spawn=processes") && !chooses {
        command.arg("--shared-memory=off");
    }
    command.stdin(Stdio::null());
    let prepare = || {
        // nohup has the tests ignore SIGHUP, and a script that starts them in the background SIGINT.
        for signal in [libc::SIGHUP, libc::SIGINT] {
            // SAFETY: the signal is valid, and no handler is installed.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
    };
    // SAFETY: between fork and exec this makes system calls alone.
    unsafe { command.pre_exec(prepare) };
    command
}

/// As [`program`], in this folder.
pub(crate) fn program_in(folder: impl AsRef<Path>, args: &[&str]) -> Command {
    let mut command = program(args);
    command.current_dir(folder);
    command
}

/// Returns the path of the program. Panics if it is older than the library: cargo builds a program with the tests of its own
/// package only, and these are a package of their own.
pub(crate) fn program_path() -> PathBuf {
    // On another machine than the one that has built the tests it lies elsewhere.
    if let Some(path) = std::env::var_os("DDP_MP_PROGRAM") {
        return path.into();
    }
    let tests = std::env::current_exe().unwrap();
    let built = tests.ancestors().nth(2).expect("cargo puts tests into a folder of their own");
    let program = built.join("ddp-mp");
    let age = |file: &Path| fs::metadata(file).and_then(|file| file.modified()).ok();
    let is_current = age(&program) >= age(&built.join("libddp_mp.rlib"));
    assert!(is_current, "{} is older than the library: run `make build` first", program.display());
    program
}

/// The program, seeing the GPUs that the tests see.
pub(crate) fn program_on_gpus(args: &[&str]) -> Command {
    let mut command = program(args);
    match std::env::var_os("CUDA_VISIBLE_DEVICES") {
        Some(devices) => command.env("CUDA_VISIBLE_DEVICES", devices),
        None => command.env_remove("CUDA_VISIBLE_DEVICES"),
    };
    command
}

/// Has a process see no GPU, and no launcher.
pub(crate) fn without_launcher(command: &mut Command) -> &mut Command {
    for name in words(LAUNCHERS) {
        command.env_remove(name);
    }
    command.env("CUDA_VISIBLE_DEVICES", "")
}

/// Gives a process the variables that torchrun gives it: it is number `process` of `count`.
pub(crate) fn as_torchrun(command: &mut Command, process: usize, count: usize, port: u16) {
    let [process, count, port] = [process, count, port.into()].map(|it| it.to_string());
    command.envs([("RANK", &process), ("LOCAL_RANK", &process), ("MASTER_PORT", &port)]);
    command.envs([("WORLD_SIZE", &count), ("LOCAL_WORLD_SIZE", &count)]);
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("OMP_NUM_THREADS", "1")]);
}

/// As [`program`], after the shell has set `limit`, such as `ulimit -n 16`.
pub(crate) fn program_under(limit: &str, args: &[&str]) -> Command {
    let program = program(args);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{limit} && exec \"$0\" \"$@\"")]);
    command.arg(program.get_program()).args(program.get_args()).stdin(Stdio::null());
    in_the_environment_of(&program, command)
}

/// Has `command` run with the variables of `program`.
pub(crate) fn in_the_environment_of(program: &Command, mut command: Command) -> Command {
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Runs the program, and returns its exit code, stdout and stderr, as [`without_progress`].
pub(crate) fn run(args: &[&str]) -> (Option<i32>, String, String) {
    run_command(program(args))
}

/// As [`run`]; panics if it does not end by itself.
pub(crate) fn run_command(mut command: Command) -> (Option<i32>, String, String) {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("it starts");
    let output = join_named(vec![(format!("{command:?}"), child)]).remove(0);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), without_progress(&text(output.stderr)))
}

/// The words of a command line without spaces in them.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// As [`run`], for a run that must end with this exit code: returns its stdout and stderr.
#[track_caller]
pub(crate) fn run_to(code: i32, args: &[&str]) -> (String, String) {
    run_command_to(code, program(args))
}

/// As [`run_command`], for a command that must end with this exit code: returns its stdout and stderr.
#[track_caller]
pub(crate) fn run_command_to(code: i32, command: Command) -> (String, String) {
    let args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let (found, stdout, stderr) = run_command(command);
    assert_eq!(found, Some(code), "{args:?}: {stdout}{stderr}");
    (stdout, stderr)
}

/// Runs the program with wrong input, which it must refuse before it prints a result: returns its stderr.
#[track_caller]
pub(crate) fn run_refused(args: &[&str]) -> String {
    let (stdout, stderr) = run_to(2, args);
    assert_eq!(stdout, "", "{args:?}: {stderr}");
    stderr
}

/// The program as its `main` makes it.
pub(crate) fn ddp_mp_app() -> App {
    App::new("ddp-mp", env!("CARGO_PKG_VERSION")).course()
}

/// What is said before anything is run: an error, unless the flags are accepted.
pub(crate) fn said(args: impl IntoIterator<Item = OsString>) -> Option<String> {
    let args = ["ddp-mp".into()].into_iter().chain(args);
    match ddp_mp_app().config_of(args) {
        Ok(_) => None,
        Err(ddp_mp::Error::Input { problem: text, .. }) => Some(text),
        Err(other) => panic!("no wrong input: {other}"),
    }
}

/// The error of a command line that must be refused. The program runs only where reading the line finds nothing.
#[track_caller]
pub(crate) fn refused(line: &str) -> String {
    let args = words(line);
    said(args.iter().map(OsString::from)).unwrap_or_else(|| run_refused(&args))
}

/// Checks that these command lines are refused with these texts.
#[track_caller]
pub(crate) fn run_all_refused(cases: &[(&str, &str)]) {
    for (line, reason) in cases {
        let error = refused(line);
        assert!(error.contains(reason), "{line}: {error}");
    }
}

/// The JSON objects of what a run has printed, one in each line.
pub(crate) fn events(stdout: &str) -> Vec<Value> {
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The last of the [`events`]: `end`, or the failure.
pub(crate) fn last_event(stdout: &str) -> Value {
    serde_json::from_str(stdout.lines().last().unwrap()).unwrap()
}

/// The [`events`] of a run that must end well.
#[track_caller]
pub(crate) fn run_events(args: &[&str]) -> Vec<Value> {
    events(&run_to(0, &[args, &["--log-format=json"]].concat()).0)
}

/// The last of the [`events`] of a run that must end well.
#[track_caller]
pub(crate) fn run_end(args: &[&str]) -> Value {
    run_events(args).pop().expect("it has events")
}

/// Returns what the program has printed, without the lines on the time that is left, which only a slow run has.
pub(crate) fn without_progress(stderr: &str) -> String {
    stderr.split_inclusive('\n').filter(|line| !line.ends_with(" s left\n")).collect()
}

/// Waits for a process and returns how it ended. Panics if it does not end by itself.
pub(crate) fn output(child: Child) -> Output {
    join(vec![child]).remove(0)
}

/// Sends a signal, such as `TERM`, to a process. The shell does it: Debian's minimal system has no program `kill`.
pub(crate) fn send(signal: &str, process: u32) {
    let (signal, process) = (format!("-{signal}"), process.to_string());
    let status = Command::new("sh").args(["-c", "kill \"$0\" \"$1\"", &signal, &process]).status();
    assert!(status.unwrap().success(), "{signal} {process}");
}

/// Returns about `kept` of the cases, evenly spaced; all of them in `make test-all`, but for its run over TCP.
pub(crate) fn some_of<T>(all: impl IntoIterator<Item = T>, kept: usize) -> Vec<T> {
    let all: Vec<T> = all.into_iter().collect();
    let step = if runs_every_case() { 1 } else { all.len().div_ceil(kept).max(1) };
    all.into_iter().step_by(step).collect()
}

/// Returns how the processes of a test exchange tensors: through memory, or over TCP in the second run of `make test-all`.
pub(crate) fn shared_memory() -> SharedMemory {
    match std::env::var_os(TCP) {
        Some(_) => SharedMemory::Off,
        None => SharedMemory::Require,
    }
}

/// The variable with which the tests of processes use TCP.
pub(crate) const TCP: &str = "DDP_MP_TESTS_TCP";

/// Returns whether the tests with many cases run all of them: `make test-all`.
pub(crate) fn runs_every_case() -> bool {
    std::env::var_os("DDP_MP_TESTS").is_some_and(|tests| tests == "all")
}

/// Runs `check` on every case, four at a time, because most of them wait. Panics if one of them does.
pub(crate) fn in_parallel<T: Sync>(cases: &[T], check: impl Fn(&T) + Sync) {
    in_parallel_by(4, cases, check);
}

/// Runs `check` on every case, `at_once` at a time.
pub(crate) fn in_parallel_by<T: Sync>(at_once: usize, cases: &[T], check: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            check(case);
        }
    };
    thread::scope(|scope| (0..at_once).for_each(|_| drop(scope.spawn(work))));
}

/// Returns a port that nobody else takes before its server does: the system gives none of these to connections, no other
/// test program has ports of this block, and none of the last 500 calls has returned it.
pub(crate) fn free_port() -> u16 {
    static BLOCK: LazyLock<PortBlock> = LazyLock::new(PortBlock::take);
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    // Test programs that run one after the other begin at different ports.
    let begin = std::process::id() as usize * 97;
    for _ in 0..PortBlock::LEN {
        let call = begin + CALLS.fetch_add(1, Ordering::Relaxed);
        let port = BLOCK.first + (call % usize::from(PortBlock::LEN)) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("all ports from {} to {} are taken", BLOCK.first, BLOCK.first + PortBlock::LEN - 1);
}

/// Ports that this process has for itself, until it ends.
struct PortBlock {
    first: u16,
    /// A name that the system lets one process have.
    _name: UnixListener,
}

impl PortBlock {
    const LEN: u16 = 500;

    /// Takes a block that no other test program has. They lie below the ports of connections, and below the port that the
    /// program takes by default.
    fn take() -> Self {
        let take = |first: u16| {
            let name = SocketAddr::from_abstract_name(format!("ddp-mp test ports {first}")).ok()?;
            Some(Self { first, _name: UnixListener::bind_addr(&name).ok()? })
        };
        let mut blocks = (10_000..29_000).step_by(Self::LEN.into());
        blocks.find_map(take).expect("fewer than 38 test programs run")
    }
}

/// Waits for all, and returns how they ended. Panics if one does not end by itself.
pub(crate) fn join(children: Vec<Child>) -> Vec<Output> {
    let named = |child: Child| (format!("process {}", child.id()), child);
    join_named(children.into_iter().map(named).collect())
}

/// As [`join`], with a name for each process.
fn join_named(children: Vec<(String, Child)>) -> Vec<Output> {
    let reading = |(name, mut child): (String, Child)| {
        let stdout = child.stdout.take().map(Reading::of);
        let stderr = child.stderr.take().map(Reading::of);
        (name, child, stdout, stderr)
    };
    let mut running: Vec<_> = children.into_iter().map(reading).collect();
    let late = running.iter_mut().position(|(_, child, ..)| {
        child.wait_timeout(TIMEOUT).expect("it can be waited for").is_none()
    });
    if let Some(late) = late {
        running.iter_mut().for_each(|(_, child, ..)| drop(child.kill()));
        let (name, _, stdout, stderr) = &running[late];
        let printed = [stdout, stderr].map(|pipe| pipe.as_ref().map(Reading::so_far));
        panic!("{name} ran longer than {TIMEOUT:?}; it has printed {printed:?}");
    }
    let read = |pipe: Option<Reading>| pipe.map_or_else(Vec::new, Reading::end);
    let end = |(_, mut child, stdout, stderr): (_, Child, _, _)| {
        let status = child.wait().expect("it has ended");
        Output { status, stdout: read(stdout), stderr: read(stderr) }
    };
    running.into_iter().map(end).collect()
}

/// Reads lines until they have this part, and returns them.
pub(crate) fn read_until(part: &str, pipe: &mut impl BufRead) -> String {
    let mut text = String::new();
    while !text.contains(part) {
        assert!(pipe.read_line(&mut text).unwrap() > 0, "{text}");
    }
    text
}

/// What a process prints, read on a thread of its own: a process would wait for its reader once the pipe is full.
pub(crate) struct Reading {
    bytes: Arc<Mutex<Vec<u8>>>,
    thread: JoinHandle<()>,
}

impl Reading {
    pub(crate) fn of(mut pipe: impl Read + Send + 'static) -> Self {
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let read = bytes.clone();
        let read = move || {
            let mut part = [0; 1 << 12];
            loop {
                match pipe.read(&mut part).expect("its output can be read") {
                    0 => return,
                    count => read.lock().unwrap().extend(&part[..count]),
                }
            }
        };
        Self { bytes, thread: thread::Builder::new().spawn(read).expect("a thread can be started") }
    }

    /// Waits until all that could print have ended.
    pub(crate) fn end(self) -> Vec<u8> {
        self.thread.join().unwrap();
        std::mem::take(&mut *self.bytes.lock().unwrap())
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().unwrap()).into_owned()
    }
}

/// All files below `folder`, sorted.
pub(crate) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    files
}

/// A file of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is a folder of it").join(path)
}

/// Checks that the generated file `path` of the repository is `expected`. With `TRYCMD=overwrite` it is made anew.
pub(crate) fn assert_generated(path: &str, expected: &str) {
    let file = repository(path);
    if std::env::var_os("TRYCMD").is_some_and(|it| it == "overwrite") {
        fs::write(&file, expected).unwrap();
    }
    let found = fs::read_to_string(&file).unwrap_or_default();
    let differs = found.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    assert!(found == expected, "make {path} anew, as its first lines say: {differs:?}");
}
