//! The explanation in English.

use super::texts::{Catalog, Section};
use super::{RunInfo, Step};

pub(super) struct English;

impl Catalog for English {
    fn rendezvous(&self, run_info: &RunInfo) -> Section {
        let RunInfo { world_size: n, processes, backend, .. } = run_info;
        let text = match (*n, *processes, *backend) {
            (1, ..) => {
                "There is one rank, so it needs no rendezvous, and averaging changes nothing. \
                        --nproc-per-node=2 starts two."
                    .into()
            }
            (_, 1, "nccl") => format!(
                "The {n} ranks are threads of one process, each with a GPU. Rank 0 has NCCL make a unique id (128 \
                 bytes) and sends it to the others over a channel: nobody chooses a port. With the id each joins the \
                 same communicator, through which the GPUs talk."
            ),
            (_, 1, _) => format!(
                "The {n} ranks are threads of one process. Rank 0 makes shared memory to talk through and sends the \
                 others a handle over a channel: no id, no address, no port. (On GPUs NCCL's unique id goes this way; \
                 PyTorch's ranks are processes, and meet at MASTER_PORT.)"
            ),
            (_, p, "nccl") => format!(
                "The {n} ranks are in {p} processes, which are connected to a TCPStore. The first process has NCCL \
                 make a unique id (128 bytes) and stores it there for the others{}. With the id each rank joins one \
                 communicator, over which the GPUs communicate.",
                if *n > p { ", and within a process it goes over a channel" } else { "" }
            ),
            (_, p, _) => format!(
                "The {n} ranks are in {p} processes, which have met in a TCPStore. There is no id: each process puts \
                 the address of its Gloo into the store, finds those of the others there, and they connect.{}",
                if *n > p { " Ranks of one process share memory." } else { "" }
            ),
        };
        Section::new("How the ranks meet", text)
    }

    fn start(&self, run_info: &RunInfo, were_same: bool, resumed: Option<u64>) -> Section {
        let RunInfo { world_size: n, model, parameters, seed, .. } = run_info;
        let who = if *n > 1 { "Each rank" } else { "The rank" };
        let mut text =
            format!("{who} builds the model ({model}, {parameters} parameters) from seed {seed}. ");
        match resumed {
            Some(step) => {
                text += &format!("Rank 0 takes those of a checkpoint, after {step} steps. ")
            }
            None if run_info.starts_from_file => {
                text += "Rank 0 takes those of a file (--init-from). "
            }
            None => {}
        }
        if *n > 1 {
            text += "Then rank 0 broadcasts its parameters. ";
            text += if run_info.partitions_optimizer {
                "From here on each rank updates a part of them, which the others copy (--zero). "
            } else {
                "From here on the ranks exchange only gradients, so a rank with other weights would never catch up. "
            };
            if were_same {
                text +=
                    "(The same seed has made them equal already, but DDP does not rely on that.) ";
            }
        }
        if run_info.shares_model {
            text += "The ranks of a process are threads and share one copy of the parameters (--share-model). ";
        }
        text += "Their hash, of 64 bits:";
        Section::new("The same start", text)
    }

    fn built_and_now(&self) -> [&'static str; 2] {
        ["as built", "at the start"]
    }

    fn data(&self, run_info: &RunInfo, epoch: u64) -> Section {
        let RunInfo { world_size: n, samples, seed, .. } = run_info;
        let order = match run_info.shuffles {
            true => format!(
                "shuffles the numbers of the {samples} samples with the same seed ({seed} + epoch {epoch})"
            ),
            false => format!("goes through the {samples} samples in their order"),
        };
        if *n == 1 {
            return Section::new("The samples", format!("The rank {order}, and takes them all."));
        }
        let left = samples % n;
        let rest = match (left, run_info.drops_last) {
            (0, _) => String::new(),
            (left, true) => format!(" {left} of them are left out, so that all get as many."),
            (left, false) if run_info.exact_mean => {
                format!(" They do not go round, so ranks up to {} get one more.", left - 1)
            }
            (left, false) => format!(" Dealt twice, so that all get as many: {}.", n - left),
        };
        let text = format!(
            "Each rank {order}, and rank r takes those at places r, r + {n}, r + {}, ... So each trains on samples of \
             its own, and no rank distributes samples.{rest}",
            2 * n
        );
        Section::new("Different samples", text)
    }

