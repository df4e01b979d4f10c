//! The check that all ranks have the same model.

use tch::nn::VarStore;

use super::options::DdpOptions;
use crate::error::{Error, Result};
use crate::models::NamedTensor;
use crate::process_group::{ProcessGroup, dtype_name};

/// Returns the tensors in `vs`, after checking that every rank has the same ones and that at least one is trained. A
/// collective.
pub(super) fn same_on_all_ranks(
    vs: &VarStore,
    options: &DdpOptions,
    group: &ProcessGroup,
) -> Result<Vec<NamedTensor>> {
    let mut tensors = NamedTensor::all(vs)?;
    for name in &options.ignore {
        let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.name == *name) else {
            return Err(Error::usage(format!(
                "ignore: the model has no parameter or buffer `{name}`; use a name of its state_dict"
            )));
        };
        tensor.is_ignored = true;
    }
    if trained(&tensors).next().is_none() {
        return Err(Error::usage("the model has no parameters to train".into()));
    }
    // Follows `_verify_param_shape_across_processes`, and compares names as well.
    // The options are compared too, because they determine the collectives.
    let options = format!("{options:?}");
    let compared = tensors.iter().filter(|tensor| !tensor.is_ignored);
    let described = compared.map(describe);
    let mine: Vec<String> = std::iter::once(options.clone()).chain(described).collect();
    let mut theirs = mine.clone();
    group.broadcast_object_list(&mut theirs, 0)?;
    let count = theirs.len().max(mine.len());
    let Some(at) = (0..count).find(|&i| mine.get(i) != theirs.get(i)) else { return Ok(tensors) };
    if at == 0 {
        return Err(Error::ModelMismatch(format!(
            "rank 0 has {}, rank {} has {options}",
            theirs[0],
            group.rank()
        )));
    }
    let side =
        |tensor: Option<&String>| tensor.map_or("nothing".into(), |tensor| format!("({tensor})"));
    Err(Error::ModelMismatch(format!(
        "at tensor {} (of {} on rank 0, {} on rank {}) rank 0 has {}, rank {} has {}",
        at - 1,
        theirs.len() - 1,
        mine.len() - 1,
        group.rank(),
        side(theirs.get(at)),
        group.rank(),
        side(mine.get(at)),
    )))
}

/// Returns the parameters that all ranks train together.
pub(super) fn trained(tensors: &[NamedTensor]) -> impl Iterator<Item = &NamedTensor> {
    tensors.iter().filter(|tensor| tensor.trainable && !tensor.is_ignored)
}

/// Describes the tensor, as in "parameter `weight`, float32 [1, 20]".
fn describe(named: &NamedTensor) -> String {
    let NamedTensor { name, tensor, trainable, is_buffer, .. } = named;
    let what = match (is_buffer, trainable) {
        (true, _) => "buffer",
        (false, true) => "parameter",
        (false, false) => "frozen parameter",
    };
    format!("{what} `{name}`, {} {:?}", dtype_name(tensor.kind()), tensor.size())
}
