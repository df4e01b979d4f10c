//! A machine whose libraries or GPUs do not fit what is asked is wrong input, told before any rank starts.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

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
    assert_eq!(report["gpus"].as_array().unwrap().len(), 2, "{report}");
    assert!(report["gpu_problem"].is_null(), "{report}");
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

/// Each with words of the message. The CUDA toolkit has a `libcuda.so` for linking, a stub, in a folder that some
/// containers put first. With a blocking communicator no timeout and no failure of another rank would end a call.
#[test]
fn what_does_not_fit_exits_with_2_and_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let [no_cuda, no_nccl, bare_nccl] =
        ["no-cuda", "no-nccl", "bare-nccl"].map(|name| folder.path().join(name));
    all_but("libtorch_cuda", &no_cuda);
    all_but("libnccl", &no_nccl);
    fs::create_dir(&bare_nccl).unwrap();
    let bare = bare_nccl.join("libnccl.so.2");
    compile_nccl(22907, &bare);
    let in_use = &*format!("the libnccl in use, {}, has no ncclGetErrorString", bare.display());
    let stubs = libraries().join("stubs");
    let fails = "the NVIDIA driver fails";
    let path = |folders: &[PathBuf]| vec![("LD_LIBRARY_PATH", path_of(folders))];
    let set = |name, value: &str| vec![(name, value.into())];
    let shared = |version: &str| -> Variables {
        let shares = SHARES_GPUS.map(|(name, value)| (name, value.into()));
        shares.into_iter().chain(set("SIM_NCCL_VERSION", version)).collect()
    };
    let (bare_nccl, no_nccl) = (path(&[bare_nccl, libraries()]), path(&[no_nccl]));
    let missing = "libnccl was not found (libnccl.so.2: cannot open shared object file";
    let too_few = "only 1 GPU is visible, and NCCL 2.29.7 needs one for each rank (from 2.30.3";
    let too_many = "at most 4 threads can share a GPU, and 5 would";
    let too_old = "backend nccl: NCCL 2.13.4 is too old";
    let old_driver = ["it supports CUDA 12.8", "for CUDA 13.0"];
    let mismatch = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    let [all, plain, remedy] = ["--nproc-per-node=gpu", "--num-samples=64", "--backend threaded"];
    let (check, none) = ("env --check-gpus", "--check-gpus: no GPU is visible; ");
    let apart = "--share-model: with backend nccl the 2 ranks of this process do not share memory";
    let in_variable = "NCCL_COMM_BLOCKING=1 in the environment ";
    let cases: [(usize, &str, Variables, [&str; 2]); 23] = [
        (2, plain, no_nccl.clone(), [missing, remedy]),
        (2, "--backend=nccl", no_nccl.clone(), [missing, remedy]),
        (2, "--spawn=processes", no_nccl.clone(), [missing, remedy]),
        (2, "comm", no_nccl.clone(), [missing, remedy]),
        (2, "bench all-reduce", no_nccl.clone(), [missing, remedy]),
        (2, plain, bare_nccl.clone(), [in_use, in_use]),
        (2, "comm", bare_nccl.clone(), [in_use, in_use]),
        (2, "bench all-reduce", bare_nccl, [in_use, in_use]),
        (2, plain, set("SIM_NCCL_VERSION", "21304"), [too_old, "install 2.14.0 or newer"]),
        (1, "--backend=nccl --nproc-per-node=2", shared("22907"), [too_few, remedy]),
        (1, "--backend=nccl --nproc-per-node=5", shared("23007"), [too_many, remedy]),
        (2, "--num-samples=64 --share-model", Vec::new(), [apart, remedy]),
        (2, "bench step --share-model", Vec::new(), [apart, remedy]),
        (2, "bench scaling --share-model", Vec::new(), [apart, remedy]),
        (2, "verify --share-model", Vec::new(), [apart, remedy]),
        (0, check, Vec::new(), [none, none]),
        (2, check, set("CUDA_VISIBLE_DEVICES", ""), [none, none]),
        (2, check, set("SIM_CUINIT_ERROR", "803"), [mismatch, mismatch]),
        (2, all, path(&[no_cuda]), ["libtorch_cuda", "libtorch_cuda"]),
        (2, all, set("SIM_CUINIT_ERROR", "803"), [fails, mismatch]),
        (2, all, set("SIM_DRIVER_VERSION", "12080"), old_driver),
        (2, all, path(&[stubs, libraries()]), [fails, "CUDA_ERROR_STUB_LIBRARY"]),
        (2, plain, set("NCCL_COMM_BLOCKING", "1"), [in_variable, in_variable]),
    ];
    for (gpus, args, variables, words) in cases {
        let mut command = on_gpus(gpus, &args.split(' ').collect::<Vec<_>>());
        command.envs(variables);
        let stderr = refused(command);
        assert!(words.iter().all(|it| stderr.contains(it)), "{args}, {words:?}: {stderr}");
        let tells = (stderr.matches(missing).count(), stderr.contains("failed in"));
        assert!(words[0] != missing || tells == (1, false), "{args}: {stderr}");
    }
    for (args, variables) in [
        ("--backend=threaded", no_nccl),
        (all, set("SIM_DRIVER_VERSION", "13010")),
        (plain, set("NCCL_COMM_BLOCKING", "0")),
        (plain, set("NCCL_COMM_BLOCKING", "")),
    ] {
        let mut command = on_gpus(2, &[args]);
        command.envs(variables);
        succeed(command);
    }
}

/// The NCCL of torch 2.13, and that of torch 2.15. Each process has one of its own: if that of one refuses, both say so.
#[test]
fn two_processes_share_a_gpu_only_with_nccls_that_allow_it() {
    let both = |version: &'static str, switches: [Option<&'static str>; 2]| {
        under_torchrun(2, |process| {
            let args = ["--backend=nccl", "--nproc-per-node=1", "--max-steps=4", "--model=mlp"];
            let mut command = on_gpus(1, &args);
            command.env("SIM_NCCL_VERSION", version);
            command.envs(switches[process].map(|value| ("NCCL_MULTI_RANK_GPU_ENABLE", value)));
            command
        })
    };
    const OLD: &str = "NCCL 2.29.7 needs one for each rank (from 2.30.3 on they may share one)";
    const NEW: &str =
        "NCCL 2.30.7 needs one for each rank unless NCCL_MULTI_RANK_GPU_ENABLE=1 is set";
    for (version, switches, reason) in [
        ("22907", [None; 2], OLD),
        ("22907", [Some("1"); 2], OLD),
        ("23007", [None; 2], NEW),
        ("23007", [Some("0"); 2], NEW),
        ("23007", [Some("1"), None], NEW),
    ] {
        for output in both(version, switches) {
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{version}, {switches:?}: {stderr}");
            assert!(stderr.contains("have the same GPU") && stderr.contains(reason), "{stderr}");
            assert!(!stderr.contains("GPU:1"), "{stderr}");
        }
    }
    for output in both("23007", [Some("1"); 2]) {
        assert!(output.status.success(), "{output:?}");
    }
}
