//! `ddp-mp env --check-gpus`: whether each GPU computes, and each pair of GPUs exchanges, what it should.
//!
//! A check is a process of its own: one that hangs in CUDA or NCCL cannot be ended otherwise. This process never calls
//! the driver, so that it can always tell what hangs.

mod check;
mod process;

use std::sync::Arc;

use anyhow::bail;
use serde::Serialize;
use serde_json::json;

use crate::session::AlreadyReported;
use check::{Check, Found, Machine, Verdict};
use engine::error::Error;
use views::Printer;

/// The variables that switch off one of NCCL's ways between GPUs.
const SWITCHES: [&str; 3] = ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"];

/// The result of a check: a line of `--log-format json`.
#[derive(Debug, Serialize)]
struct Checked {
    #[serde(flatten)]
    check: Check,
    #[serde(flatten)]
    found: Found,
    /// The switches with which it passes. `None` if none was tried.
    passes_with: Option<Vec<&'static str>>,
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
    let found = process::run(Check::Machine, None, printer)?;
    let Some(machine) = found.machine else {
        bail!(
            "--check-gpus: looking for GPUs {}; look at nvidia-smi and dmesg, and find the GPU with \
             CUDA_VISIBLE_DEVICES=0, then 1, and so on",
            found.problem.unwrap_or_default()
        )
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
        let gpus = self.machine.gpus.len();
        let mut working = Vec::new();
        for gpu in 0..gpus {
            if self.check(Check::Product([gpu]))? {
                working.push(gpu);
            }
        }
        if gpus == 1 {
            return self.skip("there is one GPU, and no pair to check");
        }
        if working.len() < gpus {
            self.skip("pairs with a GPU that did not pass are not checked")?;
        }
        let mut pairs = Vec::new();
        for (index, &first) in working.iter().enumerate() {
            pairs.extend(working[index + 1..].iter().map(|&second| [first, second]));
        }
        for &[first, second] in &pairs {
            self.check(Check::Copy([first, second]))?;
            self.check(Check::Copy([second, first]))?;
        }
        if let Some(problem) = &self.machine.nccl_problem {
            return self.skip(&format!("all_reduce is not checked: {problem}"));
        }
        pairs.into_iter().try_for_each(|pair| self.check(Check::AllReduce(pair)).map(drop))
    }

    /// Makes a check and prints what it found. Tries NCCL's switches with an all_reduce that does not pass. Returns whether
    /// it has passed.
    fn check(&mut self, check: Check) -> anyhow::Result<bool> {
        let found = process::run(check, None, self.printer)?;
        let passes = found.result == Verdict::Right;
        self.is_passed &= passes;
        let tries = matches!(check, Check::AllReduce(_)) && !passes;
        let passes_with = tries.then(|| self.passing(check)).transpose()?;
        let checked = Checked { check, found, passes_with };
        let text = checked.text(&self.machine.gpus);
        self.printer.result(&checked, |out| writeln!(out, "{text}"))?;
        Ok(passes)
    }

    /// Returns the switches with which `check` passes: those that have helped another pair, and of the others if none of
    /// them helps. Does not try those that the user has set.
    fn passing(&mut self, check: Check) -> anyhow::Result<Vec<&'static str>> {
        let is_set = |switch: &str| std::env::var_os(switch).is_some_and(|value| value == "1");
        for has_helped in [true, false] {
            let mut passing = Vec::new();
            for switch in SWITCHES {
                if self.helpful.contains(&switch) == has_helped
                    && !is_set(switch)
                    && process::run(check, Some(switch), self.printer)?.result == Verdict::Right
                {
                    passing.push(switch);
                }
            }
            if !passing.is_empty() {
                self.helpful.extend(&passing);
                return Ok(passing);
            }
        }
        Ok(Vec::new())
    }

    fn skip(&self, reason: &str) -> anyhow::Result<()> {
        let skipped = json!({"event": "skipped", "reason": reason});
        Ok(self.printer.result(&skipped, |out| writeln!(out, "{reason}"))?)
    }
}

impl Checked {
    /// Returns the line for people. `names` are those of all GPUs.
    fn text(&self, names: &[String]) -> String {
        let Self { check, found, passes_with } = self;
        let (what, remedy) = match *check {
            Check::Copy([from, to]) => (
                format!("GPU {from} -> {to}: copy"),
                "look at nvidia-smi topo -p2p r, at IOMMU and at ACS".into(),
            ),
            Check::AllReduce([first, second]) => (
                format!("GPUs {first} and {second}: all_reduce"),
                match passes_with.as_deref() {
                    None | Some([]) => "no switch of NCCL helps; NCCL_DEBUG=INFO says more".into(),
                    Some(switches) => {
                        format!("it passes with {}=1", switches.join("=1, and with "))
                    }
                },
            ),
            Check::Product([gpu]) => (
                format!("GPU {gpu} ({}): product", names[gpu]),
                "look at nvidia-smi -q and dmesg".into(),
            ),
            Check::Machine => return String::new(),
        };
        if let Some(problem) = &found.problem {
            return format!("{what} {problem}; {remedy}");
        }
        let rates = [
            found.tflops.map(|rate| format!(", {rate:.2} TFLOP/s")),
            found.gb_per_s.map(|rate| format!(", {rate:.2} GB/s")),
            found.latency_us.map(|time| format!(", {time:.0} us for 4 bytes")),
        ];
        format!("{what} right{}", rates.into_iter().flatten().collect::<String>())
    }
}
