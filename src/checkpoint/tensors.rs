//! Reads and writes tensors in safetensors files.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors, View};
use tch::nn::VarStore;
use tch::{Kind, TchError, Tensor};

use super::layout::{MODEL, newest_in, pointed};
use crate::error::{Error, Result, Shown};
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

impl Copied {
    pub(super) fn of(name: &str, tensor: &Tensor) -> Result<Self> {
        let Some((_, dtype)) =
            SAFETENSORS_DTYPES.into_iter().find(|(kind, _)| *kind == tensor.kind())
        else {
            return Err(Error::unsupported(format!(
                "`{name}` is {}, a dtype that safetensors files cannot hold",
                dtype_name(tensor.kind())
            )));
        };
        let shape = tensor.size().into_iter().map(|n| n as usize).collect();
        Ok(Self { dtype, shape, bytes: bytes_of(tensor)? })
    }
}

impl View for &Copied {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Returns the contents of a safetensors file with `tensors`.
pub(super) fn serialize(tensors: &BTreeMap<String, Copied>) -> Result<Vec<u8>> {
    // Libraries on top of PyTorch check this metadata.
    let metadata = HashMap::from([("format".into(), "pt".into())]);
    safetensors::serialize(tensors, Some(metadata))
        .map_err(|error| Error::Save { doing: "writing tensors".into(), reason: error.to_string() })
}

/// Writes `tensors` to a new safetensors file at `path`, which appears whole or not at all.
///
/// # Errors
/// [`Error::Write`] if the file exists or cannot be written.
pub(crate) fn write_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let copied = tensors.iter().map(|(name, tensor)| Ok((name.clone(), Copied::of(name, tensor)?)));
    let bytes = serialize(&copied.collect::<Result<_>>()?)?;
    let refused = |error| unwritable(path.shown().into_owned(), &error);
    let write = || {
        let whole = WholeFile::begin(path)?;
        whole.file().write_all(&bytes)?;
        whole.appear()
    };
    write().map_err(refused)
}

