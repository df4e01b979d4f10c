//! The least memory that a command needs, and that of a configuration. If it cannot fit, it is refused before anything
//! is allocated.

use super::open_data::SIZES;
use super::{Config, Invalid};
use crate::data::DatasetSpec;
use crate::error::{Error, Result, counted};
use crate::models::ModelConfig;
use crate::optim::OptimizerLayout;
use crate::telemetry::{gigabytes, total_memory};
use crate::trainer::Loss;

/// The bytes of a float32.
const FLOAT: f64 = 4.0;

/// The bytes of a sample's index in a shuffled order.
const ORDER: f64 = 8.0;

/// A part of the memory that a command will need.
pub(crate) struct MemoryPart {
    pub bytes: f64,
    /// What takes it, for an error: from the option up to "takes".
    pub what: String,
    /// What the user can do if it is too large.
    pub remedy: String,
}

/// Refuses `parts` that together do not fit into `total` bytes. Without a `total` they fit.
///
/// # Errors
/// [`Error::InvalidInput`] that names the largest of these parts.
pub(crate) fn check_memory(
    parts: impl IntoIterator<Item = MemoryPart>,
    total: Option<u64>,
) -> Result<()> {
    match too_large(parts, total) {
        Some(problem) => Err(Error::InvalidInput(problem)),
        None => Ok(()),
    }
}

/// Returns what to say about `parts` that do not fit into `total` bytes; `None` if they fit.
fn too_large(parts: impl IntoIterator<Item = MemoryPart>, total: Option<u64>) -> Option<String> {
    let total = total? as f64;
    let parts: Vec<MemoryPart> = parts.into_iter().collect();
    let sum: f64 = parts.iter().map(|part| part.bytes).sum();
    let largest = parts.into_iter().max_by(|a, b| a.bytes.total_cmp(&b.bytes));
    let MemoryPart { bytes, what, remedy } = largest.filter(|_| sum > total)?;
    let more = match sum - bytes {
        _ if bytes > total => String::new(),
        rest => format!(" and the ranks' other memory {}", gigabytes(rest)),
    };
    let (needs, there) = (gigabytes(bytes), gigabytes(total));
    Some(format!("{what} {needs}{more}, and this machine has {there}; {remedy}"))
}

impl Config {
    /// Refuses random data, or one replica of the model, that does not fit into `total` bytes.
    pub(super) fn validate_memory(&self, total: Option<u64>) -> Result<(), Invalid> {
        let check = |key: &str, what: String, bytes: f64| {
            let part = MemoryPart { bytes, what, remedy: "use a smaller number".into() };
            match too_large([part], total) {
                Some(problem) => Err(Invalid { key: key.to_owned(), problem }),
                None => Ok(()),
            }
        };
        if let Some(bytes) = self.random_bytes()
            && let [Some(samples), Some(inputs), Some(outputs)] =
                [self.data.num_samples, self.data.in_features, self.data.out_features]
        {
            let what = format!("{samples} random samples of {inputs} + {outputs} numbers take");
            check(self.largest(&SIZES), what, bytes)?;
        }
        if self.data.in_features.is_some() {
            let parameters = self.parameters();
            let what = format!("a model of {parameters:.0} parameters takes, with its gradients,");
            check(self.largest(&self.widths()), what, parameters * 2.0 * FLOAT)?;
        }
        Ok(())
    }

    /// Refuses a run of `ranks` ranks in `processes` processes that does not fit into this machine's memory. Counts
    /// random data, orders of samples and replicas.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] that names the largest of these parts.
    pub(crate) fn check_memory_for(&self, ranks: usize, processes: usize) -> Result<()> {
        self.check_memory_of(total_memory(), ranks, processes)
    }

