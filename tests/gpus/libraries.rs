//! A machine whose libraries are missing or do not fit is wrong input, told before any rank starts.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs};

use serde_json::Value;

use crate::harness::{as_torchrun, free_port, join, run_command};
use crate::machine::{SHARES_GPUS, libraries, on_gpus};

/// Puts all libraries but `missing` into `folder`.
pub(crate) fn all_but(missing: &str, folder: &Path) {
    for file in fs::read_dir(libraries()).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_file() && name.contains(".so") && !name.starts_with(missing) {
            symlink(&path, folder.join(name)).unwrap();
        }
    }
}

/// Compiles a library from a C program.
fn compile(source: &str, library: &Path) {
    let file = library.with_extension("c");
    fs::write(&file, source).unwrap();
    let mut compiler = Command::new("c++");
    compiler.args(["-shared", "-fPIC", "-x", "c", "-o"]).arg(library).arg(&file);
    assert!(compiler.status().unwrap().success());
}

#[test]
fn missing_libnccl_exits_with_2_and_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    all_but("libnccl", folder.path());
    for args in [
        &["--max-epochs=1"][..],
        &["--backend=nccl"],
        &["--spawn=processes"],
        &["comm"],
        &["bench", "all-reduce"],
    ] {
        let mut command = on_gpus(2, args);
        command.env("LD_LIBRARY_PATH", folder.path());
        let (code, stdout, stderr) = run_command(command);
        assert_eq!((code, &*stdout), (Some(2), ""), "{args:?}: {stderr}");
        let reason = "libnccl was not found (libnccl.so.2: cannot open shared object file";
        assert_eq!(stderr.matches(reason).count(), 1, "{args:?}: {stderr}");
        assert!(stderr.contains("--backend threaded"), "{args:?}: {stderr}");
        assert!(!stderr.contains("failed in"), "{args:?}: {stderr}");
    }
    // The remedy that it names.
    let mut command = on_gpus(2, &["--backend=threaded"]);
    command.env("LD_LIBRARY_PATH", folder.path());
    let (code, _, stderr) = run_command(command);
    assert_eq!(code, Some(0), "{stderr}");
}

/// libtorch_cuda loads the NCCL of its own path. Another one in LD_LIBRARY_PATH must not come beside it.
#[test]
fn nccl_of_libtorch_is_used_whatever_the_library_path_has() {
    let folder = tempfile::tempdir().unwrap();
    let own = libraries().join("libnccl.so.2").canonicalize().unwrap();
    for name in ["libnccl.so", "libnccl.so.2"] {
        fs::copy(&own, folder.path().join(name)).unwrap();
    }
    let folders = [folder.path().into(), libraries().join("with_nccl"), libraries()];
    let folders = env::join_paths(folders).unwrap();
    let run = |args: &[&str]| {
        let mut command = on_gpus(2, args);
        command.env("LD_LIBRARY_PATH", &folders);
        let (code, stdout, stderr) = run_command(command);
        assert_eq!(code, Some(0), "{args:?}: {stderr}");
        stdout
    };
    let report: Value = serde_json::from_str(&run(&["env", "--log-format=json"])).unwrap();
    assert_eq!((&report["nccl"], &report["nccl_problem"]), (&"2.29.7".into(), &Value::Null));
    let file = Path::new(report["nccl_file"].as_str().unwrap()).canonicalize().unwrap();
    assert_eq!(file, own);
    let named = format!("2.29.7 ({})", report["nccl_file"].as_str().unwrap());
    assert!(run(&["--version"]).contains(&named) && run(&["env"]).contains(&named), "{named}");
    run(&["--num-samples=64"]);
}

/// A libtorch may have NCCL inside. Then there is no libnccl.so.2, or it is another one.
#[test]
fn nccl_inside_of_libtorch_is_used() {
    let others = tempfile::tempdir().unwrap();
    all_but("libnccl", others.path());
    for rest in [others.path().to_path_buf(), libraries()] {
        let folders = env::join_paths([libraries().join("static_nccl"), rest]).unwrap();
        let mut command = on_gpus(2, &["--num-samples=64"]);
        command.env("LD_LIBRARY_PATH", &folders);
        let (code, _, stderr) = run_command(command);
        assert_eq!(code, Some(0), "{folders:?}: {stderr}");
        let mut command = on_gpus(2, &["env"]);
        command.env("LD_LIBRARY_PATH", &folders);
        let (_, stdout, _) = run_command(command);
        assert!(stdout.contains("static_nccl/libtorch_cuda.so)"), "{folders:?}: {stdout}");
    }
}

