//! A machine whose libraries are missing or do not fit is wrong input, told before any rank starts.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::harness::run_command;
use crate::machine::{libraries, on_gpus};

/// Puts all libraries but `missing` into `folder`.
fn all_but(missing: &str, folder: &Path) {
    for file in fs::read_dir(libraries()).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_file() && name.contains(".so") && !name.starts_with(missing) {
            symlink(&path, folder.join(name)).unwrap();
        }
    }
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
        assert_eq!(stderr.matches("libnccl").count(), 1, "{args:?}: {stderr}");
        assert!(stderr.contains("--backend threaded"), "{args:?}: {stderr}");
        assert!(!stderr.contains("failed in"), "{args:?}: {stderr}");
    }
    // The remedy that it names.
    let mut command = on_gpus(2, &["--backend=threaded"]);
    command.env("LD_LIBRARY_PATH", folder.path());
    let (code, _, stderr) = run_command(command);
    assert_eq!(code, Some(0), "{stderr}");
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
