//! Compares two files of tensors: which differ first, where, and by how much.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::diff::Refused;
use crate::files::{explain_path, open_regular};
use crate::layout::{indices, table};
use crate::mistaken::{SAFETENSORS, mistaken};
use crate::text::{Shown, counted};

/// The groups of tensors in the files of `--keep`, in the order of computation.
const ORDER: [&str; 8] =
    ["before.", "batch.", "output.", "loss.", "gradient.", "average.", "parameter.", "buffer."];

/// The most tensors that are shown with values.
const MAX_ROWS: usize = 8;

/// Returns whether `path` is a folder, which may be a checkpoint, or begins as a safetensors file does.
pub(crate) fn holds_tensors(path: &Path) -> bool {
    // Eight bytes of length, and JSON.
    let mut begins = [0; 9];
    let read = open_regular(path).and_then(|mut file| file.read_exact(&mut begins));
    path.is_dir() || (read.is_ok() && begins[8] == b'{')
}

/// A tensor of a file.
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Reads the safetensors file at `path`, or that of the model in this checkpoint.
fn read(path: &Path) -> Result<BTreeMap<String, Tensor>, Refused> {
    let file = if path.is_dir() { path.join("model.safetensors") } else { path.to_owned() };
    let refused = |problem: String| Refused::new(format!("{}: {problem}", path.shown()));
    let mut bytes = Vec::new();
    let read = open_regular(&file).and_then(|mut file| file.read_to_end(&mut bytes));
    read.map_err(|error| refused(explain_path(error)))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| {
        let instead = "save the tensors with safetensors.torch.save_file(tensors, FILE)";
        let damaged = || format!("this is no safetensors file: {error}");
        refused(mistaken(&bytes, SAFETENSORS, instead).unwrap_or_else(damaged))
    })?;
    let tensor = |(name, view): (&str, TensorView<'_>)| {
        let (dtype, shape) = (view.dtype(), view.shape().to_owned());
        (name.to_owned(), Tensor { dtype, shape, bytes: view.data().to_vec() })
    };
    Ok(tensors.iter().map(tensor).collect())
}

/// Compares the files `a` and `b`, each a safetensors file or the folder of a checkpoint, which are called `sides`. Returns the
/// lines about their differences, and whether they are equal.
///
/// # Errors
/// If one cannot be read, or if they have no name in common.
pub fn compare_tensors(
    a: &Path,
    b: &Path,
    sides: [&str; 2],
) -> Result<(Vec<String>, bool), Refused> {
    let (of_a, of_b) = (read(a)?, read(b)?);
    let mut common: Vec<&String> = of_a.keys().filter(|name| of_b.contains_key(*name)).collect();
    if common.is_empty() {
        return Err(Refused::new(format!(
            "{} and {} have no name of a tensor in common; both must name their tensors alike",
            a.shown(),
            b.shown()
        )));
    }
    // Only files of `--keep` have groups. In a checkpoint, a layer may be called `output`.
    let is_kept = common.iter().any(|name| name.starts_with(ORDER[0]));
    // The place of a tensor's group in the order of computation. `None`, which comes first, for other names.
    let group = |name: &str| ORDER.iter().position(|prefix| is_kept && name.starts_with(prefix));
    common.sort_by_key(|name| group(name));
    let (mut lines, mut lacks_tensors) = (Vec::new(), false);
    for (side, of, other) in [(sides[0], &of_a, &of_b), (sides[1], &of_b, &of_a)] {
        let left: Vec<&String> = of.keys().filter(|name| !other.contains_key(*name)).collect();
        if let [first, others @ ..] = &left[..] {
            let others = if others.is_empty() { "" } else { " and others" };
            lines.push(format!("Only {side} has `{first}`{others}."));
        }
        // A file may lack a group as a whole: a loop may name no batches, and DDP replaces the buffers of some ranks.
        lacks_tensors |= left.iter().any(|name| other.keys().any(|it| group(it) == group(name)));
    }
    let (rows, later) = first_differences(&common, &of_a, &of_b, group);
    let equal = common.len() - rows.len() - later;
    if equal > 0 {
        lines.push(format!("Equal: {}.", counted(equal, "tensor")));
    }
    if rows.is_empty() {
        return Ok((lines, !lacks_tensors));
    }
    lines.push("The first tensors that differ, each at its largest difference:".into());
    lines.extend(table_of(rows, later, sides));
    Ok((lines, false))
}

