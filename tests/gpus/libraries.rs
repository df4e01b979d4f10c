//! A machine whose libraries are missing or do not fit is wrong input, told before any rank starts.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

use crate::harness::run_command;
use crate::machine::{SHARES_GPUS, libraries, on_gpus, refused, succeed, under_torchrun};

/// Puts all libraries but `missing` into `folder`.
pub(crate) fn all_but(missing: &str, folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    for file in fs::read_dir(libraries()).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_file() && name.contains(".so") && !name.starts_with(missing) {
            symlink(&path, folder.join(name)).unwrap();
        }
    }
}

/// Compiles a library that has nothing of NCCL's but this version.
fn compile_nccl(version: u32, library: &Path) {
    let source = format!("int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}");
    let file = library.with_extension("c");
    fs::write(&file, source).unwrap();
    let mut compiler = Command::new("c++");
    compiler.args(["-shared", "-fPIC", "-x", "c", "-o"]).arg(library).arg(&file);
    assert!(compiler.status().unwrap().success());
}

type Variables = Vec<(&'static str, OsString)>;

/// The value of LD_LIBRARY_PATH with these folders.
fn path_of(folders: &[PathBuf]) -> OsString {
    env::join_paths(folders).unwrap()
}

#[test]
fn missing_libnccl_exits_with_2_and_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    all_but("libnccl", folder.path());
    let without_nccl = |args: &[&str]| {
        let mut command = on_gpus(2, args);
        command.env("LD_LIBRARY_PATH", folder.path());
        command
    };
    for args in [
        &["--max-epochs=1"][..],
        &["--backend=nccl"],
        &["--spawn=processes"],
        &["comm"],
        &["bench", "all-reduce"],
    ] {
        let stderr = refused(without_nccl(args));
        let reason = "libnccl was not found (libnccl.so.2: cannot open shared object file";
        assert_eq!(stderr.matches(reason).count(), 1, "{args:?}: {stderr}");
        assert!(stderr.contains("--backend threaded"), "{args:?}: {stderr}");
        assert!(!stderr.contains("failed in"), "{args:?}: {stderr}");
    }
    succeed(without_nccl(&["--backend=threaded"])); // the remedy that it names
}

/// libtorch_cuda loads the NCCL of its own path. Another one in LD_LIBRARY_PATH must not come beside it.
#[test]
fn nccl_of_libtorch_is_used_whatever_the_library_path_has() {
    let folder = tempfile::tempdir().unwrap();
    let own = libraries().join("libnccl.so.2").canonicalize().unwrap();
    for name in ["libnccl.so", "libnccl.so.2"] {
        fs::copy(&own, folder.path().join(name)).unwrap();
    }
    let folders = path_of(&[folder.path().into(), libraries().join("with_nccl"), libraries()]);
    let run = |args: &[&str]| {
        let mut command = on_gpus(2, args);
        command.env("LD_LIBRARY_PATH", &folders);
        succeed(command).0
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
        let folders = path_of(&[libraries().join("static_nccl"), rest]);
        let [_, stdout] = ["--num-samples=64", "env"].map(|arg| {
            let mut command = on_gpus(2, &[arg]);
            command.env("LD_LIBRARY_PATH", &folders);
            succeed(command).0
        });
        assert!(stdout.contains("static_nccl/libtorch_cuda.so)"), "{folders:?}: {stdout}");
    }
}

#[test]
fn two_nccls_exit_with_2_and_both_files() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("libother.so");
    compile_nccl(22803, &other);
    let with_both = |args: &[&str]| {
        let mut command = on_gpus(2, args);
        command.env("LD_PRELOAD", &other);
        command
    };
    let own = libraries().join("libnccl.so.2");
    let both = [&own, &other].map(|file| file.to_str().unwrap());
    let stderr = refused(with_both(&["--num-samples=64"]));
    assert!(stderr.contains(&format!("two NCCLs, {} and {}", both[0], both[1])), "{stderr}");
    let (stdout, _) = succeed(with_both(&["--version"]));
    assert!(stdout.contains("NCCL      unusable: "), "{stdout}");
    let (stdout, _) = succeed(with_both(&["env", "--log-format=json"]));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert!(report["nccl"].is_null(), "{stdout}");
    assert!(report["nccl_problem"].as_str().unwrap().contains(both[1]), "{stdout}");
}