    fn check_memory_of(&self, total: Option<u64>, ranks: usize, processes: usize) -> Result<()> {
        let states = self.optimizer_options().states().len() as f64;
        let parameters = self.parameters();
        let samples = self.data.num_samples.unwrap_or_default();
        // With `dp`, rank 0 deals the samples of all ranks, too.
        let orders = if self.is_data_parallel() { 2 * ranks } else { ranks };
        let shuffled = if self.data.no_shuffle { 0.0 } else { samples as f64 };
        let in_each =
            if processes > 1 { format!(" in {processes} processes") } else { String::new() };
        let (all_ranks, replicas) = (counted(ranks, "rank"), counted(ranks, "replica"));
        let take = if ranks == 1 { "takes" } else { "take" };
        let (copies, state_copies, model) = match self.optimizer_layout() {
            OptimizerLayout::SharedModel => {
                let model = format!(
                    "a model of {parameters:.0} parameters, with the optimizer's state and the gradients of {all_ranks}, \
                     takes"
                );
                (processes, processes, model)
            }
            OptimizerLayout::Partitioned => {
                let model = format!(
                    "{replicas} ({parameters:.0} parameters each, with gradients) and one optimizer's state take"
                );
                (ranks, 1, model)
            }
            OptimizerLayout::Replicated => {
                let model = format!(
                    "{replicas} ({parameters:.0} parameters each, with gradients and the optimizer's state) {take}"
                );
                (ranks, ranks, model)
            }
        };
        let numbers = (ranks + copies) as f64 + state_copies as f64 * states;
        let part = |bytes: f64, key: &str, what: String, remedy: &str| MemoryPart {
            bytes,
            what: format!("{}: {what}", self.name_of(key)),
            remedy: remedy.into(),
        };
        let parts = [
            part(
                numbers * parameters * FLOAT,
                self.largest(&self.widths()),
                model,
                "use a smaller model, or fewer ranks with --nproc-per-node",
            ),
            part(
                processes as f64 * self.random_bytes().unwrap_or_default(),
                self.largest(&SIZES),
                format!("{samples} random samples{in_each} take"),
                "use fewer samples, or fewer ranks with --nproc-per-node",
            ),
            part(
                ranks as f64 * self.activation_bytes(ranks),
                "block_size",
                format!(
                    "contexts of {} tokens take, in a step of {all_ranks},",
                    self.model.block_size
                ),
                "use a smaller one, or a smaller --batch-size",
            ),
            part(
                orders as f64 * shuffled * ORDER,
                "num_samples",
                format!("the shuffled order of {samples} samples on {} takes", all_ranks),
                "use fewer samples, fewer ranks with --nproc-per-node, or --no-shuffle",
            ),
        ];
        check_memory(parts, total)
    }

    /// Returns the bytes of the random data; `None` if the data is not random.
    fn random_bytes(&self) -> Option<f64> {
        let [samples, inputs, outputs] =
            [self.data.num_samples, self.data.in_features, self.data.out_features];
        let is_random = self.data.dataset == DatasetSpec::RANDOM && self.program.dataset.is_none();
        let (samples, inputs, outputs) = (samples.filter(|_| is_random)?, inputs?, outputs?);
        let target = match self.training.loss {
            Loss::Mse => outputs as f64 * FLOAT,
            Loss::CrossEntropy => 8.0, // the number of a class
        };
        Some(samples as f64 * (inputs as f64 * FLOAT + target))
    }

    /// Returns the least bytes that forward keeps for backward on a rank. 0 but for a gpt, where they may be much more
    /// than its parameters.
    fn activation_bytes(&self, ranks: usize) -> f64 {
        let ModelConfig {
            kind, in_features, out_features, n_layer, n_head, n_embd, dropout, ..
        } = self.model_config();
        if !kind.uses("block_size") {
            return 0.0;
        }
        let [tokens, vocabulary, layers, heads, width] =
            [in_features, out_features, n_layer, n_head, n_embd].map(|size| size as f64);
        let share = self.data.num_samples.unwrap_or_default() as f64 / ranks as f64;
        let contexts = (self.training.batch_size as f64).min(share.ceil());
        // Each token has its logits, and in each layer the inputs of two norms and four dense layers. With dropout
        // attention is computed step by step, and each pair of tokens has a weight.
        let pairs = if dropout > 0.0 { heads * tokens } else { 0.0 };
        contexts * tokens * (vocabulary + layers * (9.0 * width + pairs)) * FLOAT
    }

