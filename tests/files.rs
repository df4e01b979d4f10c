//! Data sets in files: written by others, of another kind, and cut off while they are read. `mutated` damages them.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use ddp_mp::{Dataset, DatasetSpec, Error, FileDataset, TargetKind, Targets};
use tch::{Device, Kind, Tensor};
use wait_timeout::ChildExt;

use crate::harness::{
    TIMEOUT, ddp_mp_app, files_below, program, refused, repository, run_refused, run_to, words,
};

/// What tests/data/make.py wrote, with {} for its folder.
fn open(spec: &str, kind: TargetKind) -> ddp_mp::Result<FileDataset> {
    let folder = repository("tests/data");
    FileDataset::open(&spec.replace("{}", folder.to_str().unwrap()).parse()?, kind)
}

fn whole(data: &dyn Dataset) -> (Vec<f32>, Tensor) {
    let (inputs, targets) = data.batch(&(0..data.len()).collect::<Vec<_>>()).unwrap();
    assert_eq!((inputs.size(), inputs.kind()), (vec![data.len() as i64, 4], Kind::Float));
    (Vec::try_from(inputs.flatten(0, -1)).unwrap(), targets)
}

#[test]
fn files_of_numpy_and_safetensors_are_read() {
    let x: Vec<f32> = (0..24).map(|i| (i / 4) as f32 + (i % 4) as f32 / 4.0).collect();
    let pixels: Vec<f32> = x.iter().map(|x| x * 4.0 / 255.0).collect();
    let bools: Vec<f32> = x.iter().map(|&x| f32::from(u8::from(x > 2.0))).collect();
    let npy = |x: &str, y: &str| format!("npy:{{}}/{x}.npy,{{}}/{y}.npy");
    let mut sets = vec![
        ("safetensors:{}/set.safetensors".to_string(), &x),
        ("safetensors:{}/half.safetensors".to_string(), &x),
        ("safetensors:{}/unaligned.safetensors".to_string(), &x),
        ("csv:{}/plain.csv".to_string(), &x),
        ("csv:{}/header.csv".to_string(), &x),
        ("idx:{}/idx".to_string(), &pixels),
        (npy("pixels.u1", "y.u1"), &pixels),
        (npy("bools.b1", "y.u1"), &bools),
        (npy("fortran", "y.u1"), &x),
        (npy("big-endian", "y.u1"), &x),
    ];
    sets.extend(
        ["f4", "f8", "f2", "version-2", "version-3"]
            .map(|of| (npy(&format!("x.{of}"), "y.i8"), &x)),
    );
    sets.extend(["i1", "i2", "i4"].map(|of| (npy("x.f4", &format!("y.{of}")), &x)));
    for (spec, expected) in sets {
        let data = open(&spec, TargetKind::Classes).unwrap();
        assert_eq!(
            (data.len(), data.in_features(), data.targets()),
            (6, 4, Targets::Classes(3)),
            "{spec}"
        );
        let (inputs, targets) = whole(&data);
        assert_eq!(&inputs, expected, "{spec}");
        assert_eq!(targets.kind(), Kind::Int64);
        assert_eq!(Vec::<i64>::try_from(targets).unwrap(), [0, 1, 2, 0, 1, 2], "{spec}");
        let data = open(&spec, TargetKind::Values).unwrap();
        assert_eq!(data.targets(), Targets::Values(1));
        let (_, targets) = whole(&data);
        assert_eq!((targets.size(), targets.kind()), (vec![6, 1], Kind::Float));
        let targets = Vec::<f32>::try_from(targets.flatten(0, -1)).unwrap();
        assert_eq!(targets, [0.0, 1.0, 2.0, 0.0, 1.0, 2.0], "{spec}");
    }
    let idx = format!("idx:{}", repository("tests/data/idx").display()).parse().unwrap();
    let validation = FileDataset::open_validation(&idx, TargetKind::Classes).unwrap().unwrap();
    assert_eq!(whole(&validation).0, pixels[..12]);
    let none = FileDataset::open_validation(&DatasetSpec::DIGITS, TargetKind::Classes);
    assert!(none.unwrap().is_none());
}

