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
}
