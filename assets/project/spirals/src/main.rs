//! Trains your own model with all flags, files and commands of ddp-mp.

mod data;
mod model;

use std::process::ExitCode;

use ddp_mp::App;
use tch::Tensor;

/// The options of this program alone.
#[derive(clap::Args)]
struct Options {
    /// Set the width of the hidden layer
    #[arg(long, default_value_t = 64)]
    width: i64,
}

/// Other defaults of options. Flags, and a file of `--config`, win over them.
const DEFAULTS: &str = r#"
max-epochs = 20
batch-size = 50
lr = 0.3
val-fraction = 0.1
"#;

fn app() -> App<Options> {
    App::new(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"))
        .args::<Options>()
        .model(|path, context| model::net(path, context.args.width))
        .dataset(|_| data::spirals(1000))
        .loss(|output, targets| output.cross_entropy_for_logits(targets))
        .metric("accuracy", Tensor::accuracy_for_logits)
        .defaults(DEFAULTS)
}

fn main() -> ExitCode {
    app().run()
}

#[cfg(test)]
mod tests {
    use ddp_mp::prelude::*;
    use tch::nn::{Module, VarStore};

    use super::*;

    #[test]
    fn model_scores_each_class_of_each_point() -> anyhow::Result<()> {
        let (inputs, targets) = data::spirals(100)?.batch(&[0, 99, 100, 199])?;
        let vs = VarStore::new(Device::Cpu);
        let output = model::net(&vs.root(), 8).forward(&inputs);
        assert_eq!(output.size(), [4, data::CLASSES]);
        assert_eq!(Vec::<i64>::try_from(targets)?, [0, 0, 1, 1]);
        Ok(())
    }

    #[test]
    fn run_toml_has_options_of_this_program() -> anyhow::Result<()> {
        let args = ["program", "--config=run.toml", "--width=8"];
        let config = app().config_of(args.into_iter().map(Into::into))?;
        assert_eq!(config.expect("a run").training.max_epochs, 40);
        Ok(())
    }
}
