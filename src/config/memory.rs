//! Sizes that can never fit into this machine's memory. They are refused before anything is allocated.

use super::{Config, Invalid};
use engine::data::DatasetSpec;
use engine::error::{Error, Result};
use engine::os::{gigabytes, total_memory};
use engine::trainer::Loss;

/// The bytes of a float32.
const FLOAT: f64 = 4.0;

/// Refuses what takes more `bytes` than this machine has. `what` is the text from the option up to "takes", `remedy`
/// what the user can do. A machine that does not say how much it has, has all.
///
/// # Errors
/// [`Error::Input`] with both sizes.
pub(crate) fn check_fits(what: &str, bytes: f64, remedy: &str) -> Result<()> {
    let Some(total) = total_memory().map(|total| total as f64).filter(|total| bytes > *total)
    else {
        return Ok(());
    };
    let (needed, there) = (gigabytes(bytes), gigabytes(total));
    Err(Error::usage(format!("{what} {needed}, and this machine has {there}; {remedy}")))
}

impl Config {
    /// Refuses random data, or a model, that is larger than this machine's memory.
    pub(super) fn validate_memory(&self) -> Result<(), Invalid> {
        let check = |key: &str, what: String, bytes: f64| {
            let checked = check_fits(&what, bytes, "use a smaller number");
            checked.map_err(|error| Invalid { key: key.to_owned(), problem: error.to_string() })
        };
        if self.data.dataset == DatasetSpec::RANDOM
            && self.program.dataset.is_none()
            && let Some([samples, inputs, outputs]) = self.sizes()
        {
            let what = format!("{samples} random samples of {inputs} + {outputs} numbers take");
            let keys =
                [(samples, "num_samples"), (inputs, "in_features"), (outputs, "out_features")];
            let (_, largest) = keys.into_iter().max().expect("there are three");
            let target = match self.training.loss {
                Loss::Mse => outputs as f64 * FLOAT,
                Loss::CrossEntropy => 8.0, // the number of a class
            };
            check(largest, what, samples as f64 * (inputs as f64 * FLOAT + target))?;
        }
        // A program's own model is not known before it is built.
        if self.program.model.is_none() && self.data.in_features.is_some() {
            let parameters = self.model_config().num_parameters();
            let what = format!("a model of {parameters:.0} parameters takes, with its gradients,");
            check(self.largest_width(), what, parameters * 2.0 * FLOAT)?;
        }
        Ok(())
    }

    /// Returns the key of the model's largest size.
    fn largest_width(&self) -> &'static str {
        let Self { model, data, .. } = self;
        let most = |widths: &[i64]| widths.iter().max().copied().unwrap_or(0);
        let of_data = [("in_features", data.in_features), ("out_features", data.out_features)];
        let of_data = of_data.map(|(key, size)| (size.unwrap_or(0), key));
        let of_model = [
            (most(&model.hidden), "hidden"),
            (most(&model.channels), "channels"),
            (model.n_layer, "n_layer"),
            (model.n_embd, "n_embd"),
            (model.block_size, "block_size"),
        ];
        let of_model = of_model.into_iter().filter(|(_, key)| model.kind.uses(key));
        // The number of different tokens is always the same, and that of inputs is the block size.
        let of_data = of_data.into_iter().filter(|_| !model.kind.uses("block_size"));
        of_model.chain(of_data).max().map_or("model", |(_, key)| key)
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
            (&[("in-features", HUGE)], Some("in_features")),
            (&[("out-features", HUGE)], Some("out_features")),
            (&[("model", "mlp"), ("hidden", HUGE)], Some("hidden")),
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
