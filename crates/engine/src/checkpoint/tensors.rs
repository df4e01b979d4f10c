//! Reads and writes tensors in safetensors files.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tch::nn::VarStore;
use tch::{Kind, TchError, Tensor};

use super::CheckpointDir;
use super::layout::{MODEL, pointed};
use super::state::FileMark;
use crate::error::{Error, Result, Shown, first_of};
use crate::ffi::{MappedFile, TorchResult};
use crate::files::{SAFETENSORS, WholeFile, mistaken};
use crate::models::{bytes_of, state_dict};
use crate::os::limits::unwritable;
use crate::process_group::{SAFETENSORS_DTYPES, dtype_name};

/// A copy of a tensor in memory. Any thread may write it to a file.
#[derive(Debug)]
pub(super) struct Copied {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Returns copies of `tensors` by name. Each tensor is dropped as soon as it is copied.
pub(super) fn copies(
    tensors: impl IntoIterator<Item = (String, Tensor)>,
) -> Result<BTreeMap<String, Copied>> {
    let copy = |(name, tensor): (String, Tensor)| {
        let kind = tensor.kind();
        let (_, dtype) =
            SAFETENSORS_DTYPES.into_iter().find(|(known, _)| *known == kind).ok_or_else(|| {
                let problem = "a dtype that safetensors files cannot hold";
                Error::unsupported(format!("`{name}` is {}, {problem}", dtype_name(kind)))
            })?;
        let shape = tensor.size().into_iter().map(|n| n as usize).collect();
        Ok((name, Copied { dtype, shape, bytes: bytes_of(&tensor)? }))
    };
    tensors.into_iter().map(copy).collect()
}

/// Returns the contents of a safetensors file with `tensors`.
pub(super) fn serialize(tensors: &BTreeMap<String, Copied>) -> Result<Vec<u8>> {
    // Libraries on top of PyTorch check this metadata.
    let metadata = HashMap::from([("format".into(), "pt".into())]);
    let views = tensors.iter().map(|(name, Copied { dtype, shape, bytes })| {
        TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name, view))
    });
    let views = views.collect::<Result<Vec<_>, _>>();
    views
        .and_then(|views| safetensors::serialize(views, Some(metadata)))
        .map_err(|error| Error::Save { doing: "writing tensors".into(), reason: error.to_string() })
}

/// Writes `tensors` to a new safetensors file at `path`, which appears whole or not at all.
///
/// # Errors
/// [`Error::Write`] if the file exists or cannot be written.
pub(crate) fn write_tensors(path: &Path, tensors: BTreeMap<String, Tensor>) -> Result<()> {
    let bytes = serialize(&copies(tensors)?)?;
    let write = || {
        let whole = WholeFile::begin(path)?;
        whole.file().write_all(&bytes)?;
        whole.appear()
    };
    write().map_err(|error| unwritable(path.shown().into_owned(), &error))
}

/// Returns the file of the model that `path` names: the path itself, or the file within a checkpoint's folder, a run's folder
/// (the newest checkpoint), or the checkpoint of a file `latest` or `best`.
///
/// # Errors
/// [`Error::Input`] if a folder cannot be read.
pub fn model_file(path: &Path) -> Result<PathBuf> {
    let folder = match pointed(path) {
        Ok(Some(folder)) => folder,
        _ if path.is_dir() => CheckpointDir::newest_in(path)?.unwrap_or(path.into()),
        _ => return Ok(path.into()),
    };
    Ok(folder.join(MODEL))
}

/// A valid safetensors file in memory, saved by this crate or by PyTorch.
#[derive(Debug)]
pub struct TensorFile {
    pub(super) path: PathBuf,
    pub(super) bytes: Vec<u8>,
}

impl TensorFile {
    /// Reads the file at `path`, or the model of the checkpoint there. `path` is a safetensors file, a checkpoint's
    /// folder, a run's folder (reads the newest checkpoint), or a file `latest` or `best`.
    ///
    /// # Errors
    /// [`Error::Input`] if the file cannot be read or is not a safetensors file.
    pub fn read(path: &Path) -> Result<Self> {
        Self::open(model_file(path)?, None)
    }

    /// Reads the file at `path`, which must be as `known` says.
    pub(super) fn open(path: PathBuf, known: Option<&FileMark>) -> Result<Self> {
        // Mapped first: a file of another length, or that does not match its header, is rejected without reading all of it.
        let file = MappedFile::open(&path)?;
        if let Some(known) = known {
            known.check(&path, &file)?;
        }
        SafeTensors::deserialize(&file).map_err(|error| {
            let save =
                "save the weights with safetensors.torch.save_file(model.state_dict(), FILE)";
            let path = path.shown();
            Error::mismatch(match mistaken(&file, SAFETENSORS, save) {
                Some(problem) => format!("{path}: {problem}"),
                None => format!("{path} is not a safetensors file: {error}"),
            })
        })?;
        let mut bytes = Vec::new();
        let reserved = bytes.try_reserve_exact(file.len());
        reserved.map_err(|error| Error::data(format!("{}: {error}", path.shown())))?;
        bytes.extend_from_slice(&file);
        Ok(Self { path, bytes })
    }

