//! Compares two files of tensors: which differ first, where, and by how much.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use tch::{Kind, Tensor};

use engine::checkpoint::TensorFile;
use engine::error::{Error, Result, Shown, counted};
use engine::ffi::TorchResult;
use engine::files::open_regular;
use engine::models::bytes_of;
use engine::process_group::dtype_name;
use views::{indices, table};

/// The groups of tensors in the files of `--keep`, in the order of computation.
const ORDER: [&str; 8] =
    ["before.", "batch.", "output.", "loss.", "gradient.", "average.", "parameter.", "buffer."];

/// The most tensors that are shown with values.
const MAX_ROWS: usize = 8;

/// Returns whether `path` is a folder, which may be a checkpoint, or begins as a safetensors file does.
pub(super) fn holds_tensors(path: &Path) -> bool {
    // Eight bytes of length, and JSON.
    let mut begins = [0; 9];
    let read = open_regular(path).and_then(|mut file| file.read_exact(&mut begins));
    path.is_dir() || (read.is_ok() && begins[8] == b'{')
}

/// Compares the files `a` and `b`, each a safetensors file or a checkpoint, which are called `sides`. Returns the lines about
/// their differences, and whether they are equal.
///
/// # Errors
/// [`Error::Input`] if one cannot be read, or if they have no name in common.
pub(in crate::commands) fn compare_tensors(
    a: &Path,
    b: &Path,
    sides: [&str; 2],
) -> Result<(Vec<String>, bool)> {
    let (of_a, of_b) = (TensorFile::read(a)?.tensors()?, TensorFile::read(b)?.tensors()?);
    let mut common: Vec<&String> = of_a.keys().filter(|name| of_b.contains_key(*name)).collect();
    if common.is_empty() {
        return Err(Error::mismatch(format!(
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
    let (rows, later) = first_differences(&common, &of_a, &of_b, group)?;
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
) -> Result<(Vec<Vec<String>>, usize)> {
    let (mut rows, mut later, mut first_group) = (Vec::new(), 0, None);
    for &name in common {
        let (a, b) = (&of_a[name], &of_b[name]);
        let is_alike = a.kind() == b.kind() && a.size() == b.size();
        if is_alike && bytes_of(a)? == bytes_of(b)? {
            continue;
        }
        if *first_group.get_or_insert(group(name)) == group(name) {
            rows.push(if is_alike { row(name, a, b)? } else { other_shape(name, a, b) });
        } else {
            later += 1;
        }
    }
    Ok((rows, later))
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
    let about = |tensor: &Tensor| format!("{} {:?}", dtype_name(tensor.kind()), tensor.size());
    vec![name.to_owned(), "other shape".into(), String::new(), about(a), about(b)]
}

/// Returns the row of a tensor whose bytes differ: how many values do, and the pair that differs most.
fn row(name: &str, a: &Tensor, b: &Tensor) -> Result<Vec<String>> {
    let (of_a, of_b) = (numbers(a)?, numbers(b)?);
    let (bytes_of_a, bytes_of_b) = (bytes_of(a)?, bytes_of(b)?);
    let size = bytes_of_a.len() / of_a.len();
    let values = bytes_of_a.chunks(size).zip(bytes_of_b.chunks(size)).enumerate();
    let differ = values.filter(|(_, (a, b))| a != b).map(|(index, _)| index);
    let differ: Vec<usize> = differ.collect();
    let difference = |index: &usize| (of_a[*index] - of_b[*index]).abs();
    // A difference to NaN is NaN, which `total_cmp` puts last. Of equal ones, the first counts.
    let most = differ.iter().rev().max_by(|i, j| difference(i).total_cmp(&difference(j)));
    let index = most.copied().unwrap_or_default();
    let values = [of_a[index], of_b[index]];
    let ulps = (a.kind() == Kind::Float && values.iter().all(|value| value.is_finite()))
        .then(|| ordered(values[0] as f32).abs_diff(ordered(values[1] as f32)));
    Ok(vec![
        name.to_owned(),
        format!("{} of {}", differ.len(), of_a.len()),
        indices(index, &a.size()),
        value_text(a, index, values[0])?,
        value_text(b, index, values[1])?,
        format!("{:.2e}", difference(&index)),
        ulps.map_or("-".into(), |ulps| ulps.to_string()),
    ])
}

/// Returns the values of a tensor, as near as a float64 comes.
fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let flat = tensor.f_to_kind(Kind::Double).and_then(|tensor| tensor.f_reshape([-1]));
    flat.and_then(Vec::<f64>::try_from).doing("reading a tensor")
}

/// Formats a value of a tensor: the shortest number that is this value.
fn value_text(tensor: &Tensor, index: usize, number: f64) -> Result<String> {
    Ok(match tensor.kind() {
        Kind::Float => format!("{:e}", number as f32),
        Kind::Int64 => {
            let flat = tensor.f_reshape([-1]);
            let value = flat.and_then(|flat| flat.f_int64_value(&[index as i64]));
            value.doing("reading a tensor")?.to_string()
        }
        _ => format!("{number:e}"),
    })
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
    fn row_shows_the_largest_difference_with_its_place_and_ulps() {
        let good = Tensor::from_slice(&[1.0f32, 2.0, -0.0, 4.0]).reshape([2, 2]);
        let next = f32::from_bits(4.0f32.to_bits() + 2);
        let bad = Tensor::from_slice(&[1.0f32, 2.0, 0.0, next]).reshape([2, 2]);
        let expected = ["w", "2 of 4", "[1][1]", "4e0", "4.000001e0", "9.54e-7", "2"];
        assert_eq!(row("w", &good, &bad).unwrap(), expected);
        let bad = Tensor::from_slice(&[1.0f32, f32::NAN, 0.0, 4.0]).reshape([2, 2]);
        let expected = ["w", "2 of 4", "[0][1]", "2e0", "NaN", "NaN", "-"];
        assert_eq!(row("w", &good, &bad).unwrap(), expected);
        // These are equal as float64.
        let good = Tensor::from_slice(&[7, 1i64 << 53]);
        let bad = Tensor::from_slice(&[7, (1i64 << 53) + 1]);
        let expected =
            ["n", "1 of 2", "[1]", "9007199254740992", "9007199254740993", "0.00e0", "-"];
        assert_eq!(row("n", &good, &bad).unwrap(), expected);
        assert_eq!(ordered(-0.0), ordered(0.0));
        assert_eq!(ordered(f32::MIN_POSITIVE).abs_diff(ordered(-f32::MIN_POSITIVE)), 2 << 23);
    }
}
