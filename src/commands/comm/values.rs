//! The initial numbers of a rank, and tensors as numbers to print.

use std::fmt::{Display, LowerExp};

use serde::{Deserialize, Serialize, Serializer};
use tch::{Device, Kind, TchError, Tensor};

use crate::error::Result;
use crate::ffi::TorchResult;

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
pub(super) enum Value {
    /// The numbers of one tensor.
    Tensor(Numbers),
    /// The numbers of one tensor per rank.
    List(Vec<Numbers>),
}

/// The numbers of a tensor of any dtype that can be reduced.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Numbers {
    Bool(Vec<bool>),
    Integer(Vec<i64>),
    /// Includes dtypes with less precision.
    Single(Vec<f32>),
    Double(Vec<f64>),
}

impl Value {
    /// Returns the numbers of `list`, or of the one tensor if there is no list.
    pub(super) fn of(tensor: &Tensor, list: Option<&[Tensor]>) -> Result<Self> {
        match list {
            Some(list) => list.iter().map(Numbers::of).collect::<Result<_>>().map(Value::List),
            None => Numbers::of(tensor).map(Value::Tensor),
        }
    }
}

impl Numbers {
    fn of(tensor: &Tensor) -> Result<Self> {
        let read = || {
            let tensor = tensor.f_to_device(Device::Cpu)?;
            Ok(match tensor.f_kind()? {
                Kind::Bool => Numbers::Bool(Vec::try_from(tensor)?),
                Kind::Double => Numbers::Double(Vec::try_from(tensor)?),
                Kind::Float | Kind::Half | Kind::BFloat16 => {
                    Numbers::Single(Vec::try_from(tensor)?)
                }
                _ => Numbers::Integer(Vec::try_from(tensor)?),
            })
        };
        read().doing("reading a tensor")
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Numbers::Bool(values) => values.len(),
            Numbers::Integer(values) => values.len(),
            Numbers::Single(values) => values.len(),
            Numbers::Double(values) => values.len(),
        }
    }

    /// Returns the number at `index` as text.
    pub(super) fn text(&self, index: usize) -> String {
        match self {
            Numbers::Bool(values) => values[index].to_string(),
            Numbers::Integer(values) => values[index].to_string(),
            Numbers::Single(values) => float(values[index]),
            Numbers::Double(values) => float(values[index]),
        }
    }
}

/// Returns `value` as text, with an exponent if it would have too many digits.
fn float<T: Copy + Into<f64> + Display + LowerExp>(value: T) -> String {
    let size = value.into().abs();
    if size.is_finite() && size >= 1e16 { format!("{value:e}") } else { value.to_string() }
}

/// Numbers as plain JSON, without the names of the enum variants.
pub(super) struct Plain<'a, T>(pub &'a T);

impl Serialize for Plain<'_, Numbers> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Numbers::Bool(values) => values.serialize(to),
            Numbers::Integer(values) => values.serialize(to),
            Numbers::Single(values) => values.serialize(to),
            Numbers::Double(values) => values.serialize(to),
        }
    }
}

impl Serialize for Plain<'_, Value> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Tensor(numbers) => Plain(numbers).serialize(to),
            Value::List(list) => to.collect_seq(list.iter().map(Plain)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_dtype_are_printed_exactly() {
        let shown = |kind| {
            let tensor = Tensor::from_slice(&[0., 0.1, -3., 1e30]).to_kind(kind);
            let numbers = Numbers::of(&tensor).unwrap();
            let text: Vec<String> = (0..numbers.len()).map(|i| numbers.text(i)).collect();
            (text.join(" "), serde_json::to_string(&Plain(&numbers)).unwrap())
        };
        let told = |text: &str, json: &str| (text.to_string(), json.to_string());
        assert_eq!(shown(Kind::Double), told("0 0.1 -3 1e30", "[0.0,0.1,-3.0,1e+30]"));
        assert_eq!(shown(Kind::Float), told("0 0.1 -3 1e30", "[0.0,0.1,-3.0,1e+30]"));
        assert_eq!(shown(Kind::Half), told("0 0.099975586 -3 inf", "[0.0,0.099975586,-3.0,null]"));
        let bools = "[false,true,true,true]";
        assert_eq!(shown(Kind::Bool), told("false true true true", bools));
    }
}
