//! `ddp-mp env --check-gpus`: whether each GPU computes, and each pair of GPUs exchanges, what it should.
//!
//! A check is a process of its own: one that hangs in CUDA or NCCL cannot be ended otherwise. This process never calls
//! the driver, so that it can always tell what hangs.

mod check;
mod process;

use std::sync::Arc;

use anyhow::bail;
use serde::Serialize;

use crate::error::Error;
use crate::session::AlreadyReported;
use crate::telemetry::Printer;
use check::{Check, Machine, Message, Part, Speed};
use process::Outcome;

/// The variables that switch off one of NCCL's ways between GPUs.
const SWITCHES: [&str; 3] = ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"];

/// The result of a check: a line of `--log-format json`.
#[derive(Debug, Serialize)]
struct Checked {
    /// `product`, `copy` or `all_reduce`.
    event: &'static str,
    /// The GPUs; of a copy the source first.
    gpus: Vec<usize>,
    result: Verdict,
    /// What is wrong. `None` if nothing is.
    problem: Option<String>,
    #[serde(flatten)]
    speed: Speed,
    /// The switches with which it passes. `None` if none was tried.
    passes_with: Option<Vec<&'static str>>,
}

/// Checks that are not made, and why.
#[derive(Debug, Serialize)]
struct Skipped {
    event: &'static str,
    reason: String,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Right,
    Wrong,
    Fails,
    Hangs,
    Dies,
}

/// Checks all visible GPUs, and prints a line for each check when it has ended. In a process of a check, makes that one.
///
/// # Errors
/// [`Error::Input`] if there is no GPU to check, [`AlreadyReported`] if a check did not pass, and an error when
/// stdout cannot be written.
pub fn check_gpus(printer: &Arc<Printer>) -> anyhow::Result<()> {
    if let Some(check) = process::asked_for() {
        return check::make(check, printer);
    }
    let machine = match process::run(Check::Machine, None, printer)? {
        Outcome::Ended(Message::Found(machine)) => machine,
        outcome => {
            bail!(
                "--check-gpus: looking for GPUs {}; look at nvidia-smi and dmesg, and find the GPU with \
                 CUDA_VISIBLE_DEVICES=0, then 1, and so on",
                verdict(&outcome).1.unwrap_or_default()
            )
        }
    };
    if let Some(problem) = &machine.gpu_problem {
        return Err(Error::usage(format!("--check-gpus: {problem}")).into());
    }
    if machine.gpus.is_empty() {
        let remedy = "check CUDA_VISIBLE_DEVICES, and that nvidia-smi shows a GPU";
        return Err(Error::unsupported(format!("--check-gpus: no GPU is visible; {remedy}")).into());
    }
    let mut checks = Checks { printer, machine: &machine, is_passed: true, helpful: Vec::new() };
    checks.run()?;
    if checks.is_passed { Ok(()) } else { Err(anyhow::Error::msg(AlreadyReported)) }
}

/// All checks of a machine.
struct Checks<'a> {
    printer: &'a Printer,
    machine: &'a Machine,
    /// Whether all checks so far have passed.
    is_passed: bool,
    /// The switches with which an all_reduce passed that did not pass without.
    helpful: Vec<&'static str>,
}

