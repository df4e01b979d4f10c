//! Trains a GPT on your own text, with all flags, files and commands of ddp-mp, and writes text with it.

use std::process::ExitCode;

use ddp_mp::App;
use ddp_mp::prelude::*;

/// Other defaults of options. Flags, and a file of `--config`, win over them.
const DEFAULTS: &str = r#"
dataset = "text:text.txt"
model = "gpt"
loss = "cross-entropy"
n-layer = 2
n-head = 4
n-embd = 64
block-size = 32
batch-size = 16
max-epochs = 10
optimizer = "adamw"
lr = 0.003
max-grad-norm = 1.0
val-fraction = 0.1
"#;

fn app() -> App {
    App::new(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"))
        .metric("top5", next_is_among_five)
        .defaults(DEFAULTS)
}

/// Returns the share of the places whose next byte is one of the five likeliest.
fn next_is_among_five(output: &Tensor, targets: &Tensor) -> Tensor {
    let (_, likeliest) = output.topk(5, -1, true, false);
    let hits = likeliest.eq_tensor(&targets.unsqueeze(-1));
    hits.sum(Kind::Float) / targets.numel() as f64
}

fn main() -> ExitCode {
    app().run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_counts_the_five_likeliest() {
        let output = Tensor::arange(10, (Kind::Float, Device::Cpu)).repeat([4, 1]);
        let targets = Tensor::from_slice(&[9i64, 5, 4, 0]); // of which 5 to 9 are the likeliest
        let share = next_is_among_five(&output, &targets);
        assert_eq!(share.double_value(&[]), 0.5);
    }

    #[test]
    fn run_toml_has_options_of_this_program() -> anyhow::Result<()> {
        let args = ["program", "--config=run.toml"].map(Into::into);
        let config = app().config_of(args.into_iter())?;
        assert_eq!(config.expect("a run").training.max_epochs, 20);
        Ok(())
    }
}
