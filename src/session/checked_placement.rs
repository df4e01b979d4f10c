//! Where the ranks of a command run on this machine, after checking that its configuration can run there.

use crate::config::Config;
use engine::error::{Error, Result};
use engine::ffi::cuda::Cuda;
use engine::launch::{
    BackendChoice, BindChoice, Binding, Launch, LaunchKind, LaunchOptions, Nproc, Placement,
    SpawnChoice, place,
};
use engine::optim::OptimizerLayout;
use engine::os::cores;
use engine::process_group::Devices;

/// Returns whether this process starts a process for each rank.
pub(crate) fn starts_processes(config: &Config, launch: &Launch) -> bool {
    config.launch.spawn == SpawnChoice::Processes && launch.kind != LaunchKind::Spawned
}

/// Returns where the ranks of `config` run on this machine, and on which CPUs, after checking that `config` can run
/// there.
pub(crate) fn place_all(config: &Config, cuda: &Cuda) -> Result<(Placement, Binding)> {
    let launch = Launch::from_env(&config.launch_options(), cuda)?;
    let placement = if starts_processes(config, &launch) {
        place_processes(config, &launch, cuda)?
    } else {
        place_threads(config, &launch, cuda)?
    };
    // The ranks of other processes are not known before the rendezvous.
    config.validate_for(placement.devices.len())?;
    let binding = launch.binding(&placement)?;
    Ok((placement, binding))
}

/// Returns where the ranks of this process of a launch run.
pub(crate) fn place_threads(config: &Config, launch: &Launch, cuda: &Cuda) -> Result<Placement> {
    let placement = launch.place(config.launch.backend, cuda)?;
    check_shared_model(config, &placement)?;
    Ok(placement)
}

/// Refuses to share the model among the ranks of `placement` if they have different devices.
pub(crate) fn check_shared_model(config: &Config, placement: &Placement) -> Result<()> {
    let devices = &placement.devices;
    let share_memory = devices.iter().all(|device| *device == devices[0])
        && (devices.len() == 1 || placement.backend.devices() != Devices::OwnGpu);
    if config.optimizer_layout() != OptimizerLayout::SharedModel || share_memory {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "--share-model: with backend {} the {} ranks of this process do not share memory; use --zero instead, or put all \
         ranks on one GPU with --backend threaded, or on the CPU (--nproc-per-node cpu)",
        placement.backend.name(),
        devices.len()
    )))
}

/// Returns where the ranks run when each is a process.
pub(crate) fn place_processes(config: &Config, launch: &Launch, cuda: &Cuda) -> Result<Placement> {
    if launch.kind != LaunchKind::Local {
        return Err(Error::usage(format!(
            "--spawn=processes is for one machine without a launcher, and this is {}; leave it out",
            launch.this_process()
        )));
    }
    let placement = place(launch.nproc, config.launch.backend, cuda, &launch.share(cores()))?;
    let count = placement.devices.len();
    launch.binding(&placement)?;
    placement.in_processes(count, config.launch.backend)
}

/// Returns where the ranks of `nproc` run, for a command of one process.
pub(crate) fn place_ranks(
    nproc: Nproc,
    backend: BackendChoice,
    bind: BindChoice,
    cuda: &Cuda,
) -> Result<Placement> {
    let options = LaunchOptions { nproc, bind, ..LaunchOptions::default() };
    let launch = Launch::from_env(&options, cuda)?;
    refuse_launcher(&launch)?;
    launch.place(backend, cuda)
}

/// Refuses a launch of several processes, for a command that starts its ranks itself.
///
/// # Errors
/// [`Error::Input`] that names the launcher.
pub(crate) fn refuse_launcher(launch: &Launch) -> Result<()> {
    if launch.processes.count == 1 {
        return Ok(());
    }
    Err(Error::usage(format!(
        "this command runs in one process, and this is {}; start only one, or unset the launcher's variables",
        launch.this_process()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    use engine::process_group::Backend;

    #[test]
    fn share_model_is_refused_for_ranks_with_a_gpu_each() {
        let mut config = Config::default();
        let check = |config: &Config, devices: &[Device], backend| {
            let placement = Placement {
                backend,
                devices: devices.to_vec(),
                gpu_count: 2,
                threads_per_rank: 1,
                note: None,
            };
            check_shared_model(config, &placement).map_err(|error| error.to_string())
        };
        let gpus = [Device::Cuda(0), Device::Cuda(1)];
        assert_eq!(check(&config, &gpus, Backend::Nccl), Ok(()));
        config.ddp.share_model = true;
        for several in [gpus, [gpus[1]; 2]] {
            let error = check(&config, &several, Backend::Nccl).unwrap_err();
            let expected =
                "--share-model: with backend nccl the 2 ranks of this process do not share memory";
            assert!(error.starts_with(expected), "{error}");
        }
        assert_eq!(check(&config, &gpus[..1], Backend::Nccl), Ok(()));
        for same in [[gpus[1]; 2], [Device::Cpu; 2]] {
            assert_eq!(check(&config, &same, Backend::Threaded), Ok(()));
        }
    }
}
