//! A program with `App` for the tests: the layers and the data of `ddp-mp --model=mlp`, with options of its own. `--wrong`
//! makes one of its parts wrong.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::ensure;
use ddp_mp::App;
use ddp_mp::config::BuildContext;
use ddp_mp::prelude::*;
use tch::nn::{self, Init, Linear, Path};

#[derive(clap::Args)]
struct Options {
    /// Width of each hidden layer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(i64).range(1..))]
    width: i64,
    /// Factors, with commas
    #[arg(long, value_name = "X,...", value_delimiter = ',')]
    factors: Vec<f64>,
    /// File that is not used
    #[arg(long, value_name = "FILE")]
    notes: Option<PathBuf>,
    /// Step of this program's own
    #[arg(long)]
    own_step: bool,
    /// Part to make wrong
    #[arg(long, value_name = "PART")]
    wrong: Option<String>,
}

impl Options {
    fn makes_wrong(&self, part: &str) -> bool {
        self.wrong.as_deref() == Some(part)
    }
}

/// Returns a dense layer that is initialized as PyTorch's `nn.Linear`.
fn linear(path: Path, inputs: i64, outputs: i64) -> Linear {
    let gain = (2.0 / (1.0 + 5f64.sqrt().powi(2))).sqrt();
    let weight = 3f64.sqrt() * (gain / (inputs as f64).sqrt());
    let bias = 1.0 / (inputs as f64).sqrt();
    let uniform = |bound: f64| Init::Uniform { lo: -bound, up: bound };
    let ws = path.var("weight", &[outputs, inputs], uniform(weight));
    Linear { ws, bs: Some(path.var("bias", &[outputs], uniform(bias))) }
}

fn net(path: &Path, context: &BuildContext<'_, Options>) -> nn::SequentialT {
    let options = context.args;
    assert!(!options.makes_wrong("model-panic"), "no model today");
    if options.makes_wrong("model-dropout") {
        return nn::seq_t().add(Dropout::new(1.5, context.generator));
    }
    let net = nn::seq_t()
        .add(linear(path / "0", 20, options.width))
        .add_fn(|x| x.relu())
        .add(linear(path / "2", options.width, options.width))
        .add_fn(|x| x.relu())
        .add(linear(path / "4", options.width, 1));
    if options.makes_wrong("model-shape") {
        return net.add_fn(|x| x.narrow(0, 0, 1).repeat([31, 1]));
    }
    net
}

/// The random data of `ddp-mp`, or data with something wrong.
#[derive(Debug)]
struct Samples {
    random: TensorDataset,
    wrong: Option<String>,
}

impl Samples {
    fn open(options: &Options) -> anyhow::Result<Self> {
        ensure!(!options.makes_wrong("dataset-error"), "no data today");
        assert!(!options.makes_wrong("dataset-panic"), "no data today");
        if options.makes_wrong("dataset-torch") {
            let two = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
            let _ = two.f_matmul(&two)?;
        }
        let random = TensorDataset::random(4096, 20, Targets::Values(1), 1)?;
        Ok(Self { random, wrong: options.wrong.clone() })
    }

    fn is_wrong(&self, part: &str) -> bool {
        self.wrong.as_deref() == Some(part)
    }
}

impl Dataset for Samples {
    fn len(&self) -> usize {
        if self.is_wrong("dataset-empty") { 0 } else { self.random.len() }
    }

    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let (inputs, targets) = self.random.get(index)?;
        match index {
            77 if self.is_wrong("sample-panic") => panic!("no such sample"),
            77 if self.is_wrong("sample-shape") => Ok((inputs.narrow(0, 0, 19), targets)),
            _ => Ok((inputs, targets)),
        }
    }

    fn resident(&self, device: Device) -> ddp_mp::Result<Option<(Tensor, Tensor)>> {
        if self.wrong.is_some() { Ok(None) } else { self.random.resident(device) }
    }
}

fn main() -> ExitCode {
    App::new("spirals", "1.2.3")
        .args::<Options>()
        .model(net)
        .dataset(Samples::open)
        .loss(|output: &Tensor, targets: &Tensor| output.mse_loss(targets, Reduction::Mean))
        .metric("distance", |output, targets| (output - targets).abs().mean(Kind::Float))
        .metric("bias", |output, targets| output.mean(Kind::Float) - targets.mean(Kind::Float))
        .trainer(|trainer, options| {
            ensure!(!options.makes_wrong("trainer-error"), "no trainer today");
            if !options.own_step {
                return Ok(trainer);
            }
            Ok(trainer.step(|context, batch| {
                let net = context.ddp().module().downcast_ref::<nn::SequentialT>();
                ensure!(net.is_some_and(|net| net.len() == 5), "this is not the program's model");
                let autocast = context.autocast()?;
                let loss = context.forward(batch, true).mse_loss(&batch.targets, Reduction::Mean);
                drop(autocast);
                context.backward(&loss)?;
                Ok(loss)
            }))
        })
        .defaults("log-every = 7\nlr = 0.002\n")
        .run()
}