    /// Returns the number of parameters. 0 for a program's own model, which is not known before it is built.
    fn parameters(&self) -> f64 {
        if self.program.model.is_some() {
            return 0.0;
        }
        self.model_config().num_parameters()
    }

    /// Returns the keys that determine the size of the model.
    fn widths(&self) -> Vec<&'static str> {
        let kind = self.model.kind;
        let of_data = ["in_features", "out_features"].into_iter();
        let layers = ["hidden", "channels", "n_layer", "n_embd", "block_size"].into_iter();
        // The number of different tokens is always the same, and that of inputs is the block size.
        of_data
            .filter(|_| !kind.uses("block_size"))
            .chain(layers.filter(|key| kind.uses(key)))
            .collect()
    }

    /// Returns the one of `keys` whose value is the largest relative to its default.
    fn largest(&self, keys: &[&'static str]) -> &'static str {
        let default = Self::default();
        let value = |config: &Self, key: &str| {
            let most = |widths: &[i64]| widths.iter().max().copied();
            match key {
                "num_samples" => config.data.num_samples,
                "in_features" => config.data.in_features,
                "out_features" => config.data.out_features,
                "hidden" => most(&config.model.hidden),
                "n_layer" => Some(config.model.n_layer),
                "n_embd" => Some(config.model.n_embd),
                "block_size" => Some(config.model.block_size),
                _ => most(&config.model.channels),
            }
            .unwrap_or(1) as f64
        };
        let ratio = |key: &&str| value(self, key) / value(&default, key);
        keys.iter().copied().max_by(|a, b| ratio(a).total_cmp(&ratio(b))).unwrap_or("num_samples")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OptimizerKind;
    use crate::models::ModelKind;

    fn refused(flags: &str) -> Option<String> {
        let args = flags.lines().map(|line| {
            let (key, value) = line.split_once(" = ").unwrap();
            format!("--{}={}", key.replace('_', "-"), value.trim_matches(['[', ']', '"']))
        });
        let config = Config::parse(args.map(|arg| arg.replace(", ", ",")).collect()).unwrap();
        config.validate_memory(Some(10_000_000_000)).err().map(|invalid| invalid.key)
    }

    #[test]
    fn oversized_values_are_refused_with_their_key() {
        const HUGE: &str = "9223372036854775807";
        let gpt =
            "model = \"gpt\"\ndataset = \"text:book.txt\"\nin_features = 64\nout_features = 256";
        let mlp = "model = \"mlp\"\nin_features = 20\nhidden =";
        for (flags, key) in [
            (format!("num_samples = {HUGE}"), Some("num_samples")),
            (format!("in_features = {HUGE}"), Some("in_features")),
            (format!("out_features = {HUGE}"), Some("out_features")),
            (format!("out_features = {HUGE}\nloss = \"cross-entropy\""), Some("out_features")),
            (format!("{mlp} [{HUGE}, {HUGE}, {HUGE}]"), Some("hidden")),
            (format!("{mlp} [30000, 30000]"), None),
            (format!("{mlp} [40000, 40000]"), Some("hidden")),
            (format!("{gpt}\nn_layer = {HUGE}"), Some("n_layer")),
            (format!("{gpt}\nn_embd = {HUGE}"), Some("n_embd")),
            (format!("{gpt}\nblock_size = {HUGE}"), Some("block_size")),
            (format!("{gpt}\nn_embd = 16384\nn_layer = 24"), Some("n_embd")),
            (format!("{gpt}\nn_embd = 1024\nn_layer = 1000"), Some("n_layer")),
            (gpt.into(), None),
            (format!("model = \"cnn\"\nin_features = 64\nchannels = [{HUGE}]"), Some("channels")),
            ("num_samples = 100000000".into(), None),
            ("num_samples = 200000000".into(), Some("num_samples")),
            (String::new(), None),
        ] {
            assert_eq!(refused(&flags).as_deref(), key, "{flags}");
        }
    }

    #[test]
    fn model_memory_counts_every_replica() {
        let mut fits = Config::default();
        (fits.model.kind, fits.model.hidden) = (ModelKind::Mlp, vec![1000]);
        assert!(fits.check_memory_for(2, 1).is_ok());
        let error = fits.check_memory_for(1 << 40, 1).unwrap_err().to_string();
        assert!(
            error.starts_with("--hidden: 1099511627776 replicas (22001 parameters each, with "),
            "{error}"
        );
        // 3 GB of parameters and the optimizer's state in each copy, and 1 GB of gradients for each rank.
        fits.optimization.optimizer = OptimizerKind::AdamW;
        fits.model.hidden = vec![15_800, 15_800];
        assert!(fits.check_memory_of(Some(15_000_000_000), 4, 1).is_err());
        fits.ddp.share_model = true;
        assert!(fits.check_memory_of(Some(8_000_000_000), 4, 1).is_ok());
        let error = fits.check_memory_of(Some(6_000_000_000), 4, 1).unwrap_err().to_string();
        assert!(error.contains("and the gradients of 4 ranks, takes 7.0 GB"), "{error}");
        (fits.ddp.share_model, fits.ddp.zero) = (false, true);
        assert!(fits.check_memory_of(Some(11_000_000_000), 4, 1).is_ok());
        let error = fits.check_memory_of(Some(9_000_000_000), 4, 1).unwrap_err().to_string();
        assert!(
            error.contains("with gradients) and one optimizer's state take 10.0 GB"),
            "{error}"
        );
    }

    #[test]
    fn memory_of_a_gpt_counts_what_backward_needs() {
        let mut config = Config::default();
        (config.model.kind, config.model.block_size) = (ModelKind::Gpt, 20_000);
        let data = &mut config.data;
        (data.num_samples, data.in_features, data.out_features) =
            (Some(50), Some(20_000), Some(256));
        // 25 contexts of each rank: 20,000 x (256 + 4 x 9 x 128) x 4 bytes.
        assert!(config.check_memory_of(Some(20_000_000_000), 2, 1).is_ok());
        let error = config.check_memory_of(Some(15_000_000_000), 2, 1).unwrap_err().to_string();
        let expected = "--block-size: contexts of 20000 tokens take, in a step of 2 ranks, 19.5 GB";
        assert!(error.starts_with(expected), "{error}");
        // With dropout 16 weights for each pair of tokens.
        config.model.dropout = 0.1;
        assert!(config.check_memory_of(Some(500_000_000_000), 2, 1).is_err());
        config.training.batch_size = 1;
        assert!(config.check_memory_of(Some(60_000_000_000), 2, 1).is_ok());
    }

    #[test]
    fn data_memory_counts_all_ranks_and_processes() {
        let gb = |gb: u64| Some(gb * 1_000_000_000);
        // 0.8 GB of data, and 0.08 GB for each order.
        let mut config = Config::default();
        (config.data.num_samples, config.data.in_features) = (Some(10_000_000), Some(19));
        let error = |total, ranks, processes| {
            config.check_memory_of(total, ranks, processes).unwrap_err().to_string()
        };
        assert!(config.check_memory_of(gb(1), 2, 1).is_ok());
        assert_eq!(
            error(gb(1), 4, 1),
            "--num-samples: 10000000 random samples take 0.8 GB and the ranks' other memory 0.3 GB, and this machine \
             has 1.0 GB; use fewer samples, or fewer ranks with --nproc-per-node"
        );
        assert!(
            error(gb(1), 2, 2).starts_with(
                "--num-samples: 10000000 random samples in 2 processes take 1.6 GB, and"
            ),
        );
        assert!(error(gb(1), 20, 1).starts_with(
            "--num-samples: the shuffled order of 10000000 samples on 20 ranks takes 1.6 GB, and"
        ));
        let mut in_order = config.clone();
        in_order.data.no_shuffle = true;
        assert!(in_order.check_memory_of(gb(1), 20, 1).is_ok());
        // Only random data is counted.
        config.data.dataset = DatasetSpec::DIGITS;
        assert!(config.check_memory_of(gb(1), 4, 4).is_ok());
    }
}
