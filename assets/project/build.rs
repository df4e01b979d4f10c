//! Tells the linker where libtorch and NCCL are when the program runs. A library cannot pass that on by itself.

fn main() {
    let rpath = std::env::var("DEP_DDP_MP_RPATH").expect("ddp-mp is a dependency");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{rpath}");
}
