//! Sizes that can never fit into this machine's memory. They are refused before anything is allocated.

use super::{Config, Invalid};
use crate::data::DatasetSpec;
use crate::error::{Error, Result};
use crate::telemetry::{gigabytes, total_memory};
use crate::trainer::Loss;

/// The bytes of a float32.
const FLOAT: f64 = 4.0;

/// Refuses what takes more `bytes` than this machine has. `what` is the text from the option up to "takes", `remedy`
/// what the user can do.
///
/// # Errors
/// [`Error::Input`] with both sizes.
pub(crate) fn check_fits(what: &str, bytes: f64, remedy: &str) -> Result<()> {
    fits(what, bytes, remedy).map_err(Error::usage)
}

/// Returns what to say of `bytes` that this machine does not have. A machine that does not say has all.
fn fits(what: &str, bytes: f64, remedy: &str) -> Result<(), String> {
    let Some(total) = total_memory().map(|total| total as f64).filter(|total| bytes > *total)
    else {
        return Ok(());
    };
    let (needed, there) = (gigabytes(bytes), gigabytes(total));
    Err(format!("{what} {needed}, and this machine has {there}; {remedy}"))
}

impl Config {
    /// Refuses random data, or a model, that is larger than this machine's memory.
    pub(super) fn validate_memory(&self) -> Result<(), Invalid> {
        let check = |key: &str, what: String, bytes: f64| {
            let checked = fits(&what, bytes, "use smaller numbers");
            checked.map_err(|problem| Invalid { key: key.to_owned(), problem })
        };
        if self.data.dataset == DatasetSpec::RANDOM
            && self.program.dataset.is_none()
            && let Some([samples, inputs, outputs]) = self.sizes()
        {
            let what = format!("{samples} random samples of {inputs} + {outputs} numbers take");
            let target = match self.training.loss {
                Loss::Mse => outputs as f64 * FLOAT,
                Loss::CrossEntropy => 8.0, // the number of a class
            };
            check("num_samples", what, samples as f64 * (inputs as f64 * FLOAT + target))?;
        }
        // A program's own model is not known before it is built.
        if self.program.model.is_none() && self.data.in_features.is_some() {
            let parameters = self.model_config().num_parameters();
            let what = format!("a model of {parameters:.0} parameters takes, with its gradients,");
            check("model", what, parameters * 2.0 * FLOAT)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn hopeless_sizes_are_refused_with_their_key() {
        const HUGE: &str = "9223372036854775807";
        for (flags, key) in [
            (&[("num-samples", HUGE)][..], Some("num_samples")),
            (&[("in-features", HUGE)], Some("num_samples")),
            (&[("out-features", HUGE)], Some("num_samples")),
            (&[("model", "mlp"), ("hidden", HUGE)], Some("model")),
            (&[("model", "mlp"), ("hidden", "1000,1000")], None),
            // A target is one number, however many classes there are.
            (
                &[
                    ("loss", "cross-entropy"),
                    ("num-samples", "1000000"),
                    ("out-features", "10000000"),
                ],
                None,
            ),
        ] {
            let args = flags.iter().map(|(name, value)| format!("--{name}={value}")).collect();
            let refused = Config::parse(args).unwrap().validate_memory().err();
            assert_eq!(refused.as_ref().map(|invalid| &invalid.key[..]), key);
        }
    }
}
