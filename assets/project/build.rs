//! Tells the linker where libtorch is when the program runs. A library cannot pass that on by itself.

fn main() {
    let libtorch = std::env::var("DEP_DDP_MP_LIBTORCH_LIB").expect("ddp-mp is a dependency");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}");
    // So that another libtorch is an error of ddp-mp that names the versions, and not one of the loader.
    println!("cargo:rustc-link-arg=-Wl,-z,lazy");
}
