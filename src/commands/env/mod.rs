//! `ddp-mp env`: the software and devices of this machine, and the run that they would give.

mod check_gpus;
mod options;

use std::io::Write;

use serde::Serialize;

use super::Versions;
use crate::config::{Config, Data, OptionValue};
use crate::error::{Result, Shown, counted};
use crate::ffi::{self, cuda::Cuda};
use crate::launch::{Binding, Launch, LaunchKind, Placement, SpawnChoice};
use crate::os::{binding_note, cores};
use crate::session::{open_data, place_all};
use crate::telemetry::Printer;
pub use check_gpus::check_gpus;
use options::{options, write_options};

#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    versions: Versions,
    cpu_cores: usize,
    cuda_driver: Option<String>,
    cuda_visible_devices: Option<String>,
    gpus: Vec<String>,
    gpu_problem: Option<String>,
    libtorch_folder: Option<String>,
    keeps_memory: bool,
    /// `None` if the launcher's variables are invalid.
    launcher: Option<&'static str>,
    launch: Option<LauncherSettings>,
    data: Option<Samples>,
    plan: Option<Plan>,
    plan_problem: Option<String>,
    options: Vec<OptionValue<'a>>,
}

/// The settings of the launcher, or the defaults without one.
#[derive(Serialize)]
struct LauncherSettings {
    reason: String,
    process: usize,
    processes: usize,
    local_process: usize,
    local_processes: usize,
    nnodes: Option<usize>,
    master: Option<String>,
    agent_store: bool,
    run_id: String,
    restart_count: usize,
    max_restarts: usize,
    error_file: Option<String>,
}

#[derive(Serialize)]
struct Samples {
    dataset: String,
    training: usize,
    validation: Option<usize>,
    in_features: Option<i64>,
    out_features: Option<i64>,
}

impl Samples {
    fn of(config: &Config, data: &Data) -> Self {
        Self {
            dataset: config.data_name(),
            training: data.training.len(),
            validation: data.validation.as_ref().map(|samples| samples.len()),
            in_features: config.data.in_features,
            out_features: config.data.out_features,
        }
    }
}

#[derive(Serialize)]
struct Plan {
    world_size: usize,
    backend: &'static str,
    devices: Vec<String>,
    threads_per_rank: usize,
    /// The CPUs of each rank, as `0-3`. `None` if the ranks are not bound.
    cpus: Option<Vec<String>>,
    /// Why they are not bound.
    unbound: Option<String>,
}

impl Plan {
    fn of(placement: &Placement, binding: Binding) -> Self {
        let (cpus, unbound) = match binding {
            Binding::Bound(cpus) => (Some(cpus.iter().map(ToString::to_string).collect()), None),
            Binding::Unbound(reason) => (None, Some(reason)),
        };
        Self {
            world_size: placement.devices.len(),
            backend: placement.backend.name(),
            devices: placement.labels(0),
            threads_per_rank: placement.threads_per_rank,
            cpus,
            unbound,
        }
    }
}

/// Prints what was found on this machine, and what `ddp-mp` with `config` would run. Opens the data for that. Lists
/// `all` options, or those without their default.
///
/// # Errors
/// When stdout can't be written. A configuration that can't be run here is part of the report.
pub fn env(
    config: &Config,
    all: bool,
    versions: Versions,
    cuda: &Cuda,
    printer: &Printer,
) -> anyhow::Result<()> {
    let launch = Launch::from_env(&config.launch_options(), cuda);
    let (data, plan) = match open_data(config.clone()) {
        Ok((config, data)) => (Some(Samples::of(&config, &data)), place_all(&config, cuda)),
        Err(error) => (None, Err(error)),
    };
    let report = Report {
        versions,
        cpu_cores: cores(),
        cuda_driver: cuda.driver.clone(),
        cuda_visible_devices: std::env::var_os("CUDA_VISIBLE_DEVICES")
            .map(|value| value.to_string_lossy().into_owned()),
        gpus: cuda.gpus.clone(),
        gpu_problem: cuda.problem.clone(),
        libtorch_folder: ffi::library_folder().map(|folder| folder.shown().into_owned()),
        keeps_memory: ffi::keeps_memory(),
        launcher: launch.as_ref().ok().map(|launch| launch.kind.name()),
        launch: launch.as_ref().ok().map(LauncherSettings::of),
        data,
        plan_problem: plan.as_ref().err().map(ToString::to_string),
        plan: plan.ok().map(|(placement, binding)| Plan::of(&placement, binding)),
        options: options(config, launch.as_ref().ok(), all)?,
    };
    Ok(printer.result(&report, |out| write_text(&report, &launch, config, all, out))?)
}

