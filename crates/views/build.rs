//! Tells the linker where libtorch lies, for the unit tests.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Without it, in documentation, nothing is linked.
    if let Ok(libtorch) = std::env::var("DEP_DDP_MP_ENGINE_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}");
        println!("cargo:rustc-link-arg=-Wl,-z,lazy");
    }
}