/// Returns the rows of the tensors that differ in the first group that has any, and the number of those in later groups.
fn first_differences(
    common: &[&String],
    of_a: &BTreeMap<String, Tensor>,
    of_b: &BTreeMap<String, Tensor>,
    group: impl Fn(&str) -> Option<usize>,
) -> (Vec<Vec<String>>, usize) {
    let (mut rows, mut later, mut first_group) = (Vec::new(), 0, None);
    for &name in common {
        let (a, b) = (&of_a[name], &of_b[name]);
        let is_alike = a.dtype == b.dtype && a.shape == b.shape;
        if is_alike && a.bytes == b.bytes {
            continue;
        }
        if *first_group.get_or_insert(group(name)) == group(name) {
            rows.push(if is_alike { row(name, a, b) } else { other_shape(name, a, b) });
        } else {
            later += 1;
        }
    }
    (rows, later)
}

/// Returns the table of the first `rows`, and lines about the rest and the `later` tensors that differ.
fn table_of(mut rows: Vec<Vec<String>>, later: usize, sides: [&str; 2]) -> Vec<String> {
    let more = rows.len().saturating_sub(MAX_ROWS);
    rows.truncate(MAX_ROWS);
    let titles = ["", "values", "at", sides[0], sides[1], "difference", "ULPs"];
    rows.insert(0, titles.map(str::to_owned).to_vec());
    let mut lines = table(&rows);
    if more > 0 {
        lines.push(format!("  ... and {more} more"));
    }
    if later > 0 {
        let s = if later == 1 { "s" } else { "" };
        lines.push(format!("Of what is computed later, {later} differ{s}."));
    }
    lines
}

/// Returns the row of a tensor that has another dtype or shape in the files.
fn other_shape(name: &str, a: &Tensor, b: &Tensor) -> Vec<String> {
    let about = |tensor: &Tensor| format!("{} {:?}", dtype_name(tensor.dtype), tensor.shape);
    vec![name.to_owned(), "other shape".into(), String::new(), about(a), about(b)]
}

/// Returns the row of a tensor whose bytes differ: how many values do, and the pair that differs most.
fn row(name: &str, a: &Tensor, b: &Tensor) -> Vec<String> {
    let count: usize = a.shape.iter().product();
    let size = (a.bytes.len() / count.max(1)).max(1); // some dtypes have less than a byte
    let (of_a, of_b) = (a.numbers(), b.numbers());
    let values = a.bytes.chunks(size).zip(b.bytes.chunks(size)).enumerate();
    let differ: Vec<usize> = values.filter(|(_, (a, b))| a != b).map(|(index, _)| index).collect();
    let difference = |index: &usize| (of_a[*index] - of_b[*index]).abs();
    // A difference to NaN is NaN, which `total_cmp` puts last. Of equal ones, the first counts.
    let most = differ.iter().rev().max_by(|i, j| difference(i).total_cmp(&difference(j)));
    let index = most.copied().unwrap_or_default();
    let values = [of_a[index], of_b[index]];
    let ulps = (a.dtype == Dtype::F32 && values.iter().all(|value| value.is_finite()))
        .then(|| ordered(values[0] as f32).abs_diff(ordered(values[1] as f32)));
    vec![
        name.to_owned(),
        format!("{} of {}", differ.len(), of_a.len()),
        indices(index, &a.shape.iter().map(|&size| size as i64).collect::<Vec<_>>()),
        a.value_text(index, values[0]),
        b.value_text(index, values[1]),
        format!("{:.2e}", difference(&index)),
        ulps.map_or("-".into(), |ulps| ulps.to_string()),
    ]
}

