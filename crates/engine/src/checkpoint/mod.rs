//! Checkpoints: the files of a checkpoint, each complete or absent, with everything needed to resume training exactly.
//!
//! A checkpoint is a folder, `step-00000123`, in the folder of its run:
//!
//! | file | holds |
//! |---|---|
//! | `model.safetensors` | parameters and buffers, with the names and shapes of PyTorch's `state_dict`: `model.load_state_dict(safetensors.torch.load_file(file))` |
//! | `optimizer.safetensors` | the optimizer's state, as `parameter/key`: `weight/momentum_buffer` |
//! | `trainer.json` | [`TrainerState`], and the length and hash of the other files |
//!
//! A checkpoint is written into a folder of another name, synced to the disk, and then renamed. A folder with the
//! final name is therefore complete, even if the process or the machine crashed. The file `latest` in the run's folder
//! holds the name of the newest checkpoint, and `best` that of the one with the smallest validation loss.
//!
//! [`Trainer::checkpoints`](crate::trainer::Trainer::checkpoints) saves checkpoints. In a loop of your own:
//!
//! ```
//! # use ddp_mp_engine as ddp_mp;
//! # fn main() -> anyhow::Result<()> {
//! use ddp_mp::checkpoint::{Checkpoint, CheckpointDir, Snapshot, TrainerState, Writer};
//! use ddp_mp::models::ModelConfig;
//! use ddp_mp::{Backend, DdpOptions, DistributedDataParallel, Optimizer, Sgd, SgdOptions, spawn};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("run");
//! // ... before the ranks start: what is wrong with the folder is said at once
//! let dir = CheckpointDir::create(&path, 3)?;
//! let newest = dir.clone();
//! spawn(2, move |rank| {
//!     let group = rank.init_process_group(Backend::Threaded)?;
//!     let (vs, model) = ModelConfig::default().build(rank.device(), 0)?;
//!     let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
//!     let optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
//!     if rank.rank() == 0 {
//!         let mut writer = Writer::new(dir.clone());
//!         let state = TrainerState { step: 1, world_size: 2, ..TrainerState::default() };
//!         // Copies; the files are written while training goes on. (With `zero` every rank calls `state`.)
//!         writer.save(Snapshot::take(state, &ddp.state_dict(), optimizer.state()?)?)?;
//!         writer.finish()?;
//!     }
//!     Ok(())
//! })?;
//! let checkpoint = Checkpoint::read(&newest.newest()?.unwrap())?;
//! assert_eq!(checkpoint.state().step, 1);
//! let (vs, _model) = ModelConfig::default().build(tch::Device::Cpu, 1)?;
//! checkpoint.load_model(&vs)?; // before the ranks' DistributedDataParallel is made of it
//! # Ok(())
//! # }
//! ```

mod folder;
mod layout;
mod read;
mod state;
mod tensors;
mod writer;

pub use folder::CheckpointDir;
pub use layout::{TRAINER, check_all_in, is_used};
pub use read::Checkpoint;
pub use state::TrainerState;
pub(crate) use tensors::write_tensors;
pub use tensors::{TensorFile, model_file};
pub use writer::{Snapshot, Writer};
