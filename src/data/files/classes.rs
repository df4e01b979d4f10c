//! The classes in a file: how many there are, and which are invalid.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::ffi::TorchResult;

/// Returns the number of classes. An error if a target is not a class number.
pub(super) fn count_classes(name: &str, targets: &Tensor) -> Result<i64> {
    let highest = f64::from(i32::MAX);
    // NaN differs from its floor, so this finds it as well.
    let is_invalid = |class: &Tensor| {
        let outside = class.f_lt(0.0)?.f_logical_or(&class.f_gt(highest)?)?;
        class.f_ne_tensor(&class.f_floor()?)?.f_logical_or(&outside)
    };
    let doing = "looking at classes";
    if let Some((sample, class)) = find(targets, is_invalid).doing(doing)? {
        return Err(Error::InvalidInput(format!(
            "{name}: the target of sample {sample} is {class}, which is not a class: classes are whole numbers from \
             0; use --loss mse for other numbers"
        )));
    }
    let most = targets.f_max().and_then(|most| most.f_double_value(&[])).doing(doing)?;
    Ok(most as i64 + 1)
}

/// Returns the number and the value of the first target for which `is_like` is true. `None` if there is none.
pub(super) fn find(
    targets: &Tensor,
    is_like: impl Fn(&Tensor) -> Result<Tensor, tch::TchError>,
) -> Result<Option<(i64, f64)>, tch::TchError> {
    /// The number of targets checked at a time. All at once would take several times the memory.
    const PART: i64 = 1 << 20;
    let len = targets.size()[0];
    for start in (0..len).step_by(PART as usize) {
        let part = targets.f_narrow(0, start, PART.min(len - start))?.f_to_kind(Kind::Double)?;
        let found = is_like(&part)?.f_to_kind(Kind::Uint8)?;
        let first = found.f_argmax(0, false)?.f_int64_value(&[])?;
        if found.f_int64_value(&[first])? != 0 {
            return Ok(Some((start + first, part.f_double_value(&[first])?)));
        }
    }
    Ok(None)
}
