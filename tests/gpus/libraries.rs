//! A machine whose libraries or GPUs do not fit what is asked is wrong input, told before any rank starts.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
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
    let file = report["nccl_file"].as_str().unwrap();
    assert_eq!(Path::new(file).canonicalize().unwrap(), own);
    assert!(run(&["--version"]).contains(&format!("2.29.7 ({file})")));
    run(&["--num-samples=64"]);
}

/// Each with words of the message. The CUDA toolkit has a `libcuda.so` for linking, a stub whose functions fail, in a
/// folder that some containers put first. With a blocking communicator no failure of another rank would end a call.
#[test]
fn what_does_not_fit_exits_with_2_and_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let [no_cuda, no_nccl, other] =
        ["no-cuda", "no-nccl", "other"].map(|name| folder.path().join(name));
    all_but("libtorch_cuda", &no_cuda);
    all_but("libnccl", &no_nccl);
    fs::create_dir(&other).unwrap();
    symlink(libraries().join("libcuda.so.1"), other.join("libnccl.so.2")).unwrap();
    let path = |folders: &[PathBuf]| vec![("LD_LIBRARY_PATH", path_of(folders))];
    let set = |name, value: &str| vec![(name, value.into())];
    let shared = |version: &str| -> Variables {
        let shares = SHARES_GPUS.map(|(name, value)| (name, value.into()));
        shares.into_iter().chain(set("SIM_NCCL_VERSION", version)).collect()
    };
    let (no_nccl, stub) = (path(&[no_nccl]), set("SIM_CUINIT_ERROR", "34"));
    let missing = "libnccl was not found (libnccl.so.2: cannot open shared object file";
    let too_few = "only 1 GPU is visible, and NCCL 2.29.7 needs one for each rank (from 2.30.3";
    let too_many = "at most 4 threads can share a GPU, and 5 would";
    let too_old = "backend nccl: NCCL 2.13.4 is too old";
    let old_driver = ["it supports CUDA 12.8", "for CUDA 13.0"];
    let fails = ["the NVIDIA driver fails", "CUDA_ERROR_STUB_LIBRARY"];
    let [all, plain, remedy] = ["--nproc-per-node=gpu", "--num-samples=64", "--backend threaded"];
    let (check, none) = ("env --check-gpus", "--check-gpus: no GPU is visible; ");
    let apart = "--share-model: with backend nccl the 2 ranks of this process do not share memory";
    let in_variable = "NCCL_COMM_BLOCKING=1 in the environment ";
    let cases: [(usize, &str, Variables, [&str; 2]); 14] = [
        (2, plain, no_nccl.clone(), [missing, remedy]),
        (2, "--spawn=processes", no_nccl.clone(), [missing, remedy]),
        (2, "comm", no_nccl.clone(), [missing, remedy]),
        (2, plain, path(&[other, libraries()]), ["the libnccl in use", "has no ncclGetVersion"]),
        (2, plain, set("SIM_NCCL_VERSION", "21304"), [too_old, "install 2.14.0 or newer"]),
        (1, "--backend=nccl --nproc-per-node=2", shared("22907"), [too_few, remedy]),
        (1, "--backend=nccl --nproc-per-node=5", shared("23007"), [too_many, remedy]),
        (2, "--num-samples=64 --share-model", Vec::new(), [apart, remedy]),
        (0, check, Vec::new(), [none, none]),
        (2, check, stub.clone(), fails),
        (2, all, stub, fails),
        (2, all, path(&[no_cuda]), ["libtorch_cuda", "libtorch_cuda"]),
        (2, all, set("SIM_DRIVER_VERSION", "12080"), old_driver),
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
    ] {
        let mut command = on_gpus(2, &[args]);
        command.envs(variables);
        succeed(command);
    }
}

/// The NCCL of torch 2.13, and that of torch 2.15. Each process has one of its own: if that of one refuses, both say so.
/// An older NCCL takes processes with different `NCCL_HOSTID` for two hosts.
#[test]
fn two_processes_share_a_gpu_only_with_nccls_that_allow_it() {
    type Set = Option<(&'static str, &'static str)>;
    let both = |version: &'static str, variables: [Set; 2]| {
        under_torchrun(2, |process| {
            let args = ["--backend=nccl", "--nproc-per-node=1", "--max-steps=4", "--model=mlp"];
            let mut command = on_gpus(1, &args);
            command.env("SIM_NCCL_VERSION", version).envs(variables[process]);
            command
        })
    };
    const SHARES: Set = Some(SHARES_GPUS[1]);
    const OLD: &str = "NCCL 2.29.7 needs one for each rank (from 2.30.3 on they may share one)";
    const NEW: &str =
        "NCCL 2.30.7 needs one for each rank unless NCCL_MULTI_RANK_GPU_ENABLE=1 is set";
    for (version, variables, reason) in
        [("22907", [SHARES; 2], OLD), ("23007", [None; 2], NEW), ("23007", [SHARES, None], NEW)]
    {
        for output in both(version, variables) {
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{version}, {variables:?}: {stderr}");
            assert!(stderr.contains("have the same GPU") && stderr.contains(reason), "{stderr}");
            assert!(!stderr.contains("GPU:1"), "{stderr}");
        }
    }
    let hosts = ["a", "b"].map(|host| Some(("NCCL_HOSTID", host)));
    for output in [both("23007", [SHARES; 2]), both("22907", hosts)].concat() {
        assert!(output.status.success(), "{output:?}");
    }
}
