//! `.safetensors` files.

use safetensors::{Dtype, SafeTensors};
use tch::Kind;

use super::TargetKind;
use super::array::{Array, Layout};
use super::format::Format;
use crate::error::{Error, Result};
use crate::ffi::MappedFile;
use crate::files::{SAFETENSORS, mistaken};

/// A `.safetensors` file with the tensors `inputs` and `targets`.
#[derive(Debug)]
pub(super) struct SafetensorsFile;

impl Format for SafetensorsFile {
    fn usage(&self) -> &'static str {
        "safetensors:FILE"
    }

    fn endings(&self) -> &'static [&'static str] {
        &[".safetensors"]
    }

    /// Maps the file.
    fn read(&self, location: &str, _kind: TargetKind) -> Result<(Array, Array)> {
        let file = MappedFile::open(location.as_ref())?;
        let wrong = |problem: String| Error::data(format!("{}: {problem}", file.name()));
        let write =
            "write it with safetensors.torch.save_file({\"inputs\": x, \"targets\": y}, file)";
        let tensors = SafeTensors::deserialize(&file).map_err(|error| {
            let damaged = || format!("this is not a complete .safetensors file: {error}");
            wrong(mistaken(&file, SAFETENSORS, write).unwrap_or_else(damaged))
        })?;
        let array = |name| {
            let view = tensors.tensor(name).map_err(|_| {
                let mut names = tensors.names();
                names.sort_unstable();
                names.truncate(10);
                wrong(format!("there is no tensor {name:?}, only {names:?}; {write}"))
            })?;
            let dtype = match view.dtype() {
                Dtype::F32 => Kind::Float,
                Dtype::F64 => Kind::Double,
                Dtype::F16 => Kind::Half,
                Dtype::BF16 => Kind::BFloat16,
                Dtype::I8 => Kind::Int8,
                Dtype::I16 => Kind::Int16,
                Dtype::I32 => Kind::Int,
                Dtype::I64 => Kind::Int64,
                Dtype::U8 => Kind::Uint8,
                Dtype::BOOL => Kind::Bool,
                other => {
                    return Err(wrong(format!(
                        "{name} has the dtype {other:?}, which cannot be read; save it as float32 or int64"
                    )));
                }
            };
            let start = view.data().as_ptr() as usize - file.as_ptr() as usize;
            let shape: Vec<u64> = view.shape().iter().map(|&size| size as u64).collect();
            Array::mapped(&file, Layout::native(start, dtype), &shape)
        };
        Ok((array("inputs")?, array("targets")?))
    }
}
