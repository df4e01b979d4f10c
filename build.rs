//! Tells the linker where libtorch lies, and the crates that depend on this one.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo:rustc-check-cfg=cfg(in_own_repository)");
    println!("cargo:rerun-if-changed=build.rs");
    // A folder above that is a repository is another project's.
    if Path::new(".git").exists() {
        println!("cargo:rustc-cfg=in_own_repository");
    }
    // The engine has found it. Without it, in documentation, nothing is linked.
    let Ok(libtorch) = env::var("DEP_DDP_MP_ENGINE_LIBTORCH_LIB") else { return };
    // So that the binary runs from any folder with no environment variable set.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}");
    // A libtorch of another version lacks some functions. With lazy binding the loader looks for a function at its first
    // call, and the engine's `ffi::check_version` is called before the others.
    println!("cargo:rustc-link-arg=-Wl,-z,lazy");
    // A dependent's build script reads it as DEP_DDP_MP_LIBTORCH_LIB.
    println!("cargo:LIBTORCH_LIB={libtorch}");
}
