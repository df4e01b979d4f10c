//! Opens the data of a command that trains.

use crate::config::{Config, Data};
use engine::error::{Error, Result};

/// Opens the data of `config`. Returns it, and the configuration with its sizes.
///
/// # Errors
/// [`Error::Input`] that names the option or the file.
pub(crate) fn open_data(config: Config) -> Result<(Config, Data)> {
    // Threads that libtorch starts here would be idle later: the ranks have their own.
    tch::set_num_threads(1);
    // Not the model's seed, so that both do not get the same numbers.
    let seed = config.training.seed.wrapping_add(1);
    let (config, mut data) = config.open_data(seed)?;
    if config.training.patience.is_some() && data.validation.is_none() {
        return Err(Error::usage(
            "--patience: there are no validation samples; hold some back with --val-fraction"
                .into(),
        ));
    }
    if data.validation.is_none() && config.criterion().has_metrics() {
        data.notes.push(
            "metrics are measured in validation, and there are no validation samples; hold some back with \
             --val-fraction"
                .into(),
        );
    }
    Ok((config, data))
}