/// Each file of tests/data/orders holds the numbers from 0 to 23 (bools: whether they are odd) in its shape, as numpy
/// has written them in Fortran's order, big-endian, or both.
#[test]
fn npy_memory_and_byte_orders_match_numpy() {
    let mut seen = 0;
    for path in files_below(&repository("tests/data/orders")) {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let [kind, shape, ..] = name.split('.').collect::<Vec<_>>()[..] else { panic!("{name}") };
        let samples: usize = shape.split('x').next().unwrap().parse().unwrap();
        let spec = format!("npy:{0},{0}", path.display()).parse().unwrap();
        let data = FileDataset::open(&spec, TargetKind::Values).unwrap();
        assert_eq!((data.len(), data.in_features()), (samples, 24 / samples as i64), "{name}");
        let (inputs, targets) = data.batch(&(0..samples).collect::<Vec<_>>()).unwrap();
        let read = |tensor: Tensor| Vec::<f32>::try_from(tensor.flatten(0, -1)).unwrap();
        let numbers = (0..24).map(|it| if kind == "b1" { it % 2 } else { it } as f32);
        let numbers: Vec<f32> = numbers.collect();
        assert_eq!(read(targets), numbers, "{name}");
        let scale = if kind == "u1" { 255.0 } else { 1.0 };
        assert_eq!(read(inputs), numbers.iter().map(|it| it / scale).collect::<Vec<_>>(), "{name}");
        seen += 1;
    }
    assert_eq!(seen, 9 * 6 + 6 * 5 * 2);
}

#[test]
fn float32_file_is_mapped_and_not_copied() {
    let data = open("npy:{}/x.f4.npy,{}/y.i8.npy", TargetKind::Classes).unwrap();
    let place = |data: &FileDataset| data.resident(Device::Cpu).unwrap().map(|(x, _)| x.data_ptr());
    assert!(place(&data).is_some());
    assert_eq!(place(&data), place(&data.clone().first(3).unwrap()));
    let (x, _) = data.resident(Device::Cpu).unwrap().unwrap();
    drop(data);
    assert_eq!(x.double_value(&[5, 3]), 5.75, "a tensor keeps the file in memory");
    assert!(place(&open("npy:{}/x.f8.npy,{}/y.i8.npy", TargetKind::Classes).unwrap()).is_none());
}

/// The error of a run whose data set is refused.
fn data_refused(line: &str) -> String {
    let args = ["ddp-mp"].into_iter().chain(words(line)).map(Into::into);
    let config = ddp_mp_app().config_of(args).unwrap().unwrap();
    config.open_data(0).err().unwrap_or_else(|| panic!("accepted: {line}")).to_string()
}

/// Images of `pixels` x 1 pixels and their labels, as MNIST has them.
fn write_idx(folder: &Path, part: &str, pixels: u8, labels: &[u8]) {
    let samples = labels.len() as u8;
    let images = (0..samples * pixels).map(|i| i.wrapping_mul(37));
    let header = [0, 0, 8, 3, 0, 0, 0, samples, 0, 0, 0, pixels, 0, 0, 0, 1];
    let images: Vec<u8> = header.into_iter().chain(images).collect();
    fs::write(folder.join(format!("{part}-images-idx3-ubyte")), images).unwrap();
    let labels = [&[0, 0, 8, 1, 0, 0, 0, samples], labels].concat();
    fs::write(folder.join(format!("{part}-labels-idx1-ubyte")), labels).unwrap();
}

