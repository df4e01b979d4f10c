//! `App`: a program of one's own with all flags, files and commands, as tests/app_program.rs.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use ddp_mp::App;
use ddp_mp::prelude::*;
use serde_json::Value;

use crate::harness::{
    linear, program, repository, run, run_command, run_command_to, some_of, without_launcher,
};

/// The program, seeing no GPU and no launcher.
fn app(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_app-program"));
    without_launcher(command.args(args))
        .env("CUDA_VISIBLE_DEVICES", "")
        .env_remove("RUST_BACKTRACE");
    command
}

fn run_app(args: &[&str]) -> (Option<i32>, String, String) {
    run_command(app(args))
}

fn app_to(code: i32, args: &[&str]) -> (String, String) {
    run_command_to(code, app(args))
}

/// Returns the hash in what a run has printed.
fn hash(stderr: &str) -> String {
    let (_, hash) = stderr.split_once("; parameters ").unwrap_or_else(|| panic!("{stderr}"));
    hash.lines().next().unwrap().to_owned()
}

const TWO_RANKS: &str = "--nproc-per-node=2";

#[test]
fn hash_is_that_of_the_built_in_model() {
    let all = [
        &["--max-epochs=2", "--grad-accum-steps=2", "--batch-size=30", "--exact-mean"][..],
        &["--amp=bf16", "--zero", "--optimizer=adamw", "--max-grad-norm=0.1"],
        &["--strategy=dp"],
    ];
    for flags in some_of(all, 1) {
        let flags = [&[TWO_RANKS][..], flags].concat();
        let (_, theirs) = app_to(0, &flags);
        let ours = ["--model=mlp", "--lr=0.002", "--log-every=7"];
        let (_, _, ours) = run(&[&flags[..], &ours].concat());
        assert_eq!(hash(&theirs), hash(&ours), "{flags:?}");
        let (_, _, own_step) = run_app(&[&flags[..], &["--own-step"]].concat());
        assert_eq!(hash(&own_step), hash(&theirs), "{flags:?}");
    }
}

#[test]
fn run_saves_resumes_and_writes_all_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let dir = format!("--checkpoint-dir={}", at("run"));
    let (report, trace) =
        (format!("--report={}", at("r.html")), format!("--trace={}", at("t.json")));
    let metrics = format!("--metrics={}", at("m.jsonl"));
    let common = [TWO_RANKS, "--val-fraction=0.1", "--explain"];
    let (_, _, whole) = run_app(&[&common[..], &["--max-epochs=3"]].concat());
    let files = [dir.as_str(), &report, &trace, &metrics, "--log-format=json"];
    let (stdout, _) =
        app_to(0, &[&common[..], &files, &["--max-epochs=3", "--max-steps=70"]].concat());
    let event = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    let validation = stdout.lines().map(event).find(|event| event["event"] == "validation");
    let validation = validation.unwrap_or_else(|| panic!("{stdout}"));
    assert!(validation.to_string().contains("\"distance\":"), "{validation}");
    for file in ["r.html", "t.json", "m.jsonl"] {
        assert!(fs::metadata(at(file)).unwrap().len() > 0, "{file}");
    }
    let page = fs::read_to_string(at("r.html")).unwrap();
    assert!(page.contains("\"spirals --nproc-per-node=2 "), "the command of the page");
    let resumed = [&common[..], &[&dir, "--resume=auto", "--max-epochs=3"]].concat();
    let (code, _, stderr) = run_app(&resumed);
    assert_eq!((code, hash(&stderr)), (Some(0), hash(&whole)), "{stderr}");

    // An own option is compared as ours are.
    let (_, stderr) = app_to(2, &[&resumed[..], &["--width=32"]].concat());
    assert!(stderr.contains("--width was 64 in the checkpoint and is 32 now"), "{stderr}");
    let (_, _, stderr) = run_app(&[&resumed[..], &["--notes=x"]].concat());
    assert!(stderr.contains("--notes was not set in the checkpoint and is \"x\" now"), "{stderr}");
}

