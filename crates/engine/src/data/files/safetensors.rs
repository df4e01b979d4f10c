//! `.safetensors` files.

use safetensors::SafeTensors;

use super::TargetKind;
use super::array::Array;
use super::format::Format;
use crate::error::{Error, Result};
use crate::ffi::MappedFile;
use crate::files::{self, mistaken};
use crate::process_group::SAFETENSORS_DTYPES;

/// A `.safetensors` file with the tensors `inputs` and `targets`.
pub(super) const SAFETENSORS: Format =
    Format { endings: &[".safetensors"], ..Format::new("safetensors:FILE", read) };

/// Maps the file.
fn read(location: &str, _kind: TargetKind) -> Result<(Array, Array)> {
    let file = MappedFile::open(location.as_ref())?;
    let wrong = |problem: String| Error::data(format!("{}: {problem}", file.name()));
    let write = "write it with safetensors.torch.save_file({\"inputs\": x, \"targets\": y}, file)";
    let tensors = SafeTensors::deserialize(&file).map_err(|error| {
        let damaged = || format!("this is not a complete .safetensors file: {error}");
        wrong(mistaken(&file, files::SAFETENSORS, write).unwrap_or_else(damaged))
    })?;
    let array = |name| {
        let view = tensors.tensor(name).map_err(|_| {
            let mut names = tensors.names();
            names.sort_unstable();
            names.truncate(10);
            wrong(format!("there is no tensor {name:?}, only {names:?}; {write}"))
        })?;
        let known = SAFETENSORS_DTYPES.into_iter().find(|(_, dtype)| *dtype == view.dtype());
        let (dtype, _) = known.ok_or_else(|| {
            let other = view.dtype();
            wrong(format!(
                "{name} has the dtype {other:?}, which cannot be read; save it as float32 or int64"
            ))
        })?;
        let start = view.data().as_ptr() as usize - file.as_ptr() as usize;
        let shape: Vec<u64> = view.shape().iter().map(|&size| size as u64).collect();
        Array::mapped(&file, start, dtype, &shape)
    };
    Ok((array("inputs")?, array("targets")?))
}