#[test]
fn t10k_files_are_the_validation_set_unless_overridden() {
    let folder = tempfile::tempdir().unwrap();
    let spec = format!("idx:{}", folder.path().display());
    let classes = format!("--dataset={spec} --loss=cross-entropy");
    // Nothing is learned, so the loss of the same samples is the same.
    let labels = [0, 1, 2, 1, 0, 2, 2, 0];
    write_idx(folder.path(), "train", 4, &labels);
    let outcome = |more: &[&str]| {
        let args = format!("{classes} --model=mlp --lr=0 --nproc-per-node=2 --log-format=json");
        let (stdout, stderr) = run_to(0, &[&words(&args)[..], more].concat());
        let event = |name: &str| {
            let mut events = stdout.lines().map(|line| serde_json::from_str(line).unwrap());
            events.rfind(|it: &serde_json::Value| it["event"] == name)
        };
        (event("end").unwrap()["loss"].as_f64().unwrap(), event("validation"), stderr)
    };
    assert!(outcome(&[]).1.is_none());
    write_idx(folder.path(), "t10k", 4, &labels);
    let (loss, validation, stderr) = outcome(&[]);
    let validated = validation.unwrap()["loss"].as_f64().unwrap();
    assert!((validated - loss).abs() < 1e-6, "{validated} {loss}");
    let note = format!(
        "ddp-mp: validation on the 8 samples of {spec} (t10k); --val-fraction 0 turns it off\n"
    );
    assert!(stderr.contains(&note), "{stderr}");
    // Others than those that are trained on.
    write_idx(folder.path(), "t10k", 4, &labels[..5]);
    let (_, validation, stderr) = outcome(&["--num-samples=4"]);
    assert_ne!(validation.unwrap()["loss"].as_f64(), Some(validated));
    assert!(stderr.contains("on the 5 samples of"), "{stderr}");
    let (_, validation, stderr) = outcome(&["--val-fraction=0"]);
    assert!(validation.is_none() && !stderr.contains("t10k"), "{stderr}");
    let (_, validation, stderr) = outcome(&["--val-fraction=0.25"]);
    assert!(validation.is_some() && !stderr.contains("t10k"), "{stderr}");
    // Others than those that fit.
    let refused = |reason: &str| {
        let error = data_refused(&classes);
        assert!(error.contains(&reason.replace("{}", &spec)), "{error}");
    };
    write_idx(folder.path(), "t10k", 6, &labels);
    refused(
        "{} (t10k) has 6 numbers a sample, and {} has 4; use --val-fraction 0 to train without it",
    );
    write_idx(folder.path(), "t10k", 4, &[0, 1, 7]);
    refused(
        "--out-features: {} (t10k): sample 2 has class 7, and 3 classes count from 0 to 2; use 8 or more",
    );
    fs::remove_file(folder.path().join("t10k-labels-idx1-ubyte")).unwrap();
    refused("there is no t10k-labels-idx1-ubyte here");
}

/// A .npy file of zeros.
fn zeros(path: &Path, rows: usize, columns: usize) {
    let dict =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let mut file = File::create(path).unwrap();
    file.write_all(b"\x93NUMPY\x01\x00\x76\x00").unwrap();
    writeln!(file, "{dict:<117}").unwrap();
    file.set_len((128 + rows * columns * 4) as u64).unwrap();
}

#[test]
fn file_truncated_during_the_run_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let [x, y, out, err] = ["x.npy", "y.npy", "out", "err"].map(|name| folder.path().join(name));
    zeros(&x, 20_000, 64);
    zeros(&y, 20_000, 1);
    let spec = format!("--dataset=npy:{},{}", x.display(), y.display());
    let mut child =
        program(&[&spec, "--max-epochs=1000000", "--nproc-per-node=2", "--batch-size=500"])
            .stdout(File::create(&out).unwrap())
            .stderr(File::create(&err).unwrap())
            .spawn()
            .unwrap();
    let began = Instant::now();
    while !fs::read_to_string(&out).unwrap().contains("Epoch: 1 ") {
        assert!(began.elapsed() < TIMEOUT, "{}", fs::read_to_string(&err).unwrap());
        std::thread::sleep(Duration::from_millis(10));
    }
    OpenOptions::new().write(true).open(&x).unwrap().set_len(4096).unwrap();
    let Some(status) = child.wait_timeout(TIMEOUT).unwrap() else {
        child.kill().unwrap();
        panic!("it went on without its data");
    };
    assert_eq!(status.code(), Some(1), "{status:?}");
    let said = fs::read_to_string(&err).unwrap();
    let expected = "ddp-mp: a data file that is mapped has become shorter or cannot be read: ";
    assert!(said.contains(&format!("{expected}{}\n", x.display())), "{said}");
}

