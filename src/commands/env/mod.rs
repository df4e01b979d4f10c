//! `ddp-mp env`: the software and devices of this machine, and the run that they would give.

mod check_gpus;
mod options;

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Value, json};

use super::Versions;
use crate::config::{Config, Data};
use crate::session::{open_data, place_all};
pub use check_gpus::check_gpus;
use engine::error::{Shown, counted};
use engine::ffi::{self, cuda::Cuda};
use engine::launch::{Binding, Launch, LaunchKind, Placement, SpawnChoice};
use engine::os::{binding_note, cores};
use options::options;
use views::Printer;

/// The object of `--log-format json`.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    versions: &'a Versions,
    #[serde(flatten)]
    found: &'a Value,
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
    let launch = launch.as_ref().ok(); // its error is that of the plan, too
    let options = options(config, launch, all)?;
    let data = open_data(config.clone());
    let plan = match &data {
        Ok((config, _)) => place_all(config, cuda).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    let visible = std::env::var_os("CUDA_VISIBLE_DEVICES");
    let found = json!({
        "cpu_cores": cores(),
        "cuda_driver": cuda.driver,
        "cuda_visible_devices": visible.map(|value| value.to_string_lossy().into_owned()),
        "gpus": cuda.gpus,
        "gpu_problem": cuda.problem,
        "libtorch_folder": ffi::library_folder().map(|folder| folder.shown().into_owned()),
        "keeps_memory": ffi::keeps_memory(),
        "launcher": launch.map(|launch| launch.kind.name()),
        "launch": launch.map(of_launch),
        "data": data.as_ref().ok().map(of_data),
        "plan": plan.as_ref().ok().map(of_plan),
        "plan_problem": plan.as_ref().err(),
        "options": options,
    });
    let report = Report { versions: &versions, found: &found };
    Ok(printer.result(&report, |out| {
        report.write_text(of_launcher(launch, config.launch.spawn), out)?;
        options::write(&options, all, out)
    })?)
}

/// Returns what is known about `launch`.
fn of_launch(launch: &Launch) -> Value {
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
}

/// Returns the name and the sizes of the data.
fn of_data((config, data): &(Config, Data)) -> Value {
    json!({
        "dataset": config.data_name(),
        "training": data.training.len(),
        "validation": data.validation.as_ref().map(|samples| samples.len()),
        "in_features": config.data.in_features,
        "out_features": config.data.out_features,
    })
}

/// Returns where the ranks would run.
fn of_plan((placement, binding): &(Placement, Binding)) -> Value {
    let (cpus, unbound): (Option<Vec<String>>, _) = match binding {
        Binding::Bound(cpus) => (Some(cpus.iter().map(ToString::to_string).collect()), None),
        Binding::Unbound(reason) => (None, Some(reason)),
    };
    json!({
        "world_size": placement.devices.len(),
        "backend": placement.backend.name(),
        "devices": placement.labels(0),
        "threads_per_rank": placement.threads_per_rank,
        "cpus": cpus,
        "unbound": unbound,
    })
}

/// Returns for people what has started this process.
fn of_launcher(launch: Option<&Launch>, spawn: SpawnChoice) -> String {
    match launch {
        Some(launch) if launch.kind == LaunchKind::Local => match spawn {
            SpawnChoice::Threads => "local (ranks are threads of this process)".into(),
            SpawnChoice::Processes => "local (ranks are processes that this one starts)".into(),
        },
        Some(launch) => {
            let (of, name) = (launch.processes, launch.kind.name());
            format!("{name}, process {} of {}", of.index, of.count)
        }
        None => "unknown".into(),
    }
}

impl Report<'_> {
    /// Writes for people what was found: a line for each value that there is.
    fn write_text(&self, launcher: String, out: &mut dyn Write) -> io::Result<()> {
        let Self { versions, found } = *self;
        let text = |path: &str| self.text(path);
        let none = || "none".to_owned();
        let driver = text("/cuda_driver").map_or_else(none, |version| format!("CUDA {version}"));
        let has_agent = found["launch"]["agent_store"] == true;
        let host = if has_agent { "torchrun's agent" } else { "process 0" };
        let keeps = found["keeps_memory"] == true;
        let validation = || self.count("/data/validation", "sample").unwrap_or_else(none);
        let sizes = text("/data/in_features").zip(text("/data/out_features"));
        let ranks = self.count("/plan/world_size", "rank");
        let backend = text("/plan/backend").unwrap_or_default();
        let unbound = || text("/plan/unbound").map(|why| format!("not bound: {why}"));
        let rows = [
            ("ddp-mp", Some(versions.program())),
            ("CPU cores", text("/cpu_cores")),
            ("  OpenMP", binding_note()),
            ("NVIDIA driver", Some(driver)),
            ("CUDA_VISIBLE_DEVICES", text("/cuda_visible_devices").map(|it| format!("{it:?}"))),
            ("visible GPUs", Some(self.gpus())),
            ("  cannot be used", text("/gpu_problem")),
            ("libtorch", Some(versions.libtorch.clone())),
            ("  loaded from", Some(text("/libtorch_folder").unwrap_or_else(none))),
            ("  freed CPU memory", Some(if keeps { "kept" } else { "returned" }.into())),
            ("NCCL", Some(versions.nccl())),
            ("launcher", Some(launcher)),
            ("  because", text("/launch/reason")),
            ("  meet at", text("/launch/master").map(|at| format!("{at}, where {host} listens"))),
            ("data", text("/data/dataset")),
            ("  training", self.count("/data/training", "sample")),
            ("  validation", text("/data/dataset").map(|_| validation())),
            ("  model", sizes.map(|(from, to)| format!("{from} numbers -> {to}"))),
            ("would run", ranks.map(|ranks| format!("{ranks}, backend {backend}"))),
            ("  devices", text("/plan/devices")),
            ("  threads per rank", text("/plan/threads_per_rank")),
            ("  CPUs of ranks", text("/plan/cpus").or_else(unbound)),
            ("would fail", text("/plan_problem")),
        ];
        for (name, value) in rows {
            if let Some(value) = value {
                writeln!(out, "{name:<22}{value}")?;
            }
        }
        Ok(())
    }

    /// Returns the value at `path` for people. `None` if there is none.
    fn text(&self, path: &str) -> Option<String> {
        match self.found.pointer(path)? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            Value::Array(_) => Some(self.list(path).join(" ")),
            other => Some(other.to_string()),
        }
    }

    /// Returns the number at `path` with the name of what it counts. `None` if there is none.
    fn count(&self, path: &str, what: &str) -> Option<String> {
        self.text(path).map(|count| counted(count, what))
    }

    /// Returns the texts of the list at `path`, if there is one.
    fn list(&self, path: &str) -> Vec<&str> {
        let values = self.found.pointer(path).and_then(Value::as_array);
        values.into_iter().flatten().filter_map(Value::as_str).collect()
    }

    /// Returns the number of visible GPUs, and a line with the name of each.
    fn gpus(&self) -> String {
        let gpus = self.list("/gpus");
        let names = gpus.iter().enumerate().map(|(i, name)| {
            let label = format!("  GPU {i}");
            format!("\n{label:<22}{name}")
        });
        format!("{}{}", gpus.len(), names.collect::<String>())
    }
}
