//! Trains your own convolutional network on images, with all flags, files and commands of ddp-mp.

mod model;

use std::process::ExitCode;

use ddp_mp::App;
use ddp_mp::prelude::*;

/// The options of this program alone.
#[derive(clap::Args)]
struct Options {
    /// Set the channels of the first layer
    ///
    /// The second layer has twice as many
    #[arg(long, default_value_t = 16)]
    channels: i64,
    /// Drop this share of the features in training
    #[arg(long, default_value_t = 0.1)]
    dropout: f64,
}

/// Other defaults of options. Flags, and a file of `--config`, win over them.
const DEFAULTS: &str = r#"
dataset = "digits" # or idx:FOLDER, csv:FILE and others: see --help
loss = "cross-entropy"
val-fraction = 0.2
max-epochs = 15
optimizer = "adamw"
lr = 0.005
schedule = "cosine"
schedule-by = "step"
"#;

fn app() -> App<Options> {
    App::new(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"))
        .args::<Options>()
        .model(|path, context| {
            let dropout = Dropout::new(context.args.dropout, context.generator);
            model::net(path, context.args.channels, dropout)
        })
        .metric("top3", is_among_three)
        .defaults(DEFAULTS)
}

/// Returns the share of the images whose digit is one of the three likeliest.
fn is_among_three(output: &Tensor, targets: &Tensor) -> Tensor {
    let (_, likeliest) = output.topk(3, 1, true, false);
    let hits = likeliest.eq_tensor(&targets.unsqueeze(1)).sum(Kind::Float);
    hits / targets.size()[0] as f64
}

fn main() -> ExitCode {
    app().run()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::nn::{ModuleT, VarStore};

    use super::*;

    #[test]
    fn model_scores_each_digit_of_each_image() -> anyhow::Result<()> {
        let digits = FileDataset::open(&DatasetSpec::DIGITS, TargetKind::Classes)?;
        assert_eq!(digits.in_features(), model::SIDE * model::SIDE);
        assert_eq!(digits.targets(), Targets::Classes(model::DIGITS));
        let (inputs, _) = digits.batch(&[0, 1, 2])?;
        let vs = VarStore::new(Device::Cpu);
        let generator = Arc::new(Generator::new(Device::Cpu, 0, 0)?);
        let net = model::net(&vs.root(), 4, Dropout::new(0.5, &generator));
        assert_eq!(net.forward_t(&inputs, true).size(), [3, model::DIGITS]);
        Ok(())
    }

    #[test]
    fn run_toml_has_options_of_this_program() -> anyhow::Result<()> {
        let args = ["program", "--config=run.toml", "--channels=8"];
        let config = app().config_of(args.into_iter().map(Into::into))?;
        assert_eq!(config.expect("a run").training.max_epochs, 30);
        Ok(())
    }
}
