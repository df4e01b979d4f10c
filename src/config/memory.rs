//! The memory that a configuration needs at least: what cannot fit is refused before anything is allocated.

use super::{Config, Invalid, OptimizerKind};
use crate::data::DatasetSpec;
use crate::error::{Error, Result};
use crate::models::ModelKind;
use crate::observe::total_memory;
use crate::trainer::Loss;

/// The bytes of a float32.
const FLOAT: f64 = 4.0;

impl Config {
    /// Refuses random data, or one replica of the model, for which `total` bytes are not enough.
    pub(super) fn validate_memory(&self, total: Option<u64>) -> Result<(), Invalid> {
        let Some(total) = total.map(|total| total as f64) else { return Ok(()) };
        let too_large = |key, what: String, bytes: f64| {
            let (needs, there) = (gigabytes(bytes), gigabytes(total));
            let problem =
                format!("{what} {needs}, and this machine has {there}; use a smaller number");
            Err(Invalid { key, problem })
        };
        if self.dataset == DatasetSpec::Random
            && let [Some(samples), Some(inputs), Some(outputs)] =
                [self.num_samples, self.in_features, self.out_features]
        {
            let target = match self.loss {
                Loss::Mse => outputs as f64 * FLOAT,
                Loss::CrossEntropy => 8.0, // the number of a class
            };
            let bytes = samples as f64 * (inputs as f64 * FLOAT + target);
            if bytes > total {
                let what = format!("{samples} random samples of {inputs} + {outputs} numbers take");
                return too_large(
                    self.largest(&["num_samples", "in_features", "out_features"]),
                    what,
                    bytes,
                );
            }
        }
        let parameters = self.parameters();
        let bytes = parameters * 2.0 * FLOAT;
        if self.in_features.is_some() && bytes > total {
            let what = format!("a model of {parameters:.0} parameters takes, with its gradients,");
            return too_large(self.largest(self.widths()), what, bytes);
        }
        Ok(())
    }

    /// Refuses a model for whose replicas on `ranks` ranks the memory of this machine is not enough.
    ///
    /// # Errors
    /// [`Error::Input`].
    pub(crate) fn check_memory_for(&self, ranks: usize) -> Result<()> {
        let Some(total) = total_memory() else { return Ok(()) };
        let states = match self.optimizer {
            OptimizerKind::Sgd if self.momentum == 0.0 => 0.0,
            OptimizerKind::Sgd => 1.0,
            OptimizerKind::AdamW => 2.0,
        };
        let parameters = self.parameters();
        let bytes = ranks as f64 * parameters * (2.0 + states) * FLOAT;
        if bytes <= total as f64 {
            return Ok(());
        }
        let flag = super::flag_name(self.largest(self.widths()));
        Err(Error::Input(format!(
            "{flag}: {ranks} replicas of a model of {parameters:.0} parameters take, with gradients and the \
             optimizer's state, {}, and this machine has {}; use a smaller model, or fewer ranks with \
             --nproc-per-node",
            gigabytes(bytes),
            gigabytes(total as f64)
        )))
    }

    fn parameters(&self) -> f64 {
        self.model_config().num_parameters()
    }

    /// Returns the keys that say how large the model is.
    fn widths(&self) -> &'static [&'static str] {
        match self.model {
            ModelKind::Linear => &["in_features", "out_features"],
            ModelKind::Mlp => &["in_features", "out_features", "hidden"],
            ModelKind::Cnn => &["in_features", "out_features", "channels"],
        }
    }

    /// Returns the one of `keys` whose value is the largest beside its default.
    fn largest(&self, keys: &[&'static str]) -> &'static str {
        let default = Self::default();
        let value = |config: &Self, key: &str| {
            let most = |widths: &[i64]| widths.iter().max().copied();
            match key {
                "num_samples" => config.num_samples,
                "in_features" => config.in_features,
                "out_features" => config.out_features,
                "hidden" => most(&config.hidden),
                _ => most(&config.channels),
            }
            .unwrap_or(1) as f64
        };
        let ratio = |key: &&str| value(self, key) / value(&default, key);
        keys.iter().copied().max_by(|a, b| ratio(a).total_cmp(&ratio(b))).unwrap_or("num_samples")
    }
}

fn gigabytes(bytes: f64) -> String {
    format!("{:.1} GB", bytes / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(flags: &str) -> Option<&'static str> {
        let config = |toml: &str| toml::from_str::<Config>(toml).unwrap();
        config(flags).validate_memory(Some(10_000_000_000)).err().map(|invalid| invalid.key)
    }

    #[test]
    fn what_does_not_fit_is_refused_by_the_key_that_is_too_large() {
        const HUGE: &str = "9223372036854775807";
        let mlp = "model = \"mlp\"\nin_features = 20\nhidden =";
        for (flags, key) in [
            (format!("num_samples = {HUGE}"), Some("num_samples")),
            (format!("in_features = {HUGE}"), Some("in_features")),
            (format!("out_features = {HUGE}"), Some("out_features")),
            (format!("out_features = {HUGE}\nloss = \"cross-entropy\""), Some("out_features")),
            (format!("{mlp} [{HUGE}, {HUGE}, {HUGE}]"), Some("hidden")),
            (format!("{mlp} [30000, 30000]"), None),
            (format!("{mlp} [40000, 40000]"), Some("hidden")),
            (format!("model = \"cnn\"\nin_features = 64\nchannels = [{HUGE}]"), Some("channels")),
            ("num_samples = 100000000".into(), None),
            ("num_samples = 200000000".into(), Some("num_samples")),
            (String::new(), None),
        ] {
            assert_eq!(refused(&flags), key, "{flags}");
        }
    }

    #[test]
    fn replicas_are_counted() {
        let fits = Config { hidden: vec![1000], model: ModelKind::Mlp, ..Config::default() };
        assert!(fits.check_memory_for(2).is_ok());
        let error = fits.check_memory_for(1 << 40).unwrap_err().to_string();
        assert!(
            error.starts_with("--hidden: 1099511627776 replicas of a model of 22001 parameters"),
            "{error}"
        );
    }
}