#[test]
fn own_options_are_flags_keys_and_lines_of_env() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.toml");
    fs::write(&file, "width = 8\nfactors = [1, 2.5]\nnotes = \"n.txt\"\n").unwrap();
    let config = format!("--config={}", file.display());
    let (stdout, _) = app_to(0, &["env", &config, "--width=16", "--batch-size=8"]);
    let line = |key: &str| {
        let start = format!("{key} = ");
        stdout.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{stdout}"))
    };
    assert!(line("width").starts_with("width = 16 ") && line("width").ends_with("# flag"));
    assert!(line("factors").starts_with("factors = [1, 2.5]"), "{}", line("factors"));
    let notes = folder.path().join("n.txt");
    assert!(line("notes").contains(notes.to_str().unwrap()), "{}", line("notes"));
    assert!(line("lr").ends_with("# default of spirals"), "{}", line("lr"));
    assert!(line("batch_size").ends_with("# flag"));
    assert!(!stdout.contains("model = ") && !stdout.contains("dataset = "), "{stdout}");

    #[derive(clap::Args)]
    struct Options {
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(i64).range(1..))]
        width: i64,
    }
    let app = App::new("spirals", "1.2.3").args::<Options>();
    let app = app.model(|path, context| linear(path, context.args.width, 1));
    let app = app.dataset(|_| Ok(TensorDataset::random(64, 20, Targets::Values(1), 1)?));
    let app = app.loss(|output: &Tensor, _: &Tensor| output.mean(Kind::Float));
    let refused = |args: &[&str]| {
        let args = ["spirals"].iter().chain(args).map(Into::into);
        app.config_of(args).unwrap_err().to_string()
    };
    for (text, complaint) in [
        ("width = \"x\"", "line 1"),
        ("width = 0", "0 is not in 1.."),
        ("model = \"mlp\"", "unknown field `model`: spirals brings its own model"),
        ("hidden = [3]", "unknown field `hidden`: spirals brings its own model"),
        ("loss = \"mse\"", "unknown field `loss`: spirals brings its own loss"),
        ("num-samples = 9", "unknown field `num-samples`: spirals brings its own data set"),
    ] {
        fs::write(&file, text).unwrap();
        let error = refused(&[&config]);
        assert!(error.contains(complaint), "{text}: {error}");
    }
    for (flag, part) in [
        ("--model=mlp", "model"),
        ("--hidden=3", "model"),
        ("--dataset=digits", "data set"),
        ("--num_samples=3", "data set"),
        ("--loss=mse", "loss"),
        ("--in-features=2", "model and data set"),
    ] {
        for command in [&[][..], &["train"], &["bench", "step"]] {
            let error = refused(&[command, &[flag]].concat());
            let name = flag.split('=').next().unwrap().replace('_', "-");
            assert!(error.contains(&format!("unexpected argument '{name}' found")), "{error}");
            let tip = format!("tip: spirals brings its own {part}\n");
            assert!(error.contains(&tip), "{error}");
        }
    }
    let error = refused(&["diff", "--model=mlp"]);
    assert!(error.contains("'--model' found") && !error.contains("brings"), "{error}");
}

#[test]
fn help_shows_the_defaults_of_the_program() {
    #[derive(clap::Args)]
    struct Options {
        /// Set the width of the hidden layer
        #[arg(long, default_value_t = 64)]
        width: i64,
    }
    let defaults = "lr = 0.25\nhidden = [8, 9]\nval_fraction = 0.1\nno-shuffle = true\nwidth = 16\nmodel = \"mlp\"";
    let app = App::new("mine", "1.0.0").args::<Options>().defaults(defaults);
    let config = app.config_of(["mine".into()].into_iter()).unwrap().unwrap();
    assert!((config.optimization.lr - 0.25).abs() < 1e-9 && config.data.no_shuffle);
    let mut command = app.command();
    let help = command.render_help().to_string();
    let long = command.render_long_help().to_string();
    let train = command.find_subcommand_mut("train").unwrap().render_long_help().to_string();
    for (flag, default) in [
        ("--lr <X>", "0.25"),
        ("--hidden <N,...>", "8,9"),
        ("--val-fraction", "0.1"),
        ("--no-shuffle", "true"),
        ("--width <WIDTH>", "16"),
        ("--model <NAME>", "mlp"),
    ] {
        for help in [&long, &train] {
            let (_, about) = help.split_once(flag).unwrap_or_else(|| panic!("{flag}: {help}"));
            let (_, default_and_rest) = about.split_once("[default: ").unwrap();
            assert!(default_and_rest.starts_with(&format!("{default}]")), "{flag}: {about}");
        }
    }
    assert!(help.contains("[default: 0.25]"), "{help}");
    let (_, about) = long.split_once("--val-fraction <F>").unwrap();
    let (about, _) = about.split_once("\n      --").unwrap();
    assert!(!about.contains("[default: none]"), "the program has another: {about}");
    assert!(
        long.contains("[default: 50; with --report 10]"),
        "options without such a default keep ours: {long}"
    );
    // Defaults that are invalid are an error of a run, and not of the help.
    let wrong = App::new("mine", "1.0.0").defaults("lr = \"x\"").command().render_help();
    assert!(wrong.to_string().contains("[default: 0.001]"), "{wrong}");
}