#[test]
fn two_nccls_exit_with_2_and_both_files() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("libother.so");
    compile("int ncclGetVersion(int *version) { *version = 22803; return 0; }", &other);
    let run = |args: &[&str]| {
        let mut command = on_gpus(2, args);
        command.env("LD_PRELOAD", &other);
        run_command(command)
    };
    let own = libraries().join("libnccl.so.2");
    let both = [&own, &other].map(|file| file.to_str().unwrap());
    let (code, stdout, stderr) = run(&["--num-samples=64"]);
    assert_eq!((code, &*stdout), (Some(2), ""), "{stderr}");
    assert!(stderr.contains(&format!("two NCCLs, {} and {}", both[0], both[1])), "{stderr}");
    let (code, stdout, _) = run(&["--version"]);
    assert!(code == Some(0) && stdout.contains("NCCL      unusable: "), "{stdout}");
    let (code, stdout, _) = run(&["env", "--log-format=json"]);
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert!(code == Some(0) && report["nccl"].is_null(), "{stdout}");
    assert!(report["nccl_problem"].as_str().unwrap().contains(both[1]), "{stdout}");
}

#[test]
fn nccl_without_functions_exits_with_2_and_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libnccl.so.2");
    compile("int ncclGetVersion(int *version) { *version = 22907; return 0; }", &file);
    for args in [&["--num-samples=64"][..], &["comm"], &["bench", "all-reduce"]] {
        let mut command = on_gpus(2, args);
        let folders = [folder.path().to_path_buf(), libraries()];
        command.env("LD_LIBRARY_PATH", env::join_paths(folders).unwrap());
        let (code, stdout, stderr) = run_command(command);
        assert_eq!((code, &*stdout), (Some(2), ""), "{args:?}: {stderr}");
        let told = format!("the libnccl in use, {}, has no ncclGetErrorString", file.display());
        assert!(stderr.contains(&told), "{args:?}: {stderr}");
    }
}

#[test]
fn nccl_that_is_too_old_exits_with_2_and_its_version() {
    let mut command = on_gpus(2, &["--max-epochs=1"]);
    command.env("SIM_NCCL_VERSION", "21304");
    let (code, stdout, stderr) = run_command(command);
    assert_eq!((code, &*stdout), (Some(2), ""), "{stderr}");
    assert!(stderr.contains("backend nccl: NCCL 2.13.4 is too old"), "{stderr}");
    assert!(stderr.contains("install 2.14.0 or newer"), "{stderr}");
}

