//! Compares two files of tensors: which differ first, where, and by how much.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use tch::{Kind, Tensor};

use super::compare::SidesOf;
use crate::checkpoint::TensorFile;
use crate::ddp::bytes_of;
use crate::error::{Error, Result, Shown};
use crate::ffi::TorchResult;
use crate::files::open_regular;
use crate::telemetry::{indices, table};

/// The groups of tensors in the files of `--keep`, in the order of computation.
const ORDER: [&str; 8] =
    ["before.", "batch.", "output.", "loss.", "gradient.", "average.", "parameter.", "buffer."];

/// The most tensors that are shown with values.
const MAX_ROWS: usize = 8;

/// What the comparison of two files of tensors found.
#[derive(Debug)]
pub(in crate::commands) struct TensorComparison {
    equal: usize,
    /// The tensors that differ in the first group that has any.
    first: Vec<Difference>,
    /// The number of tensors that differ in later groups.
    later: usize,
    /// The names that only one file has.
    only_in: SidesOf<Vec<String>>,
}

/// How a tensor differs.
#[derive(Debug)]
struct Difference {
    name: String,
    shape: Vec<i64>,
    numel: usize,
    /// The number of values that differ.
    count: usize,
    /// Flat index of the value that differs most.
    index: usize,
    a: f64,
    b: f64,
    /// The number of float32 values from one to the other. `None` for other dtypes.
    ulps: Option<u64>,
}

/// Returns whether `path` is a folder, which may be a checkpoint, or begins as a safetensors file does.
pub(super) fn holds_tensors(path: &Path) -> bool {
    // Eight bytes of length, and JSON.
    let mut begins = [0; 9];
    let read = open_regular(path).and_then(|mut file| file.read_exact(&mut begins));
    path.is_dir() || (read.is_ok() && begins[8] == b'{')
}

impl TensorComparison {
    /// Compares the files `a` and `b`, each a safetensors file or a checkpoint.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if one cannot be read, if they have no name in common, or if tensors of a name have
    /// different dtypes or shapes.
    pub(in crate::commands) fn of(a: &Path, b: &Path) -> Result<Self> {
        let of_a = TensorFile::read(a)?.tensors()?;
        let of_b = TensorFile::read(b)?.tensors()?;
        let mut common: Vec<&String> =
            of_a.keys().filter(|name| of_b.contains_key(*name)).collect();
        if common.is_empty() {
            return Err(Error::InvalidInput(format!(
                "{} and {} have no name of a tensor in common; both must name their tensors alike",
                a.shown(),
                b.shown()
            )));
        }
        common.sort_by_key(|name| group(name));
        let mut differ = Vec::new();
        for name in &common {
            let (a, b) = (&of_a[*name], &of_b[*name]);
            if a.kind() != b.kind() || a.size() != b.size() {
                return Err(Error::InvalidInput(format!(
                    "`{name}` has another dtype or shape in the two files: {:?} {:?} and {:?} {:?}",
                    a.kind(),
                    a.size(),
                    b.kind(),
                    b.size()
                )));
            }
            if bytes_of(a)? != bytes_of(b)? {
                differ.push(*name);
            }
        }
        let is_first = |name: &&&String| group(name) == group(differ[0]);
        let first: Vec<&String> = differ.iter().filter(is_first).copied().collect();
        Ok(Self {
            equal: common.len() - differ.len(),
            later: differ.len() - first.len(),
            only_in: SidesOf { a: only_in(&of_a, &of_b), b: only_in(&of_b, &of_a) },
            first: first
                .into_iter()
                .map(|name| Difference::of(name, &of_a[name], &of_b[name]))
                .collect::<Result<_>>()?,
        })
    }

    /// Returns whether no tensor differs that both files have.
    pub(in crate::commands) fn is_equal(&self) -> bool {
        self.first.is_empty()
    }

