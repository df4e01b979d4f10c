//! A program that trains: its command line, its commands, and its exit code.

mod cli;
mod run;

use std::any::{Any, TypeId};
use std::ffi::OsString;
use std::marker::PhantomData;
use std::sync::Arc;

use clap::Args;
use tch::Tensor;
use tch::nn::Path;

use crate::config::{BuildContext, Config, OwnArgs, OwnOptionsType, Program};
use engine::data::{Batch, Dataset};
use engine::error::{Error, Result};
use engine::models::{Forward, Model};
use engine::trainer::{Callback, Criterion, LossParts, Trainer};

/// A program that trains with all flags, files and commands of `ddp-mp`. Options choose what the program does not bring:
/// without a model there is `--model`, without a data set `--dataset`, without a loss `--loss`.
///
/// ```no_run
/// use ddp_mp::prelude::*;
/// use tch::nn;
///
/// fn main() -> std::process::ExitCode {
///     ddp_mp::App::new("lines", env!("CARGO_PKG_VERSION"))
///         .model(|path, _| nn::linear(path, 20, 1, Default::default()))
///         .dataset(|_| Ok(TensorDataset::random(4096, 20, Targets::Values(1), 1)?))
///         .loss(|output, targets| output.mse_loss(targets, Reduction::Mean))
///         .run()
/// }
/// ```
///
/// `A` is the type of the program's options, which all closures get: see [`args`](Self::args).
#[derive(Debug)]
pub struct App<A = ()> {
    program: Program,
    args: PhantomData<fn() -> A>,
}

impl App {
    /// Creates a program of this name and version. Help and completions show the name.
    pub fn new(name: &'static str, version: &'static str) -> Self {
        Self { program: Program::new(name, version), args: PhantomData }
    }

    /// Adds the program's options. Each is a flag, a key of a file of `--config`, and a line of `env`. A run that resumes
    /// must have the same values. Each field needs `#[arg(long)]`. A list needs `value_delimiter` as well. Call this
    /// before the methods that take closures.
    ///
    /// ```no_run
    /// use ddp_mp::prelude::*;
    /// use tch::nn;
    ///
    /// #[derive(clap::Args)]
    /// struct Options {
    ///     /// Set the width of the hidden layer
    ///     #[arg(long, default_value_t = 64)]
    ///     width: i64,
    /// }
    ///
    /// ddp_mp::App::new("wide", "0.1.0")
    ///     .args::<Options>()
    ///     .model(|path, context| {
    ///         nn::seq()
    ///             .add(nn::linear(path / 0, 20, context.args.width, Default::default()))
    ///             .add_fn(|x| x.relu())
    ///             .add(nn::linear(path / 2, context.args.width, 1, Default::default()))
    ///     })
    ///     .run()
    /// ```
    pub fn args<A: Args + Send + Sync + 'static>(self) -> App<A> {
        let program = Program { options: Some(OwnOptionsType::of::<A>()), ..self.program };
        App { program, args: PhantomData }
    }
}

impl<A: Any + Send + Sync> App<A> {
    /// Trains the model that `build` makes on each rank, in place of the options of `--model`. `build` must create every
    /// parameter and buffer with the path, on the CPU. They are then moved to the rank's device. Meanwhile libtorch's
    /// generator has the run's seed. All ranks start with rank 0's parameters.
    ///
    /// A panic ends the run with an error that names the rank.
    #[must_use]
    pub fn model<M: Forward + 'static>(
        mut self,
        build: impl Fn(&Path, &BuildContext<'_, A>) -> M + Send + Sync + 'static,
    ) -> Self {
        self.program.model = Some(Arc::new(move |path, context| {
            let BuildContext { args, generator, group, in_features, out_features } = *context;
            let args = own(args);
            let context = BuildContext { args, generator, group, in_features, out_features };
            Model::of(build(path, &context))
        }));
        self
    }