#[test]
fn commands_and_help_have_the_name_of_the_program() {
    let (_, help, _) = run_app(&["--help"]);
    for text in ["Usage: spirals", "--width <N>", "Own options:", "--lr <X>", "[default: 0.002]"] {
        assert!(help.contains(text), "{text}: {help}");
    }
    for text in ["ddp-mp ", "--model", "--dataset", "\n  lesson", "\n  new", "\n  sample"] {
        assert!(!help.contains(text), "{text}: {help}");
    }
    let (_, version, _) = run_app(&["--version"]);
    assert!(version.starts_with("spirals   1.2.3\nddp-mp    "), "{version}");
    let (script, _) = app_to(0, &["completions", "bash"]);
    assert!(script.contains("spirals") && script.contains("width"), "{script}");
    let (_, help, _) = run_app(&["completions", "--help"]);
    assert!(help.contains("Usage: spirals") && !help.contains("ddp-mp"), "{help}");
    for command in [
        &["bench", "step", "--steps=20"][..],
        &["bench", "scaling", "--steps=4", "--repetitions=1"],
        &["verify", "--steps=3", "--width=8"],
    ] {
        let (_, stderr) = app_to(0, &[command, &[TWO_RANKS]].concat());
        let note = "the model of spirals must have neither dropout nor batch norm here";
        assert_eq!(stderr.contains(note), command[0] == "verify", "{command:?}: {stderr}");
    }
    app_to(2, &["lesson"]);
}

#[test]
fn what_is_wrong_in_a_program_is_one_message_with_its_part() {
    let panic_of_model = "the model panicked at tests/app_program.rs:";
    let cases = [
        ("dataset-error", 2, vec!["the data set of spirals: no data today"]),
        ("dataset-torch", 2, vec!["the data set of spirals: ", "mat1 and mat2 shapes cannot be"]),
        ("model-panic", 1, vec![panic_of_model, "no model today"]),
        ("model-dropout", 1, vec![panic_of_model, "the dropout probability is 1.5; give a"]),
        (
            "model-shape",
            1,
            vec!["rank", "the loss panicked", "The size of tensor a (31) must match", "samples "],
        ),
        ("sample-shape", 1, vec!["rank 1", "stack expects each tensor to be equal size"]),
        (
            "sample-panic",
            1,
            vec!["rank 1", "sample 77: the data set panicked at", "no such sample"],
        ),
        ("dataset-empty", 2, vec!["the data set of spirals: it has no samples"]),
        ("trainer-error", 1, vec!["no trainer today"]),
        ("dataset-panic", 2, vec!["the data set of spirals: ", "panicked at", "no data today"]),
    ];
    for (part, code, expected) in some_of(cases, 3) {
        let (status, _, stderr) = run_app(&[TWO_RANKS, &format!("--wrong={part}")]);
        for text in expected {
            assert!(stderr.contains(text), "{part}: {text:?} is not in {stderr}");
        }
        assert_eq!(status, Some(code), "{part}: {stderr}");
        for noise in
            ["thread '", "frame #", "/rustc/", "/registry/", "libc", "start_thread", "ddp_mp::"]
        {
            assert!(!stderr.contains(noise), "{part}: {noise:?} is in {stderr}");
        }
    }
}

/// Returns the error of a program with the options `A`.
fn wrong_options<A: clap::Args + Send + Sync + 'static>() -> String {
    let app = App::new("mine", "1.0.0").args::<A>();
    app.config_of(["mine".into()].into_iter()).unwrap_err().to_string()
}