    /// Describes the differences. `sides` are the names of the two files.
    pub(in crate::commands) fn lines(&self, sides: SidesOf<&str>) -> Vec<String> {
        let mut lines = Vec::new();
        for (side, names) in [(sides.a, &self.only_in.a), (sides.b, &self.only_in.b)] {
            if let Some((first, others)) = names.split_first() {
                let others = if others.is_empty() { "" } else { " and others" };
                lines.push(format!("Only {side} has `{first}`{others}."));
            }
        }
        if self.equal > 0 {
            let s = if self.equal == 1 { "" } else { "s" };
            lines.push(format!("Equal: {} tensor{s}.", self.equal));
        }
        if self.is_equal() {
            return lines;
        }
        lines.push("The first tensors that differ, each at its largest difference:".into());
        let titles = ["", "values", "at", sides.a, sides.b, "difference", "ULPs"];
        let rows = self.first.iter().take(MAX_ROWS).map(Difference::cells);
        let rows: Vec<_> = [titles.map(str::to_owned).to_vec()].into_iter().chain(rows).collect();
        lines.extend(table(&rows));
        if let Some(more @ 1..) = self.first.len().checked_sub(MAX_ROWS) {
            lines.push(format!("  ... and {more} more"));
        }
        if self.later > 0 {
            let s = if self.later == 1 { "s" } else { "" };
            lines.push(format!("Of what is computed later, {} differ{s}.", self.later));
        }
        lines
    }
}

/// Returns the place of a tensor's group in the order of computation. `None`, which comes first, for other names.
fn group(name: &str) -> Option<usize> {
    ORDER.iter().position(|prefix| name.starts_with(prefix))
}

fn only_in(of: &BTreeMap<String, Tensor>, other: &BTreeMap<String, Tensor>) -> Vec<String> {
    of.keys().filter(|name| !other.contains_key(*name)).cloned().collect()
}

impl Difference {
    /// Finds the largest difference of two tensors whose bytes differ.
    fn of(name: &str, a: &Tensor, b: &Tensor) -> Result<Self> {
        let values = |tensor: &Tensor| {
            let flat = tensor.f_to_kind(Kind::Double).and_then(|tensor| tensor.f_reshape([-1]));
            flat.and_then(Vec::<f64>::try_from).doing("reading a tensor")
        };
        let (of_a, of_b) = (values(a)?, values(b)?);
        let pairs = || of_a.iter().zip(&of_b).enumerate();
        let differing = || pairs().filter(|(_, (a, b))| a.to_bits() != b.to_bits());
        // NaN minus anything is NaN, which `total_cmp` puts last.
        let distance = |a: f64, b: f64| (a - b).abs();
        let most = differing()
            .max_by(|(_, (a, b)), (_, (c, d))| distance(**a, **b).total_cmp(&distance(**c, **d)));
        let (index, value_of_a, value_of_b) = most.map_or((0, 0.0, 0.0), |(i, (a, b))| (i, *a, *b));
        let is_float = a.kind() == Kind::Float;
        let ulps = || ordered(value_of_a as f32).abs_diff(ordered(value_of_b as f32));
        Ok(Self {
            name: name.to_owned(),
            shape: a.size(),
            numel: of_a.len(),
            count: differing().count(),
            index,
            a: value_of_a,
            b: value_of_b,
            ulps: is_float.then(ulps),
        })
    }

    /// Returns the cells of its row.
    fn cells(&self) -> Vec<String> {
        let Self { name, shape, numel, count, index, a, b, ulps } = self;
        // The shortest numbers that are these values.
        let value = |number: f64| match ulps {
            Some(_) => format!("{:e}", number as f32),
            None => format!("{number:e}"),
        };
        vec![
            name.clone(),
            format!("{count} of {numel}"),
            indices(*index, shape),
            value(*a),
            value(*b),
            format!("{:.2e}", (a - b).abs()),
            ulps.map_or("-".into(), |ulps| ulps.to_string()),
        ]
    }
}

/// Returns the place of a number among all of its type, so that neighbours differ by 1.
fn ordered(number: f32) -> i64 {
    let bits = i64::from(number.to_bits());
    if number.is_sign_negative() { (1 << 31) - bits } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_difference_is_found_with_its_place_and_ulps() {
        let good = Tensor::from_slice(&[1.0f32, 2.0, -0.0, 4.0]).reshape([2, 2]);
        let bad = Tensor::from_slice(&[1.0f32, 2.0, 0.0, f32::from_bits(4.0f32.to_bits() + 2)])
            .reshape([2, 2]);
        let difference = Difference::of("w", &good, &bad).unwrap();
        assert_eq!((difference.count, difference.index, difference.ulps), (2, 3, Some(2)));
        assert_eq!(
            difference.cells(),
            ["w", "2 of 4", "[1][1]", "4e0", "4.000001e0", "9.54e-7", "2"]
        );
        assert_eq!(ordered(-0.0), ordered(0.0));
        assert_eq!(ordered(f32::MIN_POSITIVE).abs_diff(ordered(-f32::MIN_POSITIVE)), 2 << 23);
    }
}