#[test]
fn csv_file_may_be_gzipped_under_any_name() {
    let plain = fs::read(repository("tests/data/plain.csv")).unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(&plain).unwrap();
    let packed = packed.finish().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let read = |bytes: &[u8], name: &str| {
        let file = folder.path().join(name);
        fs::write(&file, bytes).unwrap();
        let spec = format!("csv:{}", file.display()).parse().unwrap();
        let data = FileDataset::open(&spec, TargetKind::Values)?;
        let all: Vec<usize> = (0..data.len()).collect();
        data.batch(&all).map_err(|error| Error::usage(error.to_string()))
    };
    let (inputs, targets) = read(&plain, "plain.csv").unwrap();
    for name in ["packed.csv.gz", "packed.csv"] {
        assert_eq!(read(&packed, name).unwrap(), (inputs.shallow_clone(), targets.shallow_clone()));
    }
    let cut = read(&packed[..packed.len() / 2], "cut.csv").unwrap_err().to_string();
    assert!(cut.contains("cut.csv (gzip): "), "{cut}");
}

const LFS_POINTER: &[u8] =
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n";

/// What people have in the place of a file by mistake, what a message calls it, and what it says to do. `src: files` has
/// the other kinds.
fn mistaken_files() -> [(Vec<u8>, &'static str, &'static str); 3] {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(b"<!DOCTYPE html>\n<html>").unwrap();
    [
        (LFS_POINTER.into(), "a Git LFS pointer", "git lfs pull"),
        (
            [b"PK\x03\x04", &[0; 26][..], b"archive/data.pkl", &[0; 300]].concat(),
            "a file of torch.save",
            "safetensors.torch.save_file|numpy.save|text|TOML|MNIST|write|--record|--trace|checkpoint",
        ),
        (packed.finish().unwrap(), "gzip|an HTML page", "unpack it|download the file itself"),
    ]
}

#[test]
fn files_of_other_kinds_are_named_in_the_place_of_every_format() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::create_dir(at("idx")).unwrap();
    let labels = "idx/train-labels-idx1-ubyte";
    fs::copy(repository("tests/data").join(labels), at(labels)).unwrap();
    let (x, idx) = (at("x"), at("idx/train-images-idx3-ubyte"));
    let uses = [
        (&x, format!("--dataset=csv:{x}")),
        (&x, format!("--dataset=npy:{x},{x}")),
        (&x, format!("--dataset=safetensors:{x}")),
        (&x, format!("--dataset=text:{x} --model=gpt --loss=cross-entropy")),
        (&idx, format!("--dataset=idx:{}", at("idx"))),
        (&x, format!("--config={x}")),
        (&x, format!("--init-from={x}")),
        (&x, format!("diff {x} {x}")),
    ];
    for (bytes, what, remedy) in mistaken_files() {
        for (path, args) in &uses {
            fs::write(path, &bytes).unwrap();
            let error = match args {
                _ if args.starts_with("--dataset") => data_refused(args),
                _ if args.starts_with("--config") => refused(args),
                _ => run_refused(&words(args)),
            };
            let line = error.lines().last().unwrap();
            let has = |any: &str| any.split('|').any(|text| line.contains(text));
            assert!(line.contains(&**path) && has(what) && has(remedy), "{args:?} {what}: {line}");
        }
    }
}

#[test]
fn files_of_a_checkpoint_that_are_git_lfs_pointers_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let dir = format!("--checkpoint-dir={}", folder.path().join("run").display());
    run_to(0, &["--max-epochs=1", "--nproc-per-node=1", &dir]);
    let step = fs::canonicalize(folder.path().join("run/step-00000128")).unwrap();
    let resume = format!("--resume={}", step.display());
    for (name, args) in [
        ("model.safetensors", &[&*resume][..]),
        ("optimizer.safetensors", &["--resume=auto", &dir]),
        ("trainer.json", &[&*resume]),
    ] {
        let before = fs::read(step.join(name)).unwrap();
        fs::write(step.join(name), LFS_POINTER).unwrap();
        let stderr = run_refused(args);
        let line = stderr.lines().last().unwrap();
        assert!(line.contains(name) && line.contains("a Git LFS pointer"), "{line}");
        fs::write(step.join(name), before).unwrap();
    }
}