/// Each with words of the message. The CUDA toolkit has a `libcuda.so` for linking, a stub, in a folder that some
/// containers put first.
#[test]
fn libraries_that_do_not_fit_exit_with_2_and_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let [no_cuda, bare_nccl] = ["no-cuda", "bare-nccl"].map(|name| folder.path().join(name));
    all_but("libtorch_cuda", &no_cuda);
    fs::create_dir(&bare_nccl).unwrap();
    let bare = bare_nccl.join("libnccl.so.2");
    compile_nccl(22907, &bare);
    let in_use = &*format!("the libnccl in use, {}, has no ncclGetErrorString", bare.display());
    let file = |path: PathBuf| path.canonicalize().unwrap().to_str().unwrap().to_owned();
    let stubs = libraries().join("stubs");
    let [stub, driver] = [stubs.join("libcuda.so"), libraries().join("libcuda.so.1")].map(file);
    let path = |folders: &[PathBuf]| vec![("LD_LIBRARY_PATH", path_of(folders))];
    let set = |name, value: &str| vec![(name, value.into())];
    let shared = |version: &str| -> Variables {
        let shares = SHARES_GPUS.map(|(name, value)| (name, value.into()));
        shares.into_iter().chain(set("SIM_NCCL_VERSION", version)).collect()
    };
    let bare_nccl = path(&[bare_nccl, libraries()]);
    let too_few = "only 1 GPU is visible, and NCCL 2.29.7 needs one for each rank (from 2.30.3";
    let too_many = "at most 4 threads can share a GPU, and 5 would";
    let too_old = "backend nccl: NCCL 2.13.4 is too old";
    let all = "--nproc-per-node=gpu";
    let cases: [(usize, &str, Variables, [&str; 2]); 9] = [
        (2, "--num-samples=64", bare_nccl.clone(), [in_use, in_use]),
        (2, "comm", bare_nccl.clone(), [in_use, in_use]),
        (2, "bench all-reduce", bare_nccl, [in_use, in_use]),
        (
            2,
            "--max-epochs=1",
            set("SIM_NCCL_VERSION", "21304"),
            [too_old, "install 2.14.0 or newer"],
        ),
        (1, "--backend=nccl --nproc-per-node=2", shared("22907"), [too_few, "--backend threaded"]),
        (1, "--backend=nccl --nproc-per-node=5", shared("23007"), [too_many, "--backend threaded"]),
        (2, all, path(&[no_cuda]), ["libtorch_cuda", "libtorch_cuda"]),
        (2, all, set("SIM_CUINIT_ERROR", "803"), [&driver, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"]),
        (2, all, path(&[stubs, libraries()]), [&stub, "remove its folder from LD_LIBRARY_PATH"]),
    ];
    for (gpus, args, variables, words) in cases {
        let mut command = on_gpus(gpus, &args.split(' ').collect::<Vec<_>>());
        command.envs(variables);
        let stderr = refused(command);
        assert!(words.iter().all(|it| stderr.contains(it)), "{args}, {words:?}: {stderr}");
    }
}

/// The NCCL of torch 2.13, and that of torch 2.15.
#[test]
fn two_processes_share_a_gpu_only_with_an_nccl_that_allows_it() {
    let both = |version: &'static str, switch: Option<&'static str>| {
        under_torchrun(2, |_| {
            let args = ["--backend=nccl", "--nproc-per-node=1", "--max-steps=4", "--model=mlp"];
            let mut command = on_gpus(1, &args);
            command.env("SIM_NCCL_VERSION", version);
            command.envs(switch.map(|value| ("NCCL_MULTI_RANK_GPU_ENABLE", value)));
            command
        })
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
        let Some(origin) = origin else {
            succeed(command);
            continue;
        };
        let stderr = refused(command);
        assert!(stderr.contains(&format!("{blocking}=1 in {origin} ")), "{variables:?}: {stderr}");
    }
}