/// The NCCL of torch 2.13, and that of torch 2.15.
#[test]
fn two_processes_share_a_gpu_only_with_an_nccl_that_allows_it() {
    let both = |version: &'static str, switch: Option<&'static str>| {
        let port = free_port();
        let start = |process| {
            let args = ["--backend=nccl", "--nproc-per-node=1", "--max-steps=4", "--model=mlp"];
            let mut command = on_gpus(1, &args);
            as_torchrun(&mut command, process, 2, port);
            command.env("SIM_NCCL_VERSION", version);
            command.envs(switch.map(|value| ("NCCL_MULTI_RANK_GPU_ENABLE", value)));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        join((0..2).map(start).collect())
    };
    const OLD: &str = "NCCL 2.29.7 needs one for each rank (from 2.30.3 on they may share one)";
    for (version, switch, reason) in [
        ("22907", None, OLD),
        ("22907", Some("1"), OLD),
        (
            "23007",
            None,
            "NCCL 2.30.7 needs one for each rank unless NCCL_MULTI_RANK_GPU_ENABLE=1 is set",
        ),
        ("23007", Some("0"), "unless NCCL_MULTI_RANK_GPU_ENABLE=1 is set"),
    ] {
        for output in both(version, switch) {
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{version}, {switch:?}: {stderr}");
            assert!(stderr.contains("have the same GPU") && stderr.contains(reason), "{stderr}");
        }
    }
    for output in both("23007", Some("1")) {
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn threads_that_cannot_share_a_gpu_exit_with_2_and_the_reason() {
    for (count, version, reason) in [
        (
            "2",
            "22907",
            "only 1 GPU is visible, and NCCL 2.29.7 needs one for each rank (from 2.30.3",
        ),
        ("5", "23007", "at most 4 threads can share a GPU, and 5 would"),
    ] {
        let count = format!("--nproc-per-node={count}");
        let mut command = on_gpus(1, &["--backend=nccl", &count]);
        command.envs(SHARES_GPUS).env("SIM_NCCL_VERSION", version);
        let (code, stdout, stderr) = run_command(command);
        assert_eq!((code, &*stdout), (Some(2), ""), "{stderr}");
        assert!(stderr.contains(reason) && stderr.contains("--backend threaded"), "{stderr}");
    }
}

#[test]
fn missing_libtorch_cuda_exits_with_2_and_its_name() {
    let folder = tempfile::tempdir().unwrap();
    all_but("libtorch_cuda", folder.path());
    let mut command = on_gpus(2, &["--nproc-per-node=gpu"]);
    command.env("LD_LIBRARY_PATH", folder.path());
    let (code, stdout, stderr) = run_command(command);
    assert_eq!((code, &*stdout), (Some(2), ""), "{stderr}");
    assert!(stderr.contains("libtorch_cuda"), "{stderr}");
}

#[test]
fn failing_driver_exits_with_2_and_the_reason() {
    let mut command = on_gpus(2, &["--nproc-per-node=gpu"]);
    command.env("SIM_CUINIT_ERROR", "803");
    let (code, stdout, stderr) = run_command(command);
    assert_eq!((code, &*stdout), (Some(2), ""), "{stderr}");
    assert!(stderr.contains("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), "{stderr}");
    let library = libraries().join("libcuda.so.1").canonicalize().unwrap();
    assert!(stderr.contains(library.to_str().unwrap()), "{stderr}");
}

#[test]
fn driver_that_is_too_old_exits_with_2_and_the_one_needed() {
    for (version, is_refused) in [("12080", true), ("13000", false), ("13010", false)] {
        let mut command = on_gpus(2, &["--nproc-per-node=gpu", "--num-samples=64"]);
        command.env("SIM_DRIVER_VERSION", version);
        let (code, _, stderr) = run_command(command);
        assert_eq!(code, Some(if is_refused { 2 } else { 0 }), "{version}: {stderr}");
        let named = stderr.contains("it supports CUDA 12.8") && stderr.contains("driver 580");
        assert_eq!(named, is_refused, "{version}: {stderr}");
    }
}

/// The CUDA toolkit has a `libcuda.so` for linking, in a folder that some containers put first.
#[test]
fn stub_of_the_driver_exits_with_2_and_its_path() {
    let stubs = libraries().join("stubs");
    let mut command = on_gpus(2, &["--nproc-per-node=gpu"]);
    let folders = format!("{}:{}", stubs.display(), libraries().display());
    command.env("LD_LIBRARY_PATH", folders);
    let (code, stdout, stderr) = run_command(command);
    assert_eq!((code, &*stdout), (Some(2), ""), "{stderr}");
    let stub = stubs.join("libcuda.so").canonicalize().unwrap();
    assert!(stderr.contains(stub.to_str().unwrap()), "{stderr}");
    assert!(stderr.contains("remove its folder from LD_LIBRARY_PATH"), "{stderr}");
}

/// With it no timeout and no failure of another rank would end a call.
#[test]
fn blocking_communicator_exits_with_2_and_its_origin() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("nccl.conf");
    fs::write(&file, "# for all runs\nNCCL_DEBUG=WARN\nNCCL_COMM_BLOCKING=1\n").unwrap();
    let file = file.to_str().unwrap();
    let blocking = "NCCL_COMM_BLOCKING";
    for (variables, origin) in [
        (vec![(blocking, "1")], Some("the environment")),
        (vec![("NCCL_CONF_FILE", file)], Some(file)),
        (vec![("NCCL_CONF_FILE", file), (blocking, "0")], None),
        (vec![(blocking, "")], None),
    ] {
        let mut command = on_gpus(2, &["--num-samples=64"]);
        command.envs(variables.clone());
        let (code, _, stderr) = run_command(command);
        assert_eq!(code, Some(if origin.is_some() { 2 } else { 0 }), "{variables:?}: {stderr}");
        let told = origin.is_none_or(|it| stderr.contains(&format!("{blocking}=1 in {it} ")));
        assert!(told, "{variables:?}: {stderr}");
    }
}
