//! Inputs that were changed at random: each is read, or refused with an error that names it, and stays as it is.
//!
//! As many of each kind as `INPUTS` says, others with another `SEED`: `make mutated COUNT=10000 SEED=2`, also of command
//! lines (`flags`). `written` has pipes, devices and folders in the place of files.

use std::fs;
use std::path::Path;

use ddp_mp::checkpoint::{Checkpoint, Snapshot, TensorFile, TrainerState};
use ddp_mp::config::Config;
use ddp_mp::models::ModelConfig;
use ddp_mp::{CheckpointDir, Dataset, DatasetSpec, Error, FileDataset, TargetKind};
use tch::Device;

use crate::harness::{files_below, repository};

const MAX_I64: &str = "9223372036854775807";
const ABOVE_64: &str = "18446744073709551616";

/// What is put anywhere.
pub(crate) const TEXTS: [&str; 18] = [
    "0", "-1", "1e999", "nan", ABOVE_64, "\"\"", "[", "{", "\0", "\n", "=", ",", "é", MAX_I64,
    "..", "--", "%s", "\u{202e}",
];

/// A generator of numbers: the same in every run with one `SEED`.
pub(crate) struct Chance(u64);

impl Chance {
    /// Returns the `number`th of five generators.
    pub(crate) fn new(number: u64) -> Self {
        let seed = std::env::var("SEED").map_or(0, |seed| seed.parse().unwrap());
        Self(number + 5 * seed)
    }

    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % count.max(1)
    }

    pub(crate) fn pick<'a>(&mut self, texts: &[&'a str]) -> &'a str {
        texts[self.below(texts.len())]
    }

    /// A file of this many bytes changed in a few places.
    fn change(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..[1, 1, 2, 4][self.below(4)] {
            let len = bytes.len();
            // Mostly near the beginning, where headers are.
            let at =
                if self.below(2) == 0 { self.below(len.min(100) + 1) } else { self.below(len + 1) };
            match self.below(7) {
                0 if at < len => bytes[at] ^= 1 << self.below(8),
                1 if at < len => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                2 => bytes.truncate(at),
                3 => drop(bytes.drain(at..len.min(at + 1 + self.below(40)))),
                4 => drop(bytes.splice(at..at, self.pick(&TEXTS).bytes())),
                5 => {
                    let number = [0, 1, 1 << 31, 1 << 40, 1 << 63, u64::MAX][self.below(6)];
                    let end = len.min(at + 8);
                    drop(bytes.splice(at..end, number.to_le_bytes()));
                }
                _ => {
                    let from = self.below(len);
                    let part = bytes[from..len.min(from + 50)].to_vec();
                    drop(bytes.splice(at..at, part));
                }
            }
        }
        bytes
    }
}

/// Changes the file at `path`, which must be as `read` has found it afterwards; an error must name one of `names`.
fn try_changed<T>(
    chance: &mut Chance,
    path: &Path,
    names: &[&str],
    read: impl Fn() -> ddp_mp::Result<T>,
) -> bool {
    let whole = fs::read(path).unwrap();
    let changed = chance.change(&whole);
    fs::write(path, &changed).unwrap();
    let result = read().map(drop);
    assert_eq!(fs::read(path).unwrap(), changed, "{} has changed", path.display());
    fs::write(path, whole).unwrap();
    match &result {
        Err(Error::Input { problem: text, .. }) => {
            assert!(
                names.iter().any(|name| text.contains(name)),
                "{text:?} names none of {names:?}"
            );
        }
        Err(other) => panic!("{}: {other}", path.display()),
        Ok(()) => {}
    }
    result.is_ok()
}

pub(crate) fn inputs() -> usize {
    std::env::var("INPUTS").map_or(300, |inputs| inputs.parse().unwrap())
}

#[test]
fn changed_configs_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    let files = files_below(&repository("configs"));
    let mut configs: Vec<String> =
        files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    configs.extend(
        [
            "model = \"mlp\"\nhidden = [8, 4]\ntimeout = \"90s\"\nmilestones = [1, 2]\n",
            "inject_fault = \"nan:rank=0,at=step,step=1\"\nskip-nonfinite = 3\nlr = 1e-3\n",
        ]
        .map(String::from),
    );
    let mut chance = Chance::new(1);
    let mut read = 0;
    for number in 0..inputs() {
        fs::write(&path, &configs[number % configs.len()]).unwrap();
        // A mistake beside another flag names that flag.
        let names = ["run.toml", "--"];
        let resolve = || Config::resolve(Some(&path), &toml::Table::new());
        read += usize::from(try_changed(&mut chance, &path, &names, resolve));
    }
    assert!(read > 0 && read < inputs(), "{read} of {} were read", inputs());
}