impl Checks<'_> {
    fn run(&mut self) -> anyhow::Result<()> {
        let mut working = Vec::new();
        for gpu in 0..self.machine.gpus.len() {
            let checked = self.check(Check::Product(gpu))?;
            if checked.result == Verdict::Right {
                working.push(gpu);
            }
            self.print(&checked)?;
        }
        if self.machine.gpus.len() == 1 {
            return self.skip("there is one GPU, and no pair to check".into());
        }
        if working.len() < self.machine.gpus.len() {
            self.skip("pairs with a GPU that did not pass are not checked".into())?;
        }
        let mut pairs = Vec::new();
        for (index, &first) in working.iter().enumerate() {
            pairs.extend(working[index + 1..].iter().map(|&second| (first, second)));
        }
        for &(first, second) in &pairs {
            for check in [Check::Copy(first, second), Check::Copy(second, first)] {
                let checked = self.check(check)?;
                self.print(&checked)?;
            }
        }
        match &self.machine.nccl_problem {
            Some(problem) => self.skip(format!("all_reduce is not checked: {problem}")),
            None => {
                for (first, second) in pairs {
                    self.all_reduce(first, second)?;
                }
                Ok(())
            }
        }
    }

    /// Checks an all_reduce of two GPUs. If it does not pass, tries NCCL's switches: those that have helped another pair,
    /// and all others if none of them helps.
    fn all_reduce(&mut self, first: usize, second: usize) -> anyhow::Result<()> {
        let check = Check::AllReduce(first, second);
        let mut checked = self.check(check)?;
        if checked.result != Verdict::Right {
            let (helpful, others): (Vec<_>, Vec<_>) =
                SWITCHES.into_iter().partition(|switch| self.helpful.contains(switch));
            let mut passes_with = self.passing(check, &helpful)?;
            if passes_with.is_empty() {
                passes_with = self.passing(check, &others)?;
                self.helpful.extend(&passes_with);
            }
            checked.passes_with = Some(passes_with);
        }
        self.print(&checked)
    }

    /// Returns those of `switches` with which `check` passes. Does not try those that the user has set.
    fn passing(
        &self,
        check: Check,
        switches: &[&'static str],
    ) -> anyhow::Result<Vec<&'static str>> {
        let is_set = |switch: &&&str| std::env::var_os(switch).is_some_and(|value| value == "1");
        let mut passing = Vec::new();
        for switch in switches.iter().filter(|switch| !is_set(switch)) {
            let outcome = process::run(check, Some(switch), self.printer)?;
            if verdict(&outcome).0 == Verdict::Right {
                passing.push(*switch);
            }
        }
        Ok(passing)
    }

    fn check(&self, check: Check) -> anyhow::Result<Checked> {
        let (event, gpus) = match check {
            Check::Machine => ("machine", vec![]),
            Check::Product(gpu) => ("product", vec![gpu]),
            Check::Copy(from, to) => ("copy", vec![from, to]),
            Check::AllReduce(first, second) => ("all_reduce", vec![first, second]),
        };
        let outcome = process::run(check, None, self.printer)?;
        let (result, problem) = verdict(&outcome);
        let speed = match outcome {
            Outcome::Ended(Message::Right(speed)) => speed,
            _ => Speed::default(),
        };
        Ok(Checked { event, gpus, result, problem, speed, passes_with: None })
    }

    fn print(&mut self, checked: &Checked) -> anyhow::Result<()> {
        self.is_passed &= checked.result == Verdict::Right;
        let text = checked.text(&self.machine.gpus);
        Ok(self.printer.result(checked, |out| writeln!(out, "{text}"))?)
    }

    fn skip(&self, reason: String) -> anyhow::Result<()> {
        let skipped = Skipped { event: "skipped", reason };
        Ok(self.printer.result(&skipped, |out| writeln!(out, "{}", skipped.reason))?)
    }
}

/// Returns how a check ended, and what is wrong, to follow its name. `None` if nothing is.
fn verdict(outcome: &Outcome) -> (Verdict, Option<String>) {
    let meanwhile = |part: &Part| match part {
        Part::Load => " while loading CUDA",
        Part::Connect => " while connecting with NCCL",
        Part::Work => "",
    };
    let (verdict, problem) = match outcome {
        Outcome::Ended(Message::Right(_)) => return (Verdict::Right, None),
        Outcome::Ended(Message::Wrong(wrong, all)) => {
            (Verdict::Wrong, format!("has wrong values ({wrong} of {all})"))
        }
        Outcome::Ended(Message::Fails(error)) => (Verdict::Fails, format!("fails: {error}")),
        Outcome::Ended(other) => (Verdict::Fails, format!("answers {other:?}")),
        Outcome::Hangs { part, is_killed } => {
            let stuck = if *is_killed {
                ""
            } else {
                ", and its process waits in the driver and cannot be killed"
            };
            let seconds = part.limit().as_secs();
            (Verdict::Hangs, format!("hangs{} ({seconds} s){stuck}", meanwhile(part)))
        }
        Outcome::Dies(part, how) => {
            (Verdict::Dies, format!("dies{}: its process {how}", meanwhile(part)))
        }
    };
    (verdict, Some(problem))
}

impl Checked {
    /// Returns the line for people. `names` are those of all GPUs.
    fn text(&self, names: &[String]) -> String {
        let Self { event, gpus, problem, speed, passes_with, .. } = self;
        let what = match (*event, &gpus[..]) {
            ("copy", &[from, to]) => format!("GPU {from} -> {to}: copy"),
            (_, &[first, second]) => format!("GPUs {first} and {second}: {event}"),
            _ => format!("GPU {} ({}): {event}", gpus[0], names[gpus[0]]),
        };
        let Some(problem) = problem else {
            let Speed { tflops, gb_per_s, latency_us } = speed;
            let rates = [
                tflops.map(|rate| format!(", {rate:.2} TFLOP/s")),
                gb_per_s.map(|rate| format!(", {rate:.2} GB/s")),
                latency_us.map(|time| format!(", {time:.0} us for 4 bytes")),
            ];
            return format!("{what} right{}", rates.into_iter().flatten().collect::<String>());
        };
        let remedy = match (*event, passes_with.as_deref()) {
            ("product", _) => "look at nvidia-smi -q and dmesg".into(),
            ("copy", _) => "look at nvidia-smi topo -p2p r, at IOMMU and at ACS".into(),
            (_, None | Some([])) => "no switch of NCCL helps; NCCL_DEBUG=INFO says more".into(),
            (_, Some(switches)) => format!("it passes with {}=1", switches.join("=1, and with ")),
        };
        format!("{what} {problem}; {remedy}")
    }
}
