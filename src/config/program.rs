//! The program that a configuration is for: its name, its own options, and what it brings itself in place of options.

use std::any::{Any, TypeId};
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use clap::builder::{CommandExt, Resettable, StyledStr, ValueHint};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error as ClapError};
use serde_json::{Map, Value};
use tch::nn::Path;
use toml::Value as TomlValue;

use super::data::DataSection;
use super::file::{read_defaults, to_arg};
use super::model::ModelSection;
use super::option_rules::{DefaultInWords, InShortHelp, MayDiffer};
use super::{Config, flag_name};
use engine::data::Dataset;
use engine::error::{Error, Result};
use engine::ffi::Generator;
use engine::models::Model;
use engine::process_group::ProcessGroup;
use engine::trainer::{Criterion, Loss, Trainer};

/// The values of a program's options.
pub(crate) type OwnArgs = dyn Any + Send + Sync;
type BuildModel = dyn Fn(&Path, &BuildContext<'_, OwnArgs>) -> Model + Send + Sync;
pub(super) type OpenDataset = dyn Fn(&OwnArgs) -> anyhow::Result<Arc<dyn Dataset>> + Send + Sync;
type ChangeTrainer =
    dyn Fn(Trainer<Model>, &OwnArgs) -> anyhow::Result<Trainer<Model>> + Send + Sync;

/// The options of the data that a program's data set replaces, and the options that its model must replace as well.
const OF_DATASET: [&str; 2] = ["dataset", "num_samples"];
const OF_DATA_AND_MODEL: [&str; 2] = ["in_features", "out_features"];

/// What a model is built with, on one rank.
#[derive(Debug)]
pub struct BuildContext<'a, A: ?Sized> {
    /// The program's options.
    pub args: &'a A,
    /// The rank's random generator, for [`Dropout`](crate::Dropout).
    pub generator: &'a Arc<Generator>,
    /// The rank's group, for [`SyncBatchNorm`](crate::SyncBatchNorm). `None` where a model is built to check a
    /// checkpoint, before any rank starts: put a [`BatchNorm`](engine::models::BatchNorm) in its place there, which has
    /// the same parameters.
    pub group: Option<&'a Rc<ProcessGroup>>,
    /// The number of inputs of a sample, if a data set of `--dataset` says so.
    pub in_features: Option<i64>,
    /// The number of targets of a sample, or of classes, if a data set of `--dataset` says so.
    pub out_features: Option<i64>,
}

/// A program that trains: `ddp-mp`, or a user's program. Options choose what it does not bring.
#[derive(Clone)]
pub(crate) struct Program {
    pub name: &'static str,
    pub version: &'static str,
    /// The commit that the program was built from, empty if not known.
    pub commit: &'static str,
    /// Whether the program has the commands that teach.
    pub has_course: bool,
    /// Builds the model. `None` if `--model` chooses it.
    pub model: Option<Arc<BuildModel>>,
    /// Opens the training samples. `None` if `--dataset` chooses them.
    pub dataset: Option<Arc<OpenDataset>>,
    /// Opens the validation samples. `None` if they are held back, or lie beside the training samples.
    pub validation: Option<Arc<OpenDataset>>,
    /// What a run minimizes and measures. `--loss` chooses the loss if the program brings none.
    pub criterion: Criterion,
    /// What is done to each rank's trainer before it trains, in this order.
    pub trainer: Vec<Arc<ChangeTrainer>>,
    /// The type of the program's own options.
    pub options: Option<OwnOptionsType>,
    /// The text of a TOML file with other defaults.
    pub defaults: Option<&'static str>,
}

impl Program {
    /// Returns a program that brings nothing itself.
    pub(crate) fn new(name: &'static str, version: &'static str) -> Self {
        Self {
            name,
            version,
            commit: "",
            has_course: false,
            model: None,
            dataset: None,
            validation: None,
            criterion: Loss::Mse.into(),
            trainer: Vec::new(),
            options: None,
            defaults: None,
        }
    }

    /// Returns the declarations of all options of this program: ours without those that it replaces, then its own.
    pub(crate) fn command(&self) -> Command {
        let ours = Config::command();
        let command = Command::new(self.name).no_binary_name(true).disable_help_flag(true);
        let kept = ours.get_arguments().filter(|arg| self.brings(arg.get_id().as_str()).is_none());
        command.args(kept).args(self.own_args()).args_override_self(true).add(self.clone())
    }

    /// Returns the declarations of [`command`](Self::command) with the program's defaults, which the help shows. Leaves
    /// out defaults that are invalid: an error names them later.
    pub(crate) fn options_with_defaults(&self) -> Vec<Arg> {
        let command = self.command();
        let defaults = read_defaults(self, &command).unwrap_or_default();
        let with_default = |arg: &Arg| with_default(arg, defaults.get(arg.get_id().as_str()));
        command.get_arguments().map(with_default).collect()
    }

