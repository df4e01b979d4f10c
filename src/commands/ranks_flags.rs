//! What the flags of commands have in common that start ranks and have no configuration: `comm` and `bench`.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use crate::config::{Config, backend, name, positive_duration};
use crate::session::{self, place_all, refuse_launcher, run_command};
use engine::error::Result;
use engine::ffi::cuda::Cuda;
use engine::launch::{
    BackendChoice, BindChoice, Launch, LaunchKind, Nproc, Placement, Rank, SharedMemory,
    SpawnChoice,
};
use engine::process_group::Backend;
use views::Printer;

/// The ranks to start.
#[derive(Debug, Clone, Args)]
pub struct RanksFlags {
    /// Start this many ranks: auto, gpu, cpu or N
    ///
    /// auto: one per visible GPU, else one per CPU core
    #[arg(long, value_name = "auto|gpu|cpu|N", default_value = "auto")]
    pub nproc_per_node: Nproc,
    /// Run ranks as threads, or as processes of this machine
    #[arg(long, value_name = "NAME", value_parser = name::<SpawnChoice>(), default_value_t)]
    pub spawn: SpawnChoice,
    /// Choose how processes of one machine exchange tensors on CPUs
    ///
    /// auto: through shared memory if all can, else over TCP. off: over TCP. require: an error if they cannot share memory.
    /// Machines always use TCP
    #[arg(long, value_name = "NAME", value_parser = name::<SharedMemory>(), default_value_t)]
    pub shared_memory: SharedMemory,
    /// Choose the communication backend
    ///
    /// auto: nccl on GPUs; on CPUs threaded, or gloo for processes
    #[arg(long, value_name = "NAME", value_parser = backend(), default_value = "auto")]
    pub backend: BackendChoice,
    /// Bind each rank to CPUs
    ///
    /// auto: core if every thread of every rank gets a CPU; else none
    #[arg(long, value_name = "NAME", value_parser = name::<BindChoice>(), default_value_t)]
    pub bind: BindChoice,
    /// Wait at most TIME for other ranks (500ms, 30s, 10m)
    ///
    /// A plain number is seconds
    #[arg(long, value_name = "TIME", value_parser = positive_duration, default_value = "10m")]
    pub timeout: Duration,
}

impl RanksFlags {
    /// Runs `on_rank` on each rank, with `flags` and the backend to use. `check` looks at the ranks first. All processes
    /// must have the same flags.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when the ranks cannot run here, the errors of `check`, and
    /// [`SpawnError`](crate::SpawnError) when a rank failed.
    pub(super) fn run<F: Debug + Clone + Send + Sync + 'static>(
        &self,
        flags: &F,
        cuda: &Cuda,
        printer: &Arc<Printer>,
        check: fn(&F, &Placement) -> Result<()>,
        on_rank: fn(&F, &Rank, Backend, &Printer) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut config = Config::default();
        config.launch.nproc_per_node = self.nproc_per_node;
        config.launch.spawn = self.spawn;
        config.launch.shared_memory = self.shared_memory;
        config.launch.backend = self.backend;
        config.launch.bind = self.bind;
        config.launch.timeout = self.timeout;
        let launch = Launch::from_env(&config.launch_options(), cuda)?;
        if launch.kind != LaunchKind::Spawned {
            refuse_launcher(&launch)?;
            let (placement, _) = place_all(&config, cuda)?;
            check(flags, &placement)?;
        }
        let ended = run_command(config, &launch, false, cuda, printer, |config, launch| {
            let command = format!("{flags:?}");
            let joined = session::join_launch(&config, &command, launch.clone(), cuda, printer)?;
            if joined.is_first() {
                joined.notes().iter().for_each(|note| printer.info(note));
            }
            let (flags, to, backend) = (flags.clone(), printer.clone(), joined.placement.backend);
            session::configured_spawn(&joined, &config, printer)
                .run(move |rank| on_rank(&flags, rank, backend, &to))?;
            Ok(None)
        });
        ended.map(drop)
    }
}
