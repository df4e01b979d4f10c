//! Builds the C++ shim and tells the linker where libtorch lies.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    make_nccl_aliases()?;
    if cfg!(feature = "doc-only") {
        return Ok(()); // the documentation needs no library to link with
    }
    // torch-sys has found libtorch by now; only crates that depend on it directly are told where.
    let libtorch_lib = PathBuf::from(env::var("DEP_TCH_LIBTORCH_LIB")?);
    build_shim(&libtorch_lib);
    // For the unit tests.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libtorch_lib.display());
    // A libtorch of another version lacks some functions. With lazy binding the loader looks for a function at its first
    // call, and `ffi::check_version` is called before the others.
    println!("cargo:rustc-link-arg=-Wl,-z,lazy");
    // A dependent's build script reads it as DEP_DDP_MP_ENGINE_LIBTORCH_LIB.
    println!("cargo:LIBTORCH_LIB={}", libtorch_lib.display());
    Ok(())
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
        // A guess at what a virtual call of Gloo calls would name a function that libtorch_cuda has too: the program would then
        // need that library.
        .flag_if_supported("-fno-devirtualize-speculatively")
        .include("src/ffi/gloo_forward")
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .define("_GLIBCXX_USE_CXX11_ABI", cxx11_abi.as_str())
        .warnings(false) // libtorch's headers would warn
        .opt_level(1) // as fast as 3 for functions that pass calls on
        .compile("ddp_shim");
}

/// Makes two empty libraries with the name `libnccl.so`, for `process_group/nccl/library.rs`, which says why. One needs
/// `libtorch_cuda.so`, the other `libnccl.so.2`.
fn make_nccl_aliases() -> Result<(), Box<dyn Error>> {
    for needed in ["libtorch_cuda.so", "libnccl.so.2"] {
        // cargo puts OUT_DIR itself into LD_LIBRARY_PATH, where nobody is to find an empty NCCL.
        let folder = PathBuf::from(env::var("OUT_DIR")?).join("nccl_aliases").join(needed);
        fs::create_dir_all(&folder)?;
        if cfg!(feature = "doc-only") {
            fs::write(folder.join("libnccl.so"), "")?;
            continue;
        }
        link_empty_library(&folder, needed, &[])?;
        link_empty_library(&folder, "libnccl.so", &[needed])?;
    }
    Ok(())
}

/// Links a library without contents in `folder`, which needs the libraries `needed` there.
fn link_empty_library(folder: &Path, name: &str, needed: &[&str]) -> Result<(), Box<dyn Error>> {
    let mut linker = cc::Build::new().cpp(true).warnings(false).get_compiler().to_command();
    linker.current_dir(folder).args(["-shared", "-nostdlib", "-s", "-o", name]);
    linker.arg(format!("-Wl,-soname,{name},--no-as-needed,-z,noseparate-code"));
    linker.args(["-x", "c", "/dev/null", "-x", "none"]).args(needed);
    let status = linker.status()?;
    if status.success() { Ok(()) } else { Err(format!("{linker:?}: {status}").into()) }
}