/// A `.npy` file with this header and 48 numbers of 4 bytes.
fn npy(header: &str) -> Vec<u8> {
    let len = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\0", &len[..], header.as_bytes(), &[0; 192]].concat()
}

#[test]
fn npy_header_of_python_2_is_read_and_other_dtypes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.npy");
    let read = |descr: &str, shape: &str| {
        let header = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n");
        fs::write(&path, npy(&header)).unwrap();
        let spec = format!("npy:{0},{0}", path.display()).parse().unwrap();
        let data =
            FileDataset::open(&spec, TargetKind::Values).map_err(|error| error.to_string())?;
        Ok::<_, String>((data.len(), data.in_features()))
    };
    for (shape, expected) in [("(12L, 4L)", (12, 4)), ("(12L,4L,)", (12, 4)), ("(48L,)", (48, 1))] {
        assert_eq!(read("'<f4'", shape), Ok(expected), "{shape}");
    }
    for (descr, problem) in [
        (
            "[('x', '<f4'), ('y', '<f4')]",
            "an array of the dtype [[\"x\",\"<f4\"],[\"y\",\"<f4\"]] cannot be read",
        ),
        ("[('x', '<f4', (2,)), ]", "cannot be read"),
        ("'|O'", "an array of the dtype \"|O\" cannot be read; save x.astype(\"float32\") or"),
        ("'<U5'", "the dtype \"<U5\" cannot be read"),
        ("'<c8'", "the dtype \"<c8\" cannot be read"),
        ("'<M8[ns]'", "the dtype \"<M8[ns]\" cannot be read"),
        ("'<u4'", "the dtype \"<u4\" cannot be read"),
        ("{'x': 1}", "cannot be read"),
        ("<f4", "the header does not describe an array of numbers: {'descr': <f4, "),
    ] {
        let error = read(descr, "(12, 4)").unwrap_err();
        assert!(error.contains(problem) && !error.contains("line 1 column"), "{error}");
    }
}

#[test]
fn idx_files_are_found_under_kaggle_names_and_where_torchvision_puts_them() {
    let folder = tempfile::tempdir().unwrap();
    let idx = repository("tests/data/idx");
    // Each file under another name, and plain or packed.
    let put = |root: &str, rename: fn(&str) -> String| {
        for from in files_below(&idx) {
            let to =
                folder.path().join(root).join(rename(from.file_name().unwrap().to_str().unwrap()));
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(from, to).unwrap();
        }
    };
    let open = |root: &str| {
        let spec = format!("idx:{}", folder.path().join(root).display()).parse().unwrap();
        let data =
            FileDataset::open(&spec, TargetKind::Classes).map_err(|error| error.to_string())?;
        let validation = FileDataset::open_validation(&spec, TargetKind::Classes).unwrap().unwrap();
        Ok::<_, String>((whole(&data).0, whole(&validation).0))
    };
    put("plain", str::to_owned);
    let expected = open("plain").unwrap();
    let dotted = |name: &str| name.replace("s-idx", "s.idx");
    put("kaggle", dotted);
    put("torchvision/MNIST/raw", str::to_owned);
    // As a browser may unpack it without a new name.
    put("unpacked", |name| format!("{}.gz", name.trim_end_matches(".gz")));
    for root in ["kaggle", "torchvision/MNIST", "unpacked"] {
        assert_eq!(open(root), Ok(expected.clone()), "{root}");
    }
    for (root, problem) in [
        ("torchvision", "there is no train-images-idx3-ubyte here, also not as"),
        ("plain/train-images-idx3-ubyte", "name the folder that has train-images-idx3-ubyte"),
        ("nowhere", "No such file or directory"),
    ] {
        let error = open(root).unwrap_err();
        assert!(error.contains(problem), "{error}");
    }
}