#[test]
fn own_option_with_a_name_that_is_taken_is_refused() {
    /// The error of a program whose options have this one field.
    macro_rules! error_of {
        ($options:ident, $field:ident: $type:ty, $($attribute:tt)*) => {{
            #[derive(clap::Args)]
            struct $options {
                #[arg($($attribute)*)]
                $field: $type,
            }
            wrong_options::<$options>()
        }};
    }
    for (error, option, problem) in [
        (error_of!(A, lr: Option<f64>, long), "`lr` of A", "has --lr already"),
        (error_of!(B, steps: Option<u64>, long), "`steps` of B", "has --steps already"),
        (
            error_of!(C, quantity: Option<u64>, long, short),
            "`quantity` of C",
            "has --quiet already",
        ),
        (error_of!(D, version: Option<u64>, long), "`version` of D", "has --version already"),
        (error_of!(E, file: Option<String>, index = 1), "`file` of E", "its flag must be --file"),
        (error_of!(F, dataset: Option<String>, long), "`dataset` of F", "has --dataset already"),
        (error_of!(G, names: Vec<String>, long), "`names` of G", "a list needs"),
    ] {
        let begins = error.starts_with(&format!("the option {option}: "));
        assert!(begins && error.contains(problem), "{error}");
    }
}

#[test]
fn option_that_is_replaced_leaves_its_name_free() {
    #[derive(clap::Args)]
    struct Options {
        #[arg(long, default_value_t = 3)]
        hidden: i64,
        #[arg(long)]
        dropout: f64,
    }
    let app = App::new("mine", "1.0.0").args::<Options>();
    let app = app.model(|path, context| linear(path, context.args.hidden, 1));
    let config_of = |args: &[&str]| app.config_of(args.iter().map(Into::into));
    let error = config_of(&["mine"]).unwrap_err().to_string();
    assert!(
        error.contains("required arguments were not provided") && error.contains("--dropout"),
        "{error}"
    );
    let config = config_of(&["mine", "--dropout=0.5"]).unwrap().unwrap();
    let text = config.to_string();
    assert!(text.contains("dropout = 0.5") && text.contains("hidden = 3"), "{text}");
    assert!(!text.contains("activation"), "{text}");
}

#[test]
fn own_values_of_any_type_are_read_back_from_what_is_shown() {
    #[derive(Debug, Clone, Copy, clap::ValueEnum)]
    enum Size {
        Small,
        VeryLarge,
    }
    #[derive(clap::Args)]
    struct Options {
        #[arg(long, value_enum, default_value_t = Size::Small)]
        size: Size,
        #[arg(long, action = clap::ArgAction::Set, default_value_t = true)]
        bias: bool,
        #[arg(long)]
        fast: bool,
        #[arg(long, value_delimiter = ',', default_value = "a,b")]
        names: Vec<String>,
        #[arg(long, default_value_t = 0.5)]
        ratio: f32,
        #[arg(long)]
        start: Option<i32>,
    }
    let app = || App::new("mine", "1.0.0").args::<Options>();
    let text = |args: &[&str]| {
        let config = app().config_of(args.iter().map(Into::into)).map_err(|it| it.to_string())?;
        Ok::<String, String>(config.unwrap().to_string())
    };
    let given =
        ["mine", "--size=very-large", "--bias=false", "--fast", "--names=x,y,z", "--start=-3"];
    let shown = text(&given).unwrap();
    for line in [
        "size = \"very-large\"",
        "bias = false",
        "fast = true",
        "names = [\"x\", \"y\", \"z\"]",
        "ratio = 0.5",
        "start = -3",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line}: {shown}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.toml");
    fs::write(&file, &shown).unwrap();
    let config = format!("--config={}", file.display());
    assert_eq!(text(&["mine", &config]).unwrap(), shown);
    for (line, complaint) in [
        ("names = [\"a,b\"]", "contains ','"),
        ("bias = 1", "possible values: true, false"),
        ("size = \"huge\"", "possible values: small, very-large"),
        ("ratio = \"x\"", "invalid float literal"),
    ] {
        fs::write(&file, line).unwrap();
        let error = text(&["mine", &config]).unwrap_err();
        assert!(error.contains(complaint), "{line}: {error}");
    }
}