impl LauncherSettings {
    fn of(launch: &Launch) -> Self {
        let Launch { processes, master, .. } = launch;
        Self {
            reason: launch.reason.clone(),
            process: processes.index,
            processes: processes.count,
            local_process: processes.local_index,
            local_processes: processes.local_count,
            nnodes: launch.nnodes,
            master: master.as_ref().map(ToString::to_string),
            agent_store: master.as_ref().is_some_and(|master| master.agent_store),
            run_id: launch.run_id.clone(),
            restart_count: launch.restart_count,
            max_restarts: launch.max_restarts,
            error_file: launch.error_file.as_ref().map(|file| file.shown().into_owned()),
        }
    }
}

fn write_text(
    report: &Report,
    launch: &Result<Launch>,
    config: &Config,
    all: bool,
    out: &mut dyn Write,
) -> std::io::Result<()> {
    let none = || "none".to_string();
    let mut row = |name: &str, value: String| writeln!(out, "{name:<22}{value}");
    row("ddp-mp", report.versions.program())?;
    row("CPU cores", report.cpu_cores.to_string())?;
    if let Some(note) = binding_note() {
        row("  OpenMP", note)?;
    }
    row("NVIDIA driver", report.cuda_driver.as_ref().map_or_else(none, |v| format!("CUDA {v}")))?;
    if let Some(value) = &report.cuda_visible_devices {
        row("CUDA_VISIBLE_DEVICES", format!("{value:?}"))?;
    }
    row("visible GPUs", report.gpus.len().to_string())?;
    for (index, name) in report.gpus.iter().enumerate() {
        row(&format!("  GPU {index}"), name.clone())?;
    }
    if let Some(problem) = &report.gpu_problem {
        row("  cannot be used", problem.clone())?;
    }
    row("libtorch", report.versions.libtorch.clone())?;
    row("  loaded from", report.libtorch_folder.clone().unwrap_or_else(none))?;
    row("  freed CPU memory", if report.keeps_memory { "kept" } else { "returned" }.into())?;
    row("NCCL", report.versions.nccl())?;
    match launch {
        Ok(launch) if launch.kind == LaunchKind::Local => {
            let are = match config.launch.spawn {
                SpawnChoice::Threads => "threads of this process",
                SpawnChoice::Processes => "processes that this one starts",
            };
            row("launcher", format!("local (ranks are {are})"))?;
        }
        Ok(launch) => {
            let (processes, name) = (launch.processes, launch.kind.name());
            row("launcher", format!("{name}, process {} of {}", processes.index, processes.count))?;
        }
        // The error is printed below, as what would fail.
        Err(_) => row("launcher", "unknown".into())?,
    }
    if let Ok(launch) = launch {
        row("  because", launch.reason.clone())?;
        if let Some(master) = &launch.master {
            let host = if master.agent_store { "torchrun's agent" } else { "process 0" };
            row("  meet at", format!("{master}, where {host} listens"))?;
        }
    }
    if let Some(Samples { dataset, training, validation, in_features, out_features }) = &report.data
    {
        row("data", dataset.clone())?;
        row("  training", counted(training, "sample"))?;
        row("  validation", validation.map_or_else(none, |count| counted(count, "sample")))?;
        if let (Some(from), Some(to)) = (in_features, out_features) {
            row("  model", format!("{from} numbers -> {to}"))?;
        }
    }
    match (&report.plan, &report.plan_problem) {
        (Some(plan), _) => {
            let Plan { world_size, backend, devices, threads_per_rank, cpus, unbound } = plan;
            row("would run", format!("{}, backend {backend}", counted(world_size, "rank")))?;
            row("  devices", devices.join(" "))?;
            row("  threads per rank", threads_per_rank.to_string())?;
            row(
                "  CPUs of ranks",
                match cpus {
                    Some(cpus) => cpus.join(" "),
                    None => format!("not bound: {}", unbound.as_deref().unwrap_or_default()),
                },
            )?;
        }
        (None, problem) => row("would fail", problem.clone().unwrap_or_default())?,
    }
    write_options(&report.options, all, out)
}