    /// Returns whether this is another program than `ddp-mp`.
    pub(crate) fn is_own(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the name and the version, with the version of `ddp-mp` in another program.
    pub(crate) fn with_version(&self) -> String {
        let ours = concat!("ddp-mp ", env!("CARGO_PKG_VERSION"));
        if self.is_own() { format!("{} {}, {ours}", self.name, self.version) } else { ours.into() }
    }

    /// Returns what the program brings in place of the option `key` of ours. `None` if it has this option.
    pub(super) fn brings(&self, key: &str) -> Option<&'static str> {
        let of_model = || ModelSection::augment_args(Command::new(self.name));
        let (own_model, own_data) = (self.model.is_some(), self.dataset.is_some());
        match key {
            "loss" if self.criterion.has_own_loss() => Some("loss"),
            _ if own_data && OF_DATASET.contains(&key) => Some("data set"),
            _ if own_model && own_data && OF_DATA_AND_MODEL.contains(&key) => {
                Some("model and data set")
            }
            _ if own_model && of_model().get_arguments().any(|arg| arg.get_id() == key) => {
                Some("model")
            }
            _ => None,
        }
    }

    /// Returns the declarations of the program's own options. None is required as a flag: a file or a default may give it.
    fn own_args(&self) -> Vec<Arg> {
        let Some(options) = self.options else { return Vec::new() };
        let declared = (options.augment)(Command::new(self.name).next_help_heading("Own options"));
        let own = |arg: &Arg| {
            let arg = arg.clone().required(false).add(InShortHelp);
            let is_path = arg.get_value_hint() == ValueHint::AnyPath;
            if is_path { arg.add(MayDiffer::OnResumeWithNote) } else { arg }
        };
        declared.get_arguments().map(own).collect()
    }

    /// Returns whether the option `key` is the program's own.
    pub(super) fn owns(&self, key: &str) -> bool {
        self.own_args().iter().any(|arg| arg.get_id() == key)
    }

    /// Returns the values of the program's own options that `args` give, over the defaults.
    pub(super) fn parse_own(&self, args: Vec<String>) -> Result<OwnOptions, ClapError> {
        let Some(options) = self.options else { return Ok(OwnOptions::default()) };
        let command = Command::new(self.name).no_binary_name(true).disable_help_flag(true);
        let command = (options.augment)(command).args_override_self(true);
        (options.parse)(&mut command.try_get_matches_from(args)?)
    }

    /// Checks that each own option is a flag and a key of a file, and that no option in `taken` has its name. The names of
    /// our options of the data stay taken where the program replaces these.
    ///
    /// # Errors
    /// [`Error::Input`] that names both options, and for validation samples without training samples.
    pub(crate) fn check(&self, taken: &[Arg]) -> Result<()> {
        if self.validation.is_some() && self.dataset.is_none() {
            return Err(Error::usage(
                "App::validation_dataset needs training samples from the program too; add App::dataset"
                    .into(),
            ));
        }
        let Some(options) = self.options else { return Ok(()) };
        let of_data = DataSection::augment_args(Command::new(self.name));
        let refuse = |key: &str, problem: String| {
            Err(Error::usage(format!("the option `{key}` of {}: {problem}", options.name)))
        };
        for arg in self.own_args() {
            let key = arg.get_id().as_str();
            let flag = flag_name(key);
            if arg.get_long() != Some(flag.trim_start_matches('-')) {
                return refuse(key, format!("its flag must be {flag}; write #[arg(long)]"));
            }
            let problem = match (arg.get_action(), arg.get_value_delimiter()) {
                (ArgAction::Set | ArgAction::SetTrue, _) | (ArgAction::Append, Some(_)) => None,
                (ArgAction::Append, None) => Some("a list needs #[arg(value_delimiter = ',')]"),
                _ => Some("it must take a value, a list or nothing"),
            };
            if let Some(problem) = problem {
                return refuse(key, problem.into());
            }
            let mut theirs = taken.iter().chain(of_data.get_arguments());
            if let Some(theirs) = theirs.find(|theirs| clash(theirs, &arg)) {
                let theirs = flag_name(theirs.get_id().as_str());
                let problem =
                    format!("every program has {theirs} already; give yours another name");
                return refuse(key, problem);
            }
        }
        Ok(())
    }
}

impl CommandExt for Program {}

