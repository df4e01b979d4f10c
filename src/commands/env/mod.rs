//! `ddp-mp env`: the software and devices of this machine, and the run that they would give.

mod check_gpus;
mod options;

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Value, json};

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

/// What was found.
struct Found<'a> {
    config: &'a Config,
    versions: Versions,
    cuda: &'a Cuda,
    visible_devices: Option<String>,
    libtorch_folder: Option<String>,
    /// An error if the launcher's variables are invalid.
    launch: Result<Launch>,
    /// The data, and the configuration with its sizes.
    data: Option<(Config, Data)>,
    plan: Result<(Placement, Binding)>,
    options: Vec<OptionValue<'a>>,
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
    let options = options(config, launch.as_ref().ok(), all)?;
    let (data, plan) = match open_data(config.clone()) {
        Ok((config, data)) => {
            let plan = place_all(&config, cuda);
            (Some((config, data)), plan)
        }
        Err(error) => (None, Err(error)),
    };
    let visible_devices = std::env::var_os("CUDA_VISIBLE_DEVICES");
    let visible_devices = visible_devices.map(|value| value.to_string_lossy().into_owned());
    let libtorch_folder = ffi::library_folder().map(|folder| folder.shown().into_owned());
    let found = Found {
        config,
        versions,
        cuda,
        visible_devices,
        libtorch_folder,
        launch,
        data,
        plan,
        options,
    };
    Ok(printer.result(&found.report(), |out| found.write_text(all, out))?)
}

impl Found<'_> {
    /// Returns the object of `--log-format json`.
    fn report(&self) -> impl Serialize {
        #[derive(Serialize)]
        struct Report {
            #[serde(flatten)]
            versions: Versions,
            #[serde(flatten)]
            machine: Value,
        }
        let launch = self.launch.as_ref().ok();
        let of_launch = |launch: &Launch| {
            json!({
                "reason": launch.reason,
                "process": launch.processes.index,
                "processes": launch.processes.count,
                "local_process": launch.processes.local_index,
                "local_processes": launch.processes.local_count,
                "nnodes": launch.nnodes,
                "master": launch.master.as_ref().map(ToString::to_string),
                "agent_store": launch.master.as_ref().is_some_and(|master| master.agent_store),
                "run_id": launch.run_id,
                "restart_count": launch.restart_count,
                "max_restarts": launch.max_restarts,
                "error_file": launch.error_file.as_ref().map(|file| file.shown().into_owned()),
            })
        };
        let of_data = |(config, data): &(Config, Data)| {
            json!({
                "dataset": config.data_name(),
                "training": data.training.len(),
                "validation": data.validation.as_ref().map(|samples| samples.len()),
                "in_features": config.data.in_features,
                "out_features": config.data.out_features,
            })
        };
        let of_plan = |(placement, binding): &(Placement, Binding)| {
            let (cpus, unbound) = cpus_of(binding);
            json!({
                "world_size": placement.devices.len(),
                "backend": placement.backend.name(),
                "devices": placement.labels(0),
                "threads_per_rank": placement.threads_per_rank,
                "cpus": cpus,
                "unbound": unbound,
            })
        };
        let machine = json!({
            "cpu_cores": cores(),
            "cuda_driver": self.cuda.driver,
            "cuda_visible_devices": self.visible_devices,
            "gpus": self.cuda.gpus,
            "gpu_problem": self.cuda.problem,
            "libtorch_folder": self.libtorch_folder,
            "keeps_memory": ffi::keeps_memory(),
            "launcher": launch.map(|launch| launch.kind.name()),
            "launch": launch.map(of_launch),
            "data": self.data.as_ref().map(of_data),
            "plan": self.plan.as_ref().ok().map(of_plan),
            "plan_problem": self.plan.as_ref().err().map(ToString::to_string),
            "options": self.options,
        });
        Report { versions: self.versions.clone(), machine }
    }

    fn write_text(&self, all: bool, out: &mut dyn Write) -> io::Result<()> {
        let Self { cuda, versions, .. } = self;
        let none = || "none".to_owned();
        let mut row = |name: &str, value: &str| writeln!(out, "{name:<22}{value}");
        row("ddp-mp", &versions.program())?;
        row("CPU cores", &cores().to_string())?;
        if let Some(note) = binding_note() {
            row("  OpenMP", &note)?;
        }
        row("NVIDIA driver", &cuda.driver.as_ref().map_or_else(none, |it| format!("CUDA {it}")))?;
        if let Some(value) = &self.visible_devices {
            row("CUDA_VISIBLE_DEVICES", &format!("{value:?}"))?;
        }
        row("visible GPUs", &cuda.gpus.len().to_string())?;
        for (index, name) in cuda.gpus.iter().enumerate() {
            row(&format!("  GPU {index}"), name)?;
        }
        if let Some(problem) = &cuda.problem {
            row("  cannot be used", problem)?;
        }
        row("libtorch", &versions.libtorch)?;
        row("  loaded from", self.libtorch_folder.as_deref().unwrap_or("none"))?;
        row("  freed CPU memory", if ffi::keeps_memory() { "kept" } else { "returned" })?;
        row("NCCL", &versions.nccl())?;
        match &self.launch {
            Ok(launch) if launch.kind == LaunchKind::Local => {
                let are = match self.config.launch.spawn {
                    SpawnChoice::Threads => "threads of this process",
                    SpawnChoice::Processes => "processes that this one starts",
                };
                row("launcher", &format!("local (ranks are {are})"))?;
            }
            Ok(launch) => {
                let (of, name) = (launch.processes, launch.kind.name());
                row("launcher", &format!("{name}, process {} of {}", of.index, of.count))?;
            }
            // The error is printed below, as what would fail.
            Err(_) => row("launcher", "unknown")?,
        }
        if let Ok(launch) = &self.launch {
            row("  because", &launch.reason)?;
            if let Some(master) = &launch.master {
                let host = if master.agent_store { "torchrun's agent" } else { "process 0" };
                row("  meet at", &format!("{master}, where {host} listens"))?;
            }
        }
        if let Some((config, Data { training, validation, .. })) = &self.data {
            row("data", &config.data_name())?;
            row("  training", &counted(training.len(), "sample"))?;
            let validation = validation.as_ref().map(|samples| counted(samples.len(), "sample"));
            row("  validation", &validation.unwrap_or_else(none))?;
            if let (Some(from), Some(to)) = (config.data.in_features, config.data.out_features) {
                row("  model", &format!("{from} numbers -> {to}"))?;
            }
        }
        match &self.plan {
            Ok((placement, binding)) => {
                let ranks = counted(placement.devices.len(), "rank");
                row("would run", &format!("{ranks}, backend {}", placement.backend.name()))?;
                row("  devices", &placement.labels(0).join(" "))?;
                row("  threads per rank", &placement.threads_per_rank.to_string())?;
                let cpus = match cpus_of(binding) {
                    (Some(cpus), _) => cpus.join(" "),
                    (None, why) => format!("not bound: {}", why.unwrap_or_default()),
                };
                row("  CPUs of ranks", &cpus)?;
            }
            Err(problem) => row("would fail", &problem.to_string())?,
        }
        write_options(&self.options, all, out)
    }
}

/// Returns the CPUs of each rank, as `0-3`; or why the ranks are not bound.
fn cpus_of(binding: &Binding) -> (Option<Vec<String>>, Option<&str>) {
    match binding {
        Binding::Bound(cpus) => (Some(cpus.iter().map(ToString::to_string).collect()), None),
        Binding::Unbound(reason) => (None, Some(reason)),
    }
}