/// Returns PyTorch's name of a dtype.
fn dtype_name(dtype: Dtype) -> String {
    match dtype {
        Dtype::BF16 => "bfloat16".into(),
        Dtype::BOOL => "bool".into(),
        other => {
            let name = format!("{other:?}").to_lowercase();
            let (sort, bits) = name.split_at(1);
            let sort = [("f", "float"), ("i", "int"), ("u", "uint"), ("c", "complex")]
                .iter()
                .find_map(|(short, long)| (*short == sort).then_some(*long));
            format!("{}{bits}", sort.unwrap_or(""))
        }
    }
}

impl Tensor {
    /// Returns the values, as near as a float64 comes; NaN for dtypes that are not known here.
    fn numbers(&self) -> Vec<f64> {
        match self.dtype {
            Dtype::F32 => self.decoded(f32::from_le_bytes),
            Dtype::F64 => self.decoded(f64::from_le_bytes),
            Dtype::F16 => self.decoded(f16::from_le_bytes),
            Dtype::BF16 => self.decoded(bf16::from_le_bytes),
            Dtype::I64 => self.decoded(|bytes| i64::from_le_bytes(bytes) as f64),
            Dtype::I32 => self.decoded(i32::from_le_bytes),
            Dtype::I16 => self.decoded(i16::from_le_bytes),
            Dtype::I8 => self.decoded(i8::from_le_bytes),
            Dtype::U8 | Dtype::BOOL => self.decoded(u8::from_le_bytes),
            _ => vec![f64::NAN; self.shape.iter().product()],
        }
    }

    fn decoded<const SIZE: usize, T: Into<f64>>(
        &self,
        decode: impl Fn([u8; SIZE]) -> T,
    ) -> Vec<f64> {
        self.bytes.as_chunks().0.iter().map(|bytes| decode(*bytes).into()).collect()
    }

    /// Formats a value: the shortest number that is this value.
    fn value_text(&self, index: usize, number: f64) -> String {
        match self.dtype {
            Dtype::F32 => format!("{:e}", number as f32),
            Dtype::I64 => i64::from_le_bytes(self.bytes.as_chunks().0[index]).to_string(),
            _ => format!("{number:e}"),
        }
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

    fn of<const SIZE: usize>(dtype: Dtype, shape: &[usize], values: &[[u8; SIZE]]) -> Tensor {
        Tensor { dtype, shape: shape.to_owned(), bytes: values.concat() }
    }

    #[test]
    fn row_shows_the_largest_difference_with_its_place_and_ulps() {
        let floats = |values: [f32; 4]| of(Dtype::F32, &[2, 2], &values.map(f32::to_le_bytes));
        let good = floats([1.0, 2.0, -0.0, 4.0]);
        let next = f32::from_bits(4.0f32.to_bits() + 2);
        let bad = floats([1.0, 2.0, 0.0, next]);
        let expected = ["w", "2 of 4", "[1][1]", "4e0", "4.000001e0", "9.54e-7", "2"];
        assert_eq!(row("w", &good, &bad), expected);
        let bad = floats([1.0, f32::NAN, 0.0, 4.0]);
        let expected = ["w", "2 of 4", "[0][1]", "2e0", "NaN", "NaN", "-"];
        assert_eq!(row("w", &good, &bad), expected);
        // These are equal as float64.
        let integers = |values: [i64; 2]| of(Dtype::I64, &[2], &values.map(i64::to_le_bytes));
        let (good, bad) = (integers([7, 1 << 53]), integers([7, (1 << 53) + 1]));
        let expected =
            ["n", "1 of 2", "[1]", "9007199254740992", "9007199254740993", "0.00e0", "-"];
        assert_eq!(row("n", &good, &bad), expected);
        assert_eq!(ordered(-0.0), ordered(0.0));
        assert_eq!(ordered(f32::MIN_POSITIVE).abs_diff(ordered(-f32::MIN_POSITIVE)), 2 << 23);
    }
}
