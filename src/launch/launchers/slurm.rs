//! The variables that srun sets for each task of a job step.

use super::nodelist;
use super::table::Launcher;
use super::variables::{Number, Variables};
use crate::error::{Error, Result};

/// The first number of steps that srun did not start, such as batch scripts and shells of salloc.
const FIRST_OWN_STEP: usize = 0xffff_fff0;

/// Variables with the number of the job.
const JOB: [&str; 2] = ["SLURM_JOB_ID", "SLURM_JOBID"];

/// Variables with the number of the step.
const STEP: [&str; 2] = ["SLURM_STEP_ID", "SLURM_STEPID"];

/// Variables with the numbers of a task.
const OF_A_TASK: [&str; 3] = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"];

/// Names of jobs whose processes are shells. srun names a job after its program, salloc `interactive`.
const INTERACTIVE: [&str; 10] =
    ["interactive", "sh", "bash", "dash", "zsh", "fish", "ksh", "mksh", "csh", "tcsh"];

/// Variables with the number of tasks, the most reliable first.
pub(super) const TASKS: [&str; 3] = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"];

/// Whether srun has started this process as a task.
pub(super) enum SrunTask {
    /// srun has started it as a task.
    Task,
    /// srun has not; with the reason for the user, if Slurm is involved.
    Outside(Option<String>),
}

/// # Errors
/// [`Error::Input`] when the variables do not decide it.
pub(super) fn step(variables: &Variables) -> Result<SrunTask> {
    let job = variables.first_of(&JOB).and_then(|name| variables.text(name));
    let is_step = step_id(variables)?.is_some();
    let Some(job) = job else {
        let set = is_step || variables.first_of(&OF_A_TASK).is_some();
        return Ok(if set { SrunTask::Task } else { SrunTask::Outside(None) }); // `read` reports what is missing
    };
    // A batch script has SLURM_PROCID=0 as well, but no step.
    if !is_step && variables.integer("SLURM_PROCID")?.is_none_or(|task| task == 0) {
        let why = format!("srun has not started this process of Slurm job {job}");
        return Ok(SrunTask::Outside(Some(why)));
    }
    let Some(sign) = sign_of_a_shell(variables) else { return Ok(SrunTask::Task) };
    let tasks = tasks(variables)?.unwrap_or(1);
    if tasks > 1 {
        return Err(Error::usage(format!(
            "{sign} shows that srun has started a shell, but this step has {tasks} tasks; use --launch slurm if srun \
             started ddp-mp itself, or --launch local if a shell did"
        )));
    }
    Ok(SrunTask::Outside(Some(format!("Slurm job {job} is a shell: {sign}"))))
}

/// Returns the variable that shows that srun has started a shell, in which a user types: the name of its job, or the port of
/// the terminal of `srun --pty`. `None` if neither does.
fn sign_of_a_shell(variables: &Variables) -> Option<String> {
    let file = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
    let shell = variables.text("SHELL").map(|shell| file(&shell));
    let is_shell = |name: &String| {
        let name = file(name.trim_start_matches('-'));
        INTERACTIVE.contains(&&name[..]) || Some(name) == shell
    };
    let (job, terminal) = ("SLURM_JOB_NAME", "SLURM_PTY_PORT");
    let sign = |name: &str, value: String| format!("{name}={value}");
    let named = variables.text(job).filter(is_shell).map(|value| sign(job, value));
    named.or_else(|| variables.text(terminal).map(|value| sign(terminal, value)))
}

/// Returns the id of the step; `None` if it is unset or not one of srun's.
pub(super) fn step_id(variables: &Variables) -> Result<Option<usize>> {
    match variables.first_of(&STEP) {
        Some(name) => Ok(variables.integer(name)?.filter(|&id| id < FIRST_OWN_STEP)),
        None => Ok(None),
    }
}

fn tasks(variables: &Variables) -> Result<Option<usize>> {
    match variables.first_of(&TASKS) {
        Some(name) => variables.count(name),
        None => Ok(None),
    }
}

/// Checks that srun has started this process as a task. A batch script has the other variables, too.
pub(super) fn check_task(srun: &Launcher, variables: &Variables) -> Result<()> {
    let has_number = variables.is_set("SLURM_PROCID");
    match step_id(variables)? {
        Some(_) if !has_number => Err(srun.lacks(&["SLURM_PROCID"], &["SLURM_STEP_ID"])),
        None if has_number => Err(srun.lacks(&["SLURM_STEP_ID"], &["SLURM_PROCID"])),
        _ if has_number && variables.first_of(&JOB).is_none() => {
            Err(srun.lacks(&JOB[..1], &["SLURM_PROCID"]))
        }
        _ => Ok(()),
    }
}

/// Returns how many tasks there are on machine `node`, from Slurm's list for all machines.
pub(super) fn tasks_on_node(
    srun: &Launcher,
    variables: &Variables,
    node: Option<Number>,
    count: Number,
) -> Result<Number> {
    let names = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let name = variables.first_of(&names).unwrap_or(names[0]);
    let Some(list) = variables.text(name) else {
        return Err(srun.lacks(&[name], &["SLURM_PROCID", "SLURM_NODEID"]));
    };
    let (value, all) = nodelist::tasks_on(name, &list, node.map_or(0, |node| node.value))?;
    if all != count.value {
        return Err(Error::usage(format!(
            "{name}={list} has {all} tasks, and {count}; check what sets them"
        )));
    }
    Ok(Number { name, value })
}

/// Returns the number of the job and of the step.
pub(super) fn run_id(variables: &Variables) -> String {
    let text = |names: &[&'static str]| {
        variables.first_of(names).and_then(|name| variables.text(name)).unwrap_or_default()
    };
    format!("{}.{}", text(&JOB), text(&STEP))
}

/// Returns the host of task 0.
pub(super) fn first_host(variables: &Variables, nnodes: usize) -> Result<String> {
    let names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let Some((name, list)) =
        variables.first_of(&names).and_then(|name| Some((name, variables.text(name)?)))
    else {
        return Err(Error::usage(
            "none of SLURM_STEP_NODELIST, SLURM_JOB_NODELIST and MASTER_ADDR is set, so the host of task 0 is \
             unknown; use --master-addr"
                .into(),
        ));
    };
    let hosts = nodelist::hosts(name, &list)?;
    // The job may have more nodes than the step.
    let too_few = hosts.count < nnodes as u64;
    if too_few || (name == names[0] && hosts.count != nnodes as u64) {
        return Err(Error::usage(format!(
            "{name}={list} has {} hosts, and the step has {nnodes} nodes; set MASTER_ADDR to the host of task 0",
            hosts.count
        )));
    }
    Ok(hosts.first)
}

/// Returns a port that is the same for all tasks of a step. It differs between the steps of a job, and usually between jobs
/// on one host.
pub(super) fn port(variables: &Variables) -> Result<u16> {
    let job = variables.first_of(&JOB);
    let id = job.and_then(|name| variables.text(name)).unwrap_or_default();
    let digits = id.get(id.len().saturating_sub(4)..).unwrap_or_default();
    match digits.parse::<u16>() {
        Ok(job) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            let step = step_id(variables)?.unwrap_or(0) % 10_000;
            // Step 1 of a job must not meet at the port of the next job's step 0, as likely as not at the same time.
            let offset = (usize::from(job) + 617 * step) % 10_000;
            Ok(15_000 + offset as u16)
        }
        _ => Err(Error::usage(format!(
            "SLURM_JOB_ID={id:?} is not a number, so it gives no port; set MASTER_PORT, or use --master-port"
        ))),
    }
}