/// Returns why the program of `command` has no option `key`: it brings what this option would choose. `None` for
/// another reason.
pub(crate) fn why_replaced(command: &Command, key: &str) -> Option<String> {
    let program = command.get::<Program>()?;
    let part = program.brings(key)?;
    Some(format!("{} brings its own {part}", program.name))
}

/// Returns the option `arg` with the program's default `value`, if it has one. The help shows it, or what holds instead.
fn with_default(arg: &Arg, value: Option<&TomlValue>) -> Arg {
    let arg = arg.clone();
    let given = value.and_then(|value| to_arg(&arg, value).ok()?);
    match given.as_deref().map(|given| given.split_once('=')) {
        Some(Some((_, text))) => arg.default_value(text.to_owned()),
        Some(None) => states_default(arg, "true"), // of a switch
        None => match arg.get::<DefaultInWords>() {
            Some(&DefaultInWords(words)) => states_default(arg, words),
            None => arg,
        },
    }
}

/// Returns `arg` with a help that states its default in words, in the form in which clap states values.
fn states_default(arg: Arg, words: &str) -> Arg {
    let stated = |help: Option<&StyledStr>, gap| {
        Some(StyledStr::from(format!("{}{gap}[default: {words}]", help?)))
    };
    let help = Resettable::from(stated(arg.get_help(), " "));
    let long_help = Resettable::from(stated(arg.get_long_help().or(arg.get_help()), "\n\n"));
    arg.help(help).long_help(long_help)
}

/// Returns whether two options have a name in common.
fn clash(theirs: &Arg, own: &Arg) -> bool {
    let aliases = own.get_all_aliases().unwrap_or_default();
    let same_short = theirs.get_short().is_some() && theirs.get_short() == own.get_short();
    let same_long = |long: &str| Some(long) == own.get_long() || aliases.contains(&long);
    theirs.get_id() == own.get_id() || theirs.get_long().is_some_and(same_long) || same_short
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("name", &self.name).finish_non_exhaustive()
    }
}

impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Default for Program {
    /// Returns `ddp-mp` itself.
    fn default() -> Self {
        Self::new("ddp-mp", env!("CARGO_PKG_VERSION"))
    }
}

/// The type of a program's own options: how they are declared, and how they are read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnOptionsType {
    /// The type's name, for errors.
    name: &'static str,
    augment: fn(Command) -> Command,
    parse: fn(&mut ArgMatches) -> Result<OwnOptions, ClapError>,
}

impl OwnOptionsType {
    /// Returns the declaration of the options `A`.
    pub(crate) fn of<A: Args + Send + Sync + 'static>() -> Self {
        let name = std::any::type_name::<A>().rsplit("::").next().unwrap_or_default();
        Self { name, augment: A::augment_args, parse: OwnOptions::parse::<A> }
    }
}

/// The values of a program's own options.
#[derive(Debug, Clone)]
pub(crate) struct OwnOptions {
    /// The struct that the program declares.
    pub args: Arc<OwnArgs>,
    /// The same values by key. Those without a value are not there.
    pub values: Map<String, Value>,
}

impl OwnOptions {
    /// Reads the options `A` that clap has parsed.
    fn parse<A: Args + Send + Sync + 'static>(matches: &mut ArgMatches) -> Result<Self, ClapError> {
        let declared = A::augment_args(Command::new("own"));
        let mut values = Map::new();
        for arg in declared.get_arguments() {
            let key = arg.get_id().as_str();
            let texts = matches.get_raw(key).unwrap_or_default();
            let texts: Vec<_> = texts.map(|text| text.to_string_lossy().into_owned()).collect();
            let value = match (arg.get_value_delimiter(), &texts[..]) {
                (Some(_), _) => texts.iter().map(|text| typed(arg, text)).collect(),
                (None, [text]) => typed(arg, text),
                _ => continue,
            };
            values.insert(key.to_owned(), value);
        }
        let args = Arc::new(A::from_arg_matches_mut(matches)?);
        Ok(Self { args, values })
    }
}

/// Returns the value of the option `arg` as a file has it: a number, or true or false, if it is written so and no text.
fn typed(arg: &Arg, text: &str) -> Value {
    let parsed = arg.get_value_parser().type_id();
    let is_text = parsed == TypeId::of::<String>() || parsed == TypeId::of::<PathBuf>();
    let value: Option<Value> = serde_json::from_str(text).ok().filter(|_| !is_text);
    let value = value.filter(|it| it.is_i64() || it.is_f64() || it.is_boolean());
    value.unwrap_or_else(|| text.into())
}

impl Default for OwnOptions {
    fn default() -> Self {
        Self { args: Arc::new(()), values: Map::new() }
    }
}

impl PartialEq for OwnOptions {
    fn eq(&self, other: &Self) -> bool {
        self.values == other.values
    }
}