#[test]
fn built_in_model_takes_its_sizes_from_own_data() {
    let data = |targets| move |_: &()| Ok(TensorDataset::random(64, 7, targets, 1)?);
    let config_of = |app: App, args: &[&str]| {
        let config = app.config_of(args.iter().map(Into::into)).unwrap().unwrap();
        config.open_data(0).map(|(config, data)| (config.model_config(), data))
    };
    let app = |targets| App::new("mine", "1.0.0").dataset(data(targets));
    let (model, opened) =
        config_of(app(Targets::Values(3)), &["mine", "--model=mlp", "--val-fraction=0.25"])
            .unwrap();
    assert_eq!((model.in_features, model.out_features), (7, 3));
    assert_eq!((opened.training.len(), opened.validation.unwrap().len()), (48, 16));
    let classes = ["mine", "--loss=cross-entropy"];
    let error = config_of(app(Targets::Classes(5)), &classes).unwrap_err().to_string();
    assert!(error.contains("--out-features: the number of classes is not known"), "{error}");
    let with_classes = ["mine", "--loss=cross-entropy", "--out-features=5"];
    let (model, _) = config_of(app(Targets::Classes(5)), &with_classes).unwrap();
    assert_eq!((model.in_features, model.out_features), (7, 5));
    let with_inputs = ["mine", "--in-features=9"];
    let error = config_of(app(Targets::Values(3)), &with_inputs).unwrap_err().to_string();
    assert!(error.contains("--in-features: a sample has 7 numbers, not 9"), "{error}");

    let validated = || app(Targets::Values(3)).validation_dataset(data(Targets::Values(3)));
    let (_, opened) = config_of(validated(), &["mine"]).unwrap();
    assert_eq!((opened.training.len(), opened.validation.unwrap().len()), (64, 64));
    let (_, opened) = config_of(validated(), &["mine", "--val-fraction=0"]).unwrap();
    assert!(opened.validation.is_none());
    let without = App::new("mine", "1.0.0").validation_dataset(data(Targets::Values(3)));
    let error = without.config_of(["mine".into()].into_iter()).unwrap_err().to_string();
    assert!(error.contains("add App::dataset"), "{error}");
}

/// Windows of a curve; the target is the number after the window.
#[derive(Debug)]
struct Windows {
    curve: Vec<f32>,
    width: usize,
}

impl Dataset for Windows {
    fn len(&self) -> usize {
        self.curve.len() - self.width
    }

    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let end = index + self.width;
        let inputs = Tensor::from_slice(&self.curve[index..end]);
        Ok((inputs, Tensor::from_slice(&self.curve[end..=end])))
    }
}

#[test]
fn data_set_in_the_book_is_the_one_above_and_loads() {
    let page = fs::read_to_string(repository("docs/src/your-own-model.md")).unwrap();
    let blocks = page.split("```rust\n").map(|text| text.split_once("```").unwrap().0);
    let shown = blocks.filter(|block| block.contains("impl Dataset for")).collect::<Vec<_>>();
    assert!(shown.len() == 1 && include_str!("app.rs").contains(shown[0]), "{shown:?}");

    let curve = (0..100).map(|x| x as f32).collect();
    let data = Arc::new(Windows { curve, width: 5 });
    let sampler = DistributedSampler::new(data.len(), 1, 0).unwrap().shuffle(false);
    let loader = DataLoader::new(data, sampler, 8, Device::Cpu).unwrap();
    let batches: Vec<_> = loader.epoch(0).unwrap().map(Result::unwrap).collect();
    let last = batches.last().unwrap();
    assert_eq!(
        (batches.len(), last.inputs.size(), last.targets.size()),
        (12, vec![7, 5], vec![7, 1])
    );
    assert_eq!(
        (last.inputs.double_value(&[6, 4]), last.targets.double_value(&[6, 0])),
        (98.0, 99.0)
    );
}

#[test]
fn defaults_of_a_program_that_are_wrong_are_named() {
    for (defaults, expected) in [
        ("lr = \"x\"", "the defaults of mine: TOML parse error at line 1"),
        ("learning_rate = 1", "did you mean `lr`?"),
        ("loss = \"cross-entropy\"", "the defaults of mine: loss: cross-entropy over one column"),
    ] {
        let app = App::new("mine", "1.0.0").defaults(defaults);
        let error = app.config_of(["mine".into()].into_iter()).unwrap_err().to_string();
        assert!(error.contains(expected), "{defaults}: {error}");
    }
}

#[test]
fn checkpoint_of_one_program_is_not_that_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let dir = format!("--checkpoint-dir={}", folder.path().join("run").display());
    let (code, _, stderr) = run_app(&[&dir]);
    assert_eq!(code, Some(0), "{stderr}");
    let mut ours = program(&["--model=mlp", "--lr=0.002", "--resume=auto", &dir]);
    let output = ours.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("this is not the run that was saved"), "{stderr}");
}