    fn gradients(&self, run_info: &RunInfo, step: &Step, compressed: Option<&str>) -> Section {
        let RunInfo { world_size: n, parameters, accumulate, .. } = run_info;
        let Step { step: number, weight, buckets, .. } = step;
        let buckets = if *buckets == 1 { "1 bucket" } else { &format!("{buckets} buckets") };
        let adds_up = match accumulate {
            1 => String::new(),
            k => format!(" (the mean over {k} batches, one after the other: --grad-accum-steps)"),
        };
        let compressed = compressed.map_or(String::new(), |name| self.compressed(name));
        if *n == 1 {
            let text = format!(
                "Forward and backward give the gradients{adds_up}; all {parameters} lie in {buckets}. The all-reduce \
                 leaves them as they are, each being the mean over one rank. {compressed}The largest gradient, \
                 {weight}:"
            );
            return Section::new(format!("Step {number}: the gradient"), text);
        }
        let mean = match step.shares(run_info) {
            None => format!("its mean: each rank's is divided by {n}"),
            Some(shares) => format!(
                "its mean over all samples (--exact-mean): each rank's is multiplied by its share of the samples, \
                 {shares}"
            ),
        };
        let text = format!(
            "Forward and backward on its own samples give each rank its own gradients{adds_up}; all {parameters} lie \
             in {buckets}. The all-reduce replaces each gradient by {mean}, and all are added up. {compressed}The \
             largest gradient, {weight}:"
        );
        Section::new(format!("Step {number}: different gradients become one"), text)
    }

    fn compressed(&self, name: &str) -> String {
        format!("They travel as {name} (--comm-hook), so that the mean is not exact. ")
    }

    fn columns(&self, num_samples: Option<usize>) -> [String; 5] {
        let samples = match num_samples {
            None => "its samples".into(),
            Some(1) => "its sample".into(),
            Some(count) => format!("its {count} samples"),
        };
        [samples, "loss".into(), "gradient".into(), "all-reduced".into(), "new weight".into()]
    }

    fn by_hand(&self) -> &'static str {
        "by hand: "
    }

    fn update(&self, run_info: &RunInfo, step: u64, lr: &str) -> Section {
        let RunInfo { optimizer, world_size, .. } = run_info;
        if *world_size == 1 {
            let text = format!("The optimizer is {optimizer}, with lr {lr}.");
            return Section::new(format!("Step {step}: the update"), text);
        }
        if run_info.shares_model {
            let text = format!(
                "A process has one copy of the model, so one update is enough. Each rank's optimizer ({optimizer}, lr \
                 {lr}) updates its part of the parameters for all ranks. It then waits until the other ranks have \
                 updated theirs."
            );
            return Section::new(format!("Step {step}: the same update for every rank"), text);
        }
        if run_info.partitions_optimizer {
            let text = format!(
                "The ranks partition the optimizer (--zero). Each rank's optimizer ({optimizer}, lr {lr}) keeps the \
                 state of its own partitions of the parameters, and updates only these. Every rank then copies the \
                 other partitions from the ranks that have updated them. After the steps shown here, a rank \
                 receives only its partitions of the averages, unless an option needs all of them."
            );
            return Section::new(format!("Step {step}: the same update, in parts"), text);
        }
        let text = format!(
            "Every rank's optimizer ({optimizer}, lr {lr}) does the same with the same numbers, so the models stay \
             the same and need not be sent again."
        );
        Section::new(format!("Step {step}: the same update on every rank"), text)
    }

    fn rule(&self, is_plain: bool) -> &'static str {
        if is_plain { "weight - lr * gradient = new weight" } else { "weight -> new weight" }
    }

    fn clipped(&self, max_norm: &str, from: &str, to: &str) -> String {
        format!(
            " First all gradients are shortened to a norm of {max_norm} (--max-grad-norm), this one from {from} to \
             {to}."
        )
    }

    fn next_step(&self, step: u64) -> Section {
        Section::new(
            format!("Step {step}: other samples, other gradients, one mean, one update"),
            "",
        )
    }

    fn remaining_steps(&self, steps_per_epoch: u64) -> String {
        match steps_per_epoch {
            1 => "Training continues like this, with one step an epoch.".into(),
            steps => format!("Training continues like this, with {steps} steps an epoch."),
        }
    }

    fn end(&self, run_info: &RunInfo, steps: u64) -> Section {
        let steps = if steps == 1 { "1 step" } else { &format!("{steps} steps") };
        let unsent = if run_info.partitions_optimizer {
            ""
        } else {
            ", which no rank has sent since the start"
        };
        let text = match run_info.world_size {
            1 => format!("After {steps} the rank ends. The hash of its parameters:"),
            _ => format!(
                "After {steps} the ranks wait at a barrier and end. Rank 0 alone prints the summary and writes files. \
                 The hash of the parameters{unsent}:"
            ),
        };
        Section::new("The end", text)
    }

    fn verdict(&self, run_info: &RunInfo, are_same: bool) -> String {
        match (run_info.world_size, are_same) {
            (1, _) => "The last line has it, too.".into(),
            (n, true) => format!("The same to the bit: {n} ranks have trained one model."),
            (_, false) => "Not the same! Either each rank has kept buffers of its own (--no-broadcast-buffers), or \
                           something went wrong (--check-replicas-every finds where)."
                .into(),
        }
    }
}