    /// Returns copies of the tensors by name, on the CPU.
    ///
    /// # Errors
    /// [`Error::Input`] for dtypes that libtorch does not have.
    pub fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let wrong = |problem: String| Error::data(format!("{}: {problem}", self.path.shown()));
        let parsed = SafeTensors::deserialize(&self.bytes).map_err(|e| wrong(e.to_string()))?;
        let tensor = |(name, view): (&str, TensorView<'_>)| {
            let dtype = view.dtype();
            let (kind, _) =
                SAFETENSORS_DTYPES.into_iter().find(|(_, known)| *known == dtype).ok_or_else(
                    || wrong(format!("`{name}` is {dtype:?}, a dtype that cannot be read here")),
                )?;
            let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
            // The length is right: the file was checked.
            let tensor = Tensor::f_from_data_size(view.data(), &shape, kind);
            Ok((name.into(), tensor.doing("making a tensor")?))
        };
        parsed.iter().map(tensor).collect()
    }

    /// Copies the tensors into those of `vs`. Follows `load_state_dict(strict=True)`: the names and shapes must be
    /// exactly the model's. Of tied tensors one name is enough, as `safetensors.torch.load_model` has it.
    ///
    /// # Errors
    /// [`Error::Input`] that names the missing, unexpected, or wrongly shaped tensors, and those with values that are
    /// not finite. `vs` has not changed then.
    pub fn load_into(&self, vs: &VarStore) -> Result<()> {
        let (saved, wanted) = (self.tensors()?, state_dict(vs)?);
        // The names of tied tensors that `safetensors.torch.save_model` has left out, each with the name that it has kept.
        let metadata = SafeTensors::read_metadata(&self.bytes).ok();
        let tied = metadata.and_then(|(_, it)| it.metadata().clone()).unwrap_or_default();
        let mut unused: BTreeSet<&String> = saved.keys().collect();
        let (mut problems, mut copies) = (BTreeMap::<&str, Vec<String>>::new(), Vec::new());
        for (name, to) in &wanted {
            let kept = tied.get(name).filter(|_| !saved.contains_key(name)).unwrap_or(name);
            unused.remove(kept);
            let (problem, place) = match saved.get(kept) {
                None => ("missing", format!("`{name}`")),
                Some(from) if from.size() != to.size() => {
                    let (was, is) = (from.size(), to.size());
                    let sizes = format!("{was:?} in the file, {is:?} in the model");
                    ("of another shape", format!("`{name}` ({sizes})"))
                }
                Some(from) => match not_finite(from, to).doing("checking the model")? {
                    0 => {
                        copies.push((to.shallow_clone(), from));
                        continue;
                    }
                    count => (DIVERGED, format!("`{name}` ({count} of {} numbers)", from.numel())),
                },
            };
            problems.entry(problem).or_default().push(place);
        }
        for name in unused {
            problems.entry("unexpected").or_default().push(format!("`{name}`"));
        }
        if !problems.is_empty() {
            let all =
                problems.iter().map(|(what, names)| format!("{what}: {}", first_of(names, 6)));
            let (path, all) = (self.path.shown(), all.collect::<Vec<_>>().join("; "));
            let hint = added_to_names(&saved, &wanted).unwrap_or_default();
            return Err(Error::mismatch(format!("{path} does not fit the model; {all}{hint}")));
        }
        tch::no_grad(|| copies.into_iter().try_for_each(|(mut to, from)| to.f_copy_(from)))
            .doing("loading the model")
    }
}

/// The parts of names that wrappers of a model add: DDP, `torch.compile`, FSDP, activation checkpointing, Fabric.
const WRAPPERS: [&str; 5] = [
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_forward_module.",
];

/// Says what a wrapper has added to the names in a file, if the rest has all names of the model.
fn added_to_names(saved: &BTreeMap<String, Tensor>, wanted: &[(String, Tensor)]) -> Option<String> {
    let (mut added, mut names) = (BTreeSet::new(), BTreeSet::new());
    for name in saved.keys() {
        let mut name = format!(".{name}");
        for part in WRAPPERS {
            let inner = format!(".{part}");
            if name.contains(&inner) {
                name = name.replace(&inner, ".");
                added.insert(part.to_owned());
            }
        }
        names.insert(name.split_off(1));
    }
    let (first, _) = wanted.first()?;
    let mut outer = names.iter().filter_map(|name| name.strip_suffix(first.as_str()));
    let is_before_all =
        |outer: &&str| wanted.iter().all(|(name, _)| names.contains(&format!("{outer}{name}")));
    let outer = outer.find(is_before_all)?.to_owned();
    added.extend(Some(outer).filter(|outer| !outer.is_empty()));
    let added: Vec<String> = added.iter().map(|part| format!("`{part}`")).collect();
    let added = Some(added.join(" and ")).filter(|added| !added.is_empty())?;
    Some(format!(
        "; a wrapper has added {added} to the names: save the state_dict of the model within it"
    ))
}

/// What is wrong with tensors that are not finite, for a message.
const DIVERGED: &str = "NaN or infinite (use weights from before training diverged)";

/// Returns how many numbers of `from` cannot be trained on in the place of `to`, in its dtype: NaN, and in parameters also
/// infinity. A buffer may be a mask of infinities.
fn not_finite(from: &Tensor, to: &Tensor) -> Result<i64, TchError> {
    let cast = from.f_to_kind(to.kind())?;
    let wrong =
        if to.requires_grad() { cast.f_isfinite()?.f_logical_not()? } else { cast.f_isnan()? };
    wrong.f_sum(Kind::Int64)?.f_int64_value(&[])
}