#[test]
fn changed_data_files_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("idx")).unwrap();
    fs::create_dir(at("packed")).unwrap();
    for part in ["images-idx3-ubyte", "labels-idx1-ubyte"] {
        let (plain, packed) = (format!("train-{part}"), format!("t10k-{part}.gz"));
        for (from, to) in [
            (&plain, format!("idx/{plain}")),
            (&packed, format!("idx/{packed}")),
            (&packed, format!("packed/{plain}.gz")),
        ] {
            fs::copy(repository("tests/data/idx").join(from), at(&to)).unwrap();
        }
    }
    let files = [
        ("plain.csv", "csv:{}/plain.csv"),
        ("header.csv", "csv:{}/header.csv"),
        ("x.f4.npy", "npy:{}/x.f4.npy,{}/y.i8.npy"),
        ("y.i8.npy", "npy:{}/x.f4.npy,{}/y.i8.npy"),
        ("fortran.npy", "npy:{}/fortran.npy,{}/y.i8.npy"),
        ("big-endian.npy", "npy:{}/big-endian.npy,{}/y.i8.npy"),
        ("set.safetensors", "safetensors:{}/set.safetensors"),
        ("half.safetensors", "safetensors:{}/half.safetensors"),
        ("unaligned.safetensors", "safetensors:{}/unaligned.safetensors"),
        ("idx/train-images-idx3-ubyte", "idx:{}/idx"),
        ("idx/train-labels-idx1-ubyte", "idx:{}/idx"),
        ("idx/t10k-images-idx3-ubyte.gz", "idx:{}/idx"),
        ("packed/train-images-idx3-ubyte.gz", "idx:{}/packed"),
        ("packed/train-labels-idx1-ubyte.gz", "idx:{}/packed"),
    ];
    for (name, _) in &files[..9] {
        fs::copy(repository("tests/data").join(name), at(name)).unwrap();
    }
    let mut chance = Chance::new(2);
    let (mut read, count) = (0, 4 * inputs()); // they are small
    for number in 0..count {
        let (name, spec) = files[number % files.len()];
        let spec: DatasetSpec =
            spec.replace("{}", folder.path().to_str().unwrap()).parse().unwrap();
        let kind = [TargetKind::Classes, TargetKind::Values][chance.below(2)];
        let open = || {
            let data = if name.contains("t10k") {
                FileDataset::open_validation(&spec, kind)?.expect("it is there")
            } else {
                FileDataset::open(&spec, kind)?
            };
            // It is as large as its file says: gzip packs at most 1032 bytes into one.
            let numbers = data.len() * data.in_features() as usize;
            let bytes = fs::metadata(at(name)).unwrap().len() as usize;
            assert!(numbers <= bytes * 1032, "{name}: {numbers} from {bytes}");
            // Every sample of it can be had.
            let all: Vec<usize> = (0..data.len()).collect();
            drop(data.into_dataset()?.batch(&all).unwrap());
            Ok(())
        };
        let folder = folder.path().to_str().unwrap();
        read += usize::from(try_changed(&mut chance, &at(name), &[folder], open));
    }
    assert!(read > 0 && read < count, "{read} of {count} were read");
}

#[test]
#[allow(clippy::disallowed_methods)] // in which order the variables come makes no difference here
fn changed_checkpoints_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let (vs, _) = ModelConfig::default().build(Device::Cpu, 0).unwrap();
    let model: Vec<(String, tch::Tensor)> =
        vs.variables().into_iter().map(|(name, tensor)| (name, tensor.shallow_clone())).collect();
    let dir = CheckpointDir::create(&run, 3).unwrap();
    for step in [1, 2] {
        let state = TrainerState { step, loss_sums: vec![0.5; 2], ..TrainerState::default() };
        dir.write(&Snapshot::take(state, &model, Vec::new()).unwrap()).unwrap();
    }
    drop(dir);
    let files = [
        "latest",
        "step-00000001/trainer.json",
        "step-00000002/trainer.json",
        "step-00000002/model.safetensors",
        "step-00000002/optimizer.safetensors",
    ];
    let mut chance = Chance::new(3);
    let (mut read, names) = (0, ["run", "step-"]);
    for number in 0..inputs() {
        let path = run.join(files[number % files.len()]);
        let from =
            [run.clone(), run.join("latest"), run.join("step-00000002")][chance.below(3)].clone();
        let resume = || {
            // Only what is not whole is refused here; what is not of the model, when it is loaded.
            let checkpoint = Checkpoint::read(&from)?;
            checkpoint.load_model(&vs)?;
            CheckpointDir::open(&run, 3).map(drop)
        };
        read += usize::from(try_changed(&mut chance, &path, &names, resume));
        let open = || CheckpointDir::open(&run, 3).map(drop);
        try_changed(&mut chance, &path, &names, open);
        let init = || TensorFile::read(&from)?.load_into(&vs);
        try_changed(&mut chance, &path, &names, init);
    }
    assert!(read > 0 && read < inputs(), "{read} of {} were read", inputs());
}