    /// Trains on the samples that `open` opens once in each process, before the ranks start, in place of the options of
    /// `--dataset`.
    #[must_use]
    pub fn dataset<D: Dataset + 'static>(
        mut self,
        open: impl Fn(&A) -> anyhow::Result<D> + Send + Sync + 'static,
    ) -> Self {
        self.program.dataset = Some(Arc::new(move |args| Ok(Arc::new(open(own(args))?))));
        self
    }

    /// Validates on the samples that `open` opens. `--val-fraction` replaces them: it holds back some of the training
    /// samples, or none with 0.
    #[must_use]
    pub fn validation_dataset<D: Dataset + 'static>(
        mut self,
        open: impl Fn(&A) -> anyhow::Result<D> + Send + Sync + 'static,
    ) -> Self {
        self.program.validation = Some(Arc::new(move |args| Ok(Arc::new(open(own(args))?))));
        self
    }

    /// Minimizes the loss that `loss` returns for the model's output and the targets of a batch. The loss is a mean over
    /// the samples, as one number, or several numbers with names. The first is trained on. See [`Criterion::own`].
    #[must_use]
    pub fn loss<L: Into<LossParts>>(
        mut self,
        loss: impl Fn(&Tensor, &Tensor) -> L + Send + Sync + 'static,
    ) -> Self {
        self.program.criterion = self.program.criterion.with_loss_of(Criterion::own(loss));
        self
    }

    /// Adds a metric, which validation shows as `name`. See [`Criterion::metric`].
    #[must_use]
    pub fn metric(
        mut self,
        name: &'static str,
        metric: impl Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static,
    ) -> Self {
        self.program.criterion = self.program.criterion.metric(name, metric);
        self
    }

    /// Sets what a batch counts as in place of its number of samples. See [`Criterion::count`].
    #[must_use]
    pub fn count(mut self, count: impl Fn(&Batch) -> usize + Send + Sync + 'static) -> Self {
        self.program.criterion = self.program.criterion.count(count);
        self
    }

    /// Adds a clone of `callback` to each rank's trainer. Callbacks run in the order in which they are added.
    #[must_use]
    pub fn callback(self, callback: impl Callback<Model> + Clone + Send + Sync + 'static) -> Self {
        self.trainer(move |trainer, _| Ok(trainer.callback(callback.clone())))
    }

    /// Changes each rank's trainer before it trains. `change` adds callbacks that need the program's options, or its own
    /// [`step`](Trainer::step). It runs in `train`, `bench step`, `bench scaling` and `verify`, on all ranks alike.
    #[must_use]
    pub fn trainer(
        mut self,
        change: impl Fn(Trainer<Model>, &A) -> anyhow::Result<Trainer<Model>> + Send + Sync + 'static,
    ) -> Self {
        self.program.trainer.push(Arc::new(move |trainer, args| change(trainer, own(args))));
        self
    }

    /// Changes the defaults of options to the values in `toml`, the text of a file as for `--config`. `include_str!` reads
    /// such a file. The help shows these defaults.
    #[must_use]
    pub fn defaults(mut self, toml: &'static str) -> Self {
        self.program.defaults = Some(toml);
        self
    }

    /// Sets the commit that the program was built from, for `--version` and `env`.
    #[must_use]
    pub fn commit(mut self, commit: &'static str) -> Self {
        self.program.commit = commit;
        self
    }

    /// Adds the commands that teach: `comm`, `sampler`, `lesson` and `new`.
    #[must_use]
    pub fn course(mut self) -> Self {
        self.program.has_course = true;
        self
    }

    /// Runs what the process's arguments ask for, and ends the process. `main` must do nothing before: the program
    /// restarts itself, with a limit on the spinning of libtorch's threads. The exit code is 0, 2 for invalid input, 1 for
    /// another failure, or 128 and the number of the signal that stopped the program.
    pub fn run(self) -> ! {
        run::run(&Arc::new(self.program))
    }
}

impl<A> App<A> {
    /// Returns the declaration of the command line, with its help.
    pub fn command(&self) -> clap::Command {
        cli::command(&self.program)
    }

    /// Returns the configuration of the training run that the command line `args` asks for, and runs nothing. `args`
    /// begins with the program's name. `None` for another command than `train`.
    ///
    /// # Errors
    /// [`Error::Input`] with the message that the program would print.
    pub fn config_of(&self, args: impl Iterator<Item = OsString>) -> Result<Option<Config>> {
        cli::check(&self.program)?;
        let parsed = cli::parse(&self.command(), args);
        let cli = parsed.map_err(|error| Error::usage(error.to_string()))?;
        let program = Arc::new(self.program.clone());
        match cli.command {
            None => cli.train.resolve(&program).map(Some),
            Some(cli::Command::Train(flags)) => flags.resolve(&program).map(Some),
            Some(_) => Ok(None),
        }
    }
}

/// Returns the program's options as their type. A closure that was given before [`App::args`] gets `()`.
fn own<A: Any>(args: &OwnArgs) -> &A {
    let none: &dyn Any = &();
    let args: &dyn Any = if TypeId::of::<A>() == TypeId::of::<()>() { none } else { args };
    args.downcast_ref().expect("the program's options have the type that App::args was called with")
}
