//! Data parallelism: every rank holds a replica of the model, and averaged gradients keep the replicas identical.
//!
//! To read in order, each file uses those above it only:
//!
//! | file | contents |
//! |---|---|
//! | `options`, `parameters` | the options; the check that all ranks have the same model |
//! | `bucket`, `layout` | which bucket a parameter is in. `optim/flat_memory.rs` has their memory |
//! | `comm_hooks` | averages a bucket as the user says, or compressed |
//! | `unused`, `active_ranks` | which parameters a step does not use, and which ranks have run out of inputs |
//! | `reduce_path`, `averaging` | on which stream or thread a bucket is averaged, and how |
//! | `statistics`, `reducer_state`, `reducer` | measures; orders the buckets after the first step; reduces each when its gradients are complete |
//! | `backward` | one backward pass |
//! | `no_sync` | gradients that stay on their rank |
//! | `wrapper` | `DistributedDataParallel` |
//! | `join` | uneven inputs |

mod active_ranks;
mod averaging;
mod backward;
mod bucket;
mod comm_hooks;
mod join;
mod layout;
mod no_sync;
mod options;
mod parameters;
mod reduce_path;
mod reducer;
mod reducer_state;
mod statistics;
mod unused;
mod wrapper;

pub use active_ranks::JoinOptions;
pub use backward::BackwardOptions;
pub use comm_hooks::{CommHook, Compress, GradBucket, hook_fn};
pub use no_sync::NoSync;
pub use options::DdpOptions;
pub use statistics::DdpStatistics;
pub use wrapper::DistributedDataParallel;
