//! Builds the C++ shim and tells the linker where libtorch lies.

use std::env;
use std::error::Error;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rustc-check-cfg=cfg(in_own_repository)");
    if cfg!(feature = "doc-only") {
        return Ok(()); // the documentation needs no library to link with
    }
    // torch-sys has found libtorch by now; only crates that depend on it directly are told where.
    let libtorch_lib = PathBuf::from(env::var("DEP_TCH_LIBTORCH_LIB")?);
    build_shim(&libtorch_lib);
    // So that the binary runs from any folder with no environment variable set.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libtorch_lib.display());
    // A libtorch of another version lacks some functions. With lazy binding the loader looks for a function at its first
    // call, and `ffi::check_version` is called before the others.
    println!("cargo:rustc-link-arg=-Wl,-z,lazy");
    // A dependent's build script reads it as DEP_DDP_MP_LIBTORCH_LIB.
    println!("cargo:LIBTORCH_LIB={}", libtorch_lib.display());
    // A folder above that is a repository is another project's.
    if Path::new(".git").exists() {
        println!("cargo:rustc-cfg=in_own_repository");
    }
    link_nccl_name(&libtorch_lib)
}

fn build_shim(libtorch_lib: &Path) {
    for source in [
        "all.cpp",
        "assumed.h",
        "c10d.cpp",
        "gloo_forward",
        "guarded.h",
        "kept_memory.cpp",
        "library.cpp",
        "shim.cpp",
    ] {
        println!("cargo:rerun-if-changed=src/ffi/{source}");
    }
    println!("cargo:rerun-if-env-changed=LIBTORCH_INCLUDE");
    println!("cargo:rerun-if-env-changed=LIBTORCH_CXX11_ABI");
    let include = env::var_os("LIBTORCH_INCLUDE")
        .map_or_else(|| libtorch_lib.join(".."), PathBuf::from)
        .join("include");
    let cxx11_abi = env::var("LIBTORCH_CXX11_ABI").unwrap_or_else(|_| "1".into());
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .file("src/ffi/all.cpp")
        .define("USE_C10D_GLOO", None) // it is in libtorch_cpu
        .include("src/ffi/gloo_forward")
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .define("_GLIBCXX_USE_CXX11_ABI", cxx11_abi.as_str())
        .warnings(false) // libtorch's headers would warn
        .compile("ddp_shim");
}

/// cudarc looks for `libnccl.so`, the wheels ship `libnccl.so.2` only: a link by the right name, in a
/// folder of its own on the rpath. The loader sees that both names are one file, so the process has
/// one NCCL. Without NCCL (a CPU machine) there is nothing to link.
fn link_nccl_name(libtorch_lib: &Path) -> Result<(), Box<dyn Error>> {
    let nccl = libtorch_lib.join("../../nvidia/nccl/lib/libnccl.so.2");
    // Written anew when another set of wheels is fetched. (Watching a file that is not there would
    // make every build start over.)
    let fetched = libtorch_lib.join("../../complete");
    for file in [&nccl, &fetched].into_iter().filter(|file| file.exists()) {
        println!("cargo:rerun-if-changed={}", file.display());
    }
    let Ok(nccl) = nccl.canonicalize() else { return Ok(()) };
    // Beside the library, where the project has fetched it and made the link itself.
    if nccl.with_file_name("libnccl.so").exists() {
        let folder = nccl.parent().ok_or("libnccl.so.2 lies in no folder")?;
        add_nccl_folder(folder);
        return Ok(());
    }
    let folder = PathBuf::from(env::var("OUT_DIR")?).join("nccl");
    fs::create_dir_all(&folder)?;
    let link = folder.join("libnccl.so");
    match fs::remove_file(&link) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => symlink(nccl, link)?,
    }
    add_nccl_folder(&folder);
    Ok(())
}

/// Adds the folder to the rpath. A dependent's build script reads it as DEP_DDP_MP_NCCL_LIB.
fn add_nccl_folder(folder: &Path) {
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.display());
    println!("cargo:NCCL_LIB={}", folder.display());
}
