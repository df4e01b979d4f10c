//! A model's tensors by name, and hashes of their values.

use compare::{TensorFingerprint, fingerprint, part_of_step};
use tch::nn::VarStore;
use tch::{Device, Tensor};
use xxhash_rust::xxh3::Xxh3Default;

use crate::error::{Error, Result};
use crate::ffi::{TorchResult, with_bytes};
use crate::process_group::dtype_name;

/// A parameter, or a buffer that is not trained.
#[derive(Debug)]
pub(crate) struct NamedTensor {
    pub name: String,
    pub tensor: Tensor,
    pub trainable: bool,
    /// Whether this is a buffer, which forward may change, and not a parameter.
    pub is_buffer: bool,
    /// Whether each rank keeps its own values: `DdpOptions::ignore`.
    pub is_ignored: bool,
}

impl NamedTensor {
    /// Returns parameters in creation order, then buffers in name order, which is the same on all ranks. (A `VarStore`
    /// lists names in no defined order, and parameters without names.)
    pub(crate) fn all(vs: &VarStore) -> Result<Vec<Self>> {
        #[allow(clippy::disallowed_methods)] // the order is not used
        let mut named: Vec<(String, Tensor)> = vs.variables().into_iter().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        let mut tensors = Vec::with_capacity(named.len());
        for tensor in vs.trainable_variables() {
            // Both are the same C++ tensor: they share memory, or both are empty and interchangeable.
            let same = |(_, other): &(String, Tensor)| {
                other.data_ptr() == tensor.data_ptr() && other.size() == tensor.size()
            };
            let Some(at) = named.iter().position(same) else {
                return Err(Error::usage("the VarStore has a parameter without a name".into()));
            };
            let name = named.remove(at).0;
            // A frozen parameter keeps its value, which is rank 0's on all ranks, like a buffer.
            let trainable = tensor.requires_grad();
            tensors.push(Self { name, tensor, trainable, is_buffer: false, is_ignored: false });
        }
        for (i, one) in tensors.iter().enumerate() {
            let same = |other: &&NamedTensor| {
                other.tensor.data_ptr() == one.tensor.data_ptr() && one.tensor.numel() > 0
            };
            if let Some(other) = tensors[..i].iter().find(same) {
                return Err(Error::usage(format!(
                    "`{}` and `{}` are one parameter; give it to the VarStore once",
                    other.name, one.name
                )));
            }
        }
        for (name, tensor) in named {
            let (trainable, is_buffer, is_ignored) = (false, true, false);
            tensors.push(Self { name, tensor, trainable, is_buffer, is_ignored });
        }
        Ok(tensors)
    }
}

/// Returns all tensors of `vs` by name, as views. They are those of PyTorch's `state_dict`, in the same order on all ranks.
///
/// # Errors
/// [`Error::Input`] when a parameter has no name, or has two.
pub fn state_dict(vs: &VarStore) -> Result<Vec<(String, Tensor)>> {
    Ok(by_name(&NamedTensor::all(vs)?))
}

pub(crate) fn by_name<'a>(
    tensors: impl IntoIterator<Item = &'a NamedTensor>,
) -> Vec<(String, Tensor)> {
    let by_name = |named: &NamedTensor| (named.name.clone(), named.tensor.shallow_clone());
    tensors.into_iter().map(by_name).collect()
}

/// Returns a 64-bit hash of the names, shapes and values of all tensors in `vs`. Equal models have equal hashes on any
/// device.
///
/// # Errors
/// [`Error::Torch`] when a tensor cannot be read.
pub fn parameters_hash(vs: &VarStore) -> Result<u64> {
    hash(&NamedTensor::all(vs)?)
}

pub(crate) fn hash(tensors: &[NamedTensor]) -> Result<u64> {
    let mut in_order: Vec<&NamedTensor> = tensors.iter().collect();
    in_order.sort_by(|a, b| a.name.cmp(&b.name));
    let mut hasher = Xxh3Default::new();
    for NamedTensor { name, tensor, .. } in in_order {
        // Lengths are included, so that different lists of tensors never give the same bytes.
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        let shape = tensor.size();
        hasher.update(dtype_name(tensor.kind()).as_bytes());
        hasher.update(&(shape.len() as u64).to_le_bytes());
        shape.iter().for_each(|n| hasher.update(&n.to_le_bytes()));
        read_bytes(tensor, |bytes| hasher.update(bytes))?;
    }
    Ok(hasher.digest())
}

/// Returns a 64-bit hash of the values of `tensor`: XXH3 of their bytes in row-major order.
pub(crate) fn tensor_hash(tensor: &Tensor) -> Result<u64> {
    let mut hasher = Xxh3Default::new();
    read_bytes(tensor, |bytes| hasher.update(bytes))?;
    Ok(hasher.digest())
}

/// Returns the fingerprint of `tensor`: with a step, of the part that is due in it.
pub(crate) fn tensor_fingerprint(tensor: &Tensor, step: Option<u64>) -> Result<TensorFingerprint> {
    let dtype = dtype_name(tensor.kind());
    let whole = |tensor: &Tensor| -> Result<TensorFingerprint> {
        let made = read_bytes(tensor, |bytes| Some(fingerprint(bytes, dtype)))?;
        Ok(made.unwrap_or_else(|| fingerprint(&[], dtype)))
    };
    let part = step.and_then(|step| part_of_step(tensor.numel(), step));
    let Some((index, first, len)) = part else { return whole(tensor) };
    let flat = tensor.f_detach().and_then(|tensor| tensor.f_reshape([-1]));
    let part = flat.and_then(|flat| flat.f_narrow(0, first as i64, len as i64));
    Ok(TensorFingerprint { part: Some(index), ..whole(&part.doing("reading a part")?)? })
}

/// Returns the bytes of `tensor`, of any dtype and on any device.
#[doc(hidden)]
pub fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    read_bytes(tensor, <[u8]>::to_vec)
}

/// Calls `read` with the bytes of `tensor`, of any dtype and on any device, in row-major order. Copies the tensor if it cannot
/// be read where it is.
fn read_bytes<T: Default>(tensor: &Tensor, mut read: impl FnMut(&[u8]) -> T) -> Result<T> {
    if let Some(found) = with_bytes(tensor, &mut read)? {
        return Ok(found);
    }
    let copy = || {
        let local = tensor.f_detach()?.f_to_device(Device::Cpu)?;
        local.f_resolve_conj()?.f_resolve_neg()?.f_contiguous()
    };
    // A tensor without numbers has no memory.
    Ok(with_bytes(&copy().doing("reading the parameters")?, read)?.unwrap_or_default())
}