/// A valid safetensors file in memory, saved by this crate or by PyTorch.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl TensorFile {
    /// Reads the file at `path`, or the model of the checkpoint there. `path` is a safetensors file, a checkpoint's
    /// folder, a run's folder (reads the newest checkpoint), or a file `latest` or `best`.
    ///
    /// # Errors
    /// [`Error::Input`] if the file cannot be read or is not a safetensors file.
    pub fn read(path: &Path) -> Result<Self> {
        let checkpoint = match pointed(path) {
            None if path.is_dir() => Some(newest_in(path)?.unwrap_or_else(|| path.into())),
            pointed => pointed,
        };
        let path = checkpoint.map_or_else(|| path.into(), |folder| folder.join(MODEL));
        // Mapped first: a file that does not match its header is rejected without reading all of it.
        let file = MappedFile::open(&path)?;
        check(&path, &file)?;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(file.len())
            .map_err(|error| Error::data(format!("{}: {error}", path.shown())))?;
        bytes.extend_from_slice(&file);
        Ok(Self { path, bytes })
    }

    pub(super) fn new(path: PathBuf, bytes: Vec<u8>) -> Result<Self> {
        check(&path, &bytes)?;
        Ok(Self { path, bytes })
    }

    /// Returns the bytes of the file.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns copies of the tensors by name, on the CPU.
    ///
    /// # Errors
    /// [`Error::Input`] for dtypes that libtorch does not have.
    pub fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let wrong = |problem: String| Error::data(format!("{}: {problem}", self.path.shown()));
        let parsed = SafeTensors::deserialize(&self.bytes).map_err(|e| wrong(e.to_string()))?;
        let tensor = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
            let known = SAFETENSORS_DTYPES.into_iter().find(|(_, dtype)| *dtype == view.dtype());
            let (kind, _) = known.ok_or_else(|| {
                wrong(format!("`{name}` is {:?}, a dtype that cannot be read here", view.dtype()))
            })?;
            let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
            // The length is right: the file was checked.
            let tensor = Tensor::f_from_data_size(view.data(), &shape, kind);
            Ok((name.into(), tensor.doing("making a tensor")?))
        };
        parsed.iter().map(tensor).collect()
    }

    /// Returns the names of tied tensors that `safetensors.torch.save_model` has left out, each with the name that it has
    /// kept, from the metadata.
    fn tied_names(&self) -> BTreeMap<String, String> {
        let metadata = SafeTensors::read_metadata(&self.bytes); // was checked
        let metadata = metadata.ok().and_then(|(_, metadata)| metadata.metadata().clone());
        metadata.unwrap_or_default().into_iter().collect()
    }

    /// Copies the tensors into those of `vs`. Follows `load_state_dict(strict=True)`: the names and shapes must be
    /// exactly the model's. Of tied tensors one name is enough, as `safetensors.torch.load_model` has it.
    ///
    /// # Errors
    /// [`Error::Input`] that names the missing, unexpected, or wrongly shaped tensors, or one with values that are
    /// not finite. `vs` has not changed then.
    pub fn load_into(&self, vs: &VarStore) -> Result<()> {
        let mut saved = self.tensors()?;
        let wanted = state_dict(vs)?;
        let names: BTreeSet<&String> = wanted.iter().map(|(name, _)| name).collect();
        let mut unused = Vec::new();
        for (left_out, kept) in self.tied_names() {
            if names.contains(&left_out)
                && !saved.contains_key(&left_out)
                && let Some(tensor) = saved.get(&kept).map(Tensor::shallow_clone)
            {
                saved.insert(left_out, tensor);
                unused.push(kept);
            }
        }
        saved.retain(|name, _| names.contains(name) || !unused.contains(name));
        let refused =
            |problem: String| Err(Error::mismatch(format!("{} {problem}", self.path.shown())));
        if let Some(problem) = other_names(&saved, &names) {
            return refused(format!("does not fit the model: {problem}"));
        }
        let (mut missing, mut reshaped, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        for (name, tensor) in wanted {
            match saved.remove(&name) {
                None => missing.push(format!("`{name}`")),
                Some(from) if from.size() != tensor.size() => reshaped.push(format!(
                    "`{name}` ({:?} in the file, {:?} in the model)",
                    from.size(),
                    tensor.size()
                )),
                Some(from) => copies.push((name, tensor, from)),
            }
        }
        let unexpected: Vec<String> = saved.keys().map(|name| format!("`{name}`")).collect();
        let problems =
            [("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped)];
        let problems: Vec<String> = problems
            .into_iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(what, names)| format!("{what}: {}", some_of(&names)))
            .collect();
        if !problems.is_empty() {
            return refused(format!("does not fit the model; {}", problems.join("; ")));
        }
        for (name, tensor, from) in &copies {
            let count = not_finite(from, tensor).doing("checking the model")?;
            if count > 0 {
                let of = from.numel();
                return refused(format!(
                    "cannot be loaded: {count} of the {of} numbers of `{name}` are NaN or infinite in the model; use \
                     weights from before training diverged"
                ));
            }
        }
        tch::no_grad(|| copies.into_iter().try_for_each(|(_, mut to, from)| to.f_copy_(&from)))
            .doing("loading the model")
    }
}

/// Returns how many numbers of `from` cannot be trained on in the place of `to`, in its dtype: NaN, and in parameters also
/// infinity. A buffer may be a mask of infinities.
fn not_finite(from: &Tensor, to: &Tensor) -> Result<i64, TchError> {
    let cast = from.f_to_kind(to.kind())?;
    let wrong =
        if to.requires_grad() { cast.f_isfinite()?.f_logical_not()? } else { cast.f_isnan()? };
    wrong.f_sum(Kind::Int64)?.f_int64_value(&[])
}

/// The parts of names that the wrappers of a model add.
const WRAPPERS: [(&str, &str); 5] = [
    ("module.", "DistributedDataParallel or DataParallel"),
    ("_orig_mod.", "torch.compile"),
    ("_fsdp_wrapped_module.", "FullyShardedDataParallel"),
    ("_checkpoint_wrapped_module.", "activation checkpointing"),
    ("_forward_module.", "Lightning Fabric"),
];

/// Explains how the names in a file differ from those of the model, if added parts explain it for all of the model's.
fn other_names(saved: &BTreeMap<String, Tensor>, wanted: &BTreeSet<&String>) -> Option<String> {
    let fits = |names: &BTreeSet<String>, prefix: &str| {
        wanted.iter().all(|name| names.contains(&format!("{prefix}{name}")))
    };
    let mut names: BTreeSet<String> = saved.keys().cloned().collect();
    let shortest = wanted.iter().min_by_key(|name| name.len())?;
    if fits(&names, "") {
        return None;
    }
    let (mut added, mut removed) = (Vec::new(), String::new());
    for (part, who) in WRAPPERS {
        let inner = format!(".{part}");
        let without = |name: &String| format!(".{name}").replace(&inner, ".")[1..].to_owned();
        let stripped: BTreeSet<String> = names.iter().map(without).collect();
        if stripped != names && wanted.iter().all(|name| without(name) == **name) {
            let is_first = names.iter().all(|name| name.starts_with(part));
            removed += &if is_first {
                format!(".removeprefix({part:?})")
            } else {
                format!(".replace({part:?}, \"\")")
            };
            added.push(format!("`{part}`, which {who} adds"));
            names = stripped;
        }
    }
    let mut before = names.iter().filter_map(|name| name.strip_suffix(shortest.as_str()));
    let is_before_all = |prefix: &&str| {
        let is_outer = prefix.ends_with('.') && names.iter().all(|name| name.starts_with(*prefix));
        (prefix.is_empty() || is_outer) && fits(&names, prefix)
    };
    if let Some(prefix) = before.find(is_before_all) {
        if !prefix.is_empty() {
            removed += &format!(".removeprefix({prefix:?})");
            added.push(format!("`{prefix}`, which a module around the model adds"));
        }
        return Some(format!(
            "its names have {}; save it again with \
             {{name{removed}: tensor for name, tensor in model.state_dict().items()}}",
            added.join(", and ")
        ));
    }
    let is_there = |prefix: &str, name: &String| {
        name.strip_prefix(prefix).is_some_and(|name| names.contains(name))
    };
    let mut before = names.iter().filter_map(|name| shortest.strip_suffix(name.as_str()));
    let prefix = before
        .find(|prefix| prefix.ends_with('.') && wanted.iter().all(|name| is_there(prefix, name)))?;
    Some(format!(
        "the model's names begin with `{prefix}`, and those of the file do not; save it again with \
         {{{prefix:?} + name: tensor for name, tensor in model.state_dict().items()}}"
    ))
}

/// Checks that `bytes` are a complete safetensors file.
fn check(path: &Path, bytes: &[u8]) -> Result<()> {
    let instead = "save the weights with safetensors.torch.save_file(model.state_dict(), FILE)";
    SafeTensors::deserialize(bytes).map(drop).map_err(|error| {
        let path = path.shown();
        Error::mismatch(match mistaken(bytes, SAFETENSORS, instead) {
            Some(problem) => format!("{path}: {problem}"),
            None => format!("{path} is not a safetensors file: {error}"),
        })
    })
}

/// Lists the first names, for a message.
fn some_of(names: &[String]) -> String {
    const MAX_LISTED_NAMES: usize = 6;
    let shown = names[..names.len().min(MAX_LISTED_NAMES)].join(", ");
    match names.len().checked_sub(MAX_LISTED_NAMES) {
        Some(more @ 1..) => format!("{shown} and {more} more"),
        _ => shown,
    }
}
