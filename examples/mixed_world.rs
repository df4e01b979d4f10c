//! A rank in Rust and a rank of PyTorch in one group: they all-reduce and broadcast together.
//!
//!     make python
//!     cargo run --release --example mixed_world
//!
//! This program starts the other rank, `mixed_world.py`, with the Python in `.python` or in the variable `PYTHON`. Its
//! PyTorch must have the version of this libtorch. On two machines, one rank would serve the store at its address, and
//! the other would connect to it.

#![allow(clippy::print_stdout)]

use std::env;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, ensure};
use ddp_mp::ReduceOp;
use ddp_mp::process_group::c10d::{ProcessGroupGloo, TcpStore};
use tch::Tensor;

/// How long the ranks wait for each other.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The process of the other rank, which is killed if this one fails.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it has already ended if all went well
        let _ = self.0.wait();
    }
}

fn main() -> anyhow::Result<()> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let python = match env::var_os("PYTHON") {
        Some(python) => python.into(),
        None => folder.join(".python/bin/python"),
    };
    if env::var_os("PYTHON").is_none() && !python.exists() {
        println!(
            "The other rank needs a Python with PyTorch: make one with `make python`, or set PYTHON to yours."
        );
        return Ok(());
    }

    // The rank that serves the store starts first. It takes a free port and passes the port to the other rank.
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT)?;
    let mut other = Command::new(&python);
    other.arg(folder.join("examples/mixed_world.py")).arg(store.port().to_string());
    let mut other =
        Other(other.spawn().with_context(|| format!("{} does not start", python.display()))?);

    let group = ProcessGroupGloo::new(&store, "world", 0, 2, TIMEOUT)?;
    // From here on both ranks must make the same calls with the same dtypes and shapes. Nothing checks that they do.
    let mut tensor = Tensor::from_slice(&[1f32, 10.0]);
    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
    println!("Rust    rank 0: all_reduce of [1, 10] gives {:?}", Vec::<f32>::try_from(&tensor)?);

    for root in 0..group.size() {
        let mut tensor = Tensor::from_slice(&[42i64 * (1 - root as i64)]);
        group.broadcast(&mut tensor, root)?;
        println!("Rust    rank 0: broadcast from {root} gives {}", tensor.int64_value(&[0]));
    }
    // The rank that serves the store must exit last.
    group.barrier()?;
    drop(group);
    let status = other.0.wait()?;
    ensure!(status.success(), "the rank in Python: {status}");
    Ok(())
}
