//! The initial numbers of a rank, and tensors as numbers to print.

use std::fmt::{Display, LowerExp};

use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::{Device, Kind, TchError, Tensor};

use engine::error::Result;
use engine::ffi::TorchResult;

/// Fills the input of `rank` with (rank + 1) * (i + 1) at index i.
pub(super) fn fill(input: &Tensor, rank: usize) -> Result<()> {
    let fill = || -> Result<(), TchError> {
        // Not `f_arange`: tch panics when a function with scalar arguments fails, here for lack of memory.
        let ones = Tensor::f_ones([input.numel() as i64], (Kind::Int64, Device::Cpu))?;
        let multiples = ones.f_cumsum(0, None)?.f_mul_scalar_(rank as i64 + 1)?;
        input.shallow_clone().f_copy_(&multiples.f_to_kind(input.f_kind()?)?).map(drop)
    };
    fill().doing("filling a tensor")
}

/// The tensors of a rank before or after an operation, in the form that rank 0 receives.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Value {
    /// The numbers of each tensor, as texts.
    pub tensors: Vec<Vec<String>>,
    is_list: bool,
    is_float: bool,
}

impl Value {
    /// Returns the numbers of `list`, or of the one tensor if there is no list.
    pub(super) fn of(tensor: &Tensor, list: Option<&[Tensor]>) -> Result<Self> {
        let tensors = list.unwrap_or(std::slice::from_ref(tensor)).iter();
        let tensors: Result<Vec<_>, _> = tensors.map(texts).collect();
        let (is_list, is_float) = (list.is_some(), tensor.is_floating_point());
        Ok(Self { tensors: tensors.doing("reading a tensor")?, is_list, is_float })
    }

    /// Returns these whole numbers, as those of a tensor.
    pub(super) fn whole(numbers: &[usize]) -> Self {
        let tensors = vec![numbers.iter().map(usize::to_string).collect()];
        Self { tensors, is_list: false, is_float: false }
    }

    /// Returns the numbers of one tensor, or a list with those of one per rank, as JSON.
    pub(super) fn json(&self) -> serde_json::Value {
        let number = |text: &String| match text.parse::<f64>() {
            Ok(number) if self.is_float => json!(number),
            _ => text.parse().unwrap_or_default(),
        };
        let tensor =
            |numbers: &Vec<String>| -> serde_json::Value { numbers.iter().map(number).collect() };
        let mut tensors = self.tensors.iter().map(tensor);
        if self.is_list { tensors.collect() } else { tensors.next().unwrap_or_default() }
    }
}

/// Returns the numbers of a tensor of any dtype that can be reduced.
fn texts(tensor: &Tensor) -> Result<Vec<String>, TchError> {
    fn of<T>(numbers: Vec<T>, text: impl Fn(T) -> String) -> Vec<String> {
        numbers.into_iter().map(text).collect()
    }
    let tensor = tensor.f_to_device(Device::Cpu)?;
    Ok(match tensor.f_kind()? {
        Kind::Bool => of(Vec::<bool>::try_from(tensor)?, |value| value.to_string()),
        Kind::Double => of(Vec::<f64>::try_from(tensor)?, float),
        Kind::Float | Kind::Half | Kind::BFloat16 => of(Vec::<f32>::try_from(tensor)?, float),
        _ => of(Vec::<i64>::try_from(tensor)?, |value| value.to_string()),
    })
}

/// Returns `value` as text, with an exponent if it would have too many digits.
fn float<T: Copy + Into<f64> + Display + LowerExp>(value: T) -> String {
    let size = value.into().abs();
    if size.is_finite() && size >= 1e16 { format!("{value:e}") } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_dtype_are_printed_exactly() {
        let shown = |kind| {
            let tensor = Tensor::from_slice(&[0., 0.1, -3., 1e30]).to_kind(kind);
            let value = Value::of(&tensor, None).unwrap();
            (value.tensors[0].join(" "), value.json().to_string())
        };
        let told = |text: &str, json: &str| (text.to_string(), json.to_string());
        assert_eq!(shown(Kind::Double), told("0 0.1 -3 1e30", "[0.0,0.1,-3.0,1e+30]"));
        assert_eq!(shown(Kind::Float), told("0 0.1 -3 1e30", "[0.0,0.1,-3.0,1e+30]"));
        assert_eq!(shown(Kind::Half), told("0 0.099975586 -3 inf", "[0.0,0.099975586,-3.0,null]"));
        let bools = "[false,true,true,true]";
        assert_eq!(shown(Kind::Bool), told("false true true true", bools));
    }
}
