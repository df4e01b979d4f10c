//! Makes the fingerprint of a tensor: the hash of its bytes, and numbers that tell how far it is from another one.

use half::{bf16, f16};
use multiversion::multiversion;
use xxhash_rust::xxh3::xxh3_64;

use crate::record::{SKETCH, TensorFingerprint, TensorHash, TensorNumbers};

/// The most elements of a tensor of which a step takes the fingerprint. Of a larger tensor each step takes one part.
pub const PART: usize = 1 << 15;

/// Elements that get their signs from one random number of 64 bits.
const BLOCK: usize = 64;

/// Returns the first element and the length of the part of a tensor with `numel` elements that is due in a step, and the
/// index of that part; `None` if the tensor is one part.
///
/// The steps take parts at random, but always the same ones. So no part is left out, whichever steps are recorded.
pub fn part_of_step(numel: usize, step: u64) -> Option<(u64, usize, usize)> {
    if numel <= PART {
        return None;
    }
    let parts = numel.div_ceil(PART);
    let index = ((u128::from(random(step)) * parts as u128) >> 64) as usize;
    let first = index * PART;
    Some((index as u64, first, PART.min(numel - first)))
}

/// Returns the fingerprint of the elements in `bytes`, which lie in row-major order. `dtype` is PyTorch's name of theirs; if
/// it is unknown here, there is only a hash.
pub fn fingerprint(bytes: &[u8], dtype: &str) -> TensorFingerprint {
    let numbers = match dtype {
        "float32" | "complex64" => Some(numbers(bytes, f32::from_le_bytes)),
        "float64" | "complex128" => Some(numbers(bytes, f64::from_le_bytes)),
        "float16" => Some(numbers(bytes, f16::from_le_bytes)),
        "bfloat16" => Some(numbers(bytes, bf16::from_le_bytes)),
        "int64" => Some(numbers(bytes, |it| i64::from_le_bytes(it) as f64)),
        "int32" => Some(numbers(bytes, i32::from_le_bytes)),
        "int16" => Some(numbers(bytes, i16::from_le_bytes)),
        "int8" => Some(numbers(bytes, i8::from_le_bytes)),
        "uint8" | "bool" => Some(numbers(bytes, u8::from_le_bytes)),
        _ => None,
    };
    TensorFingerprint { hash: TensorHash(xxh3_64(bytes)), part: None, numbers }
}

/// Returns the numbers of elements of `SIZE` bytes.
fn numbers<const SIZE: usize, T: Into<f64>>(
    bytes: &[u8],
    decode: impl Fn([u8; SIZE]) -> T,
) -> TensorNumbers {
    let (elements, _) = bytes.as_chunks::<SIZE>();
    let all = add_up(elements, |element| decode(element).into());
    if all.largest.is_finite() {
        return all.rounded(elements.len(), 0);
    }
    // The others still say something.
    let mut nonfinite = 0;
    let finite = |element| {
        let value = decode(element).into();
        nonfinite += u64::from(!value.is_finite());
        if value.is_finite() { value } else { 0.0 }
    };
    let finite = add_up(elements, finite);
    finite.rounded(elements.len(), nonfinite)
}

/// Sums over the elements of a tensor. Each has lanes, which the processor adds up side by side.
#[derive(Default)]
struct Sums {
    squares: [f64; SKETCH],
    values: [f64; SKETCH],
    signed: [f64; SKETCH],
    /// The largest magnitude; infinite if an element is NaN.
    largest: f64,
}

/// Adds up the elements. With wider registers, where the processor has them, the sums are the same.
#[multiversion(targets("x86_64+avx2"))]
fn add_up<const SIZE: usize, D: FnMut([u8; SIZE]) -> f64>(
    elements: &[[u8; SIZE]],
    mut decode: D,
) -> Sums {
    let mut sums = Sums::default();
    let mut largest = [0.0f64; SKETCH];
    for (index, block) in elements.chunks(BLOCK).enumerate() {
        let mut values = [0.0; BLOCK];
        for (value, element) in values.iter_mut().zip(block) {
            *value = decode(*element);
        }
        let signs = random(index as u64);
        for (row, lanes) in values.as_chunks::<SKETCH>().0.iter().enumerate() {
            let signs = SIGNS[(signs >> (row * SKETCH)) as usize % SIGNS.len()];
            for (lane, &value) in lanes.iter().enumerate() {
                sums.squares[lane] += value * value;
                sums.values[lane] += value;
                sums.signed[lane] += f64::from_bits(value.to_bits() ^ signs[lane]);
                // A comparison with NaN is false.
                let magnitude = value.abs();
                largest[lane] = if magnitude <= largest[lane] { largest[lane] } else { magnitude };
            }
        }
    }
    let is_nan = largest.iter().any(|it| it.is_nan());
    sums.largest = if is_nan { f64::INFINITY } else { largest.into_iter().fold(0.0, f64::max) };
    sums
}

/// For each number of [`SKETCH`] bits, the sign bits that they stand for.
static SIGNS: [[u64; SKETCH]; 1 << SKETCH] = {
    let mut signs = [[0; SKETCH]; 1 << SKETCH];
    let mut place = 0;
    while place < SKETCH << SKETCH {
        let (bits, bit) = (place / SKETCH, place % SKETCH);
        signs[bits][bit] = ((bits >> bit) as u64 & 1) << 63;
        place += 1;
    }
    signs
};

impl Sums {
    fn rounded(&self, count: usize, nonfinite: u64) -> TensorNumbers {
        let Self { squares, values, signed, largest } = self;
        TensorNumbers {
            norm: rounded(squares.iter().sum::<f64>().sqrt()),
            largest: rounded(*largest),
            mean: rounded(values.iter().sum::<f64>() / count.max(1) as f64),
            sketch: signed.map(rounded),
            nonfinite,
        }
    }
}

/// The largest number that a record has in place of larger ones.
const LARGEST: f64 = 1e300;

/// Rounds a number to ten digits, which is what a record keeps of it.
fn rounded(number: f64) -> f64 {
    if number == 0.0 || number.is_nan() {
        return 0.0;
    }
    let number = number.clamp(-LARGEST, LARGEST);
    let digits = 9 - number.abs().log10().floor() as i32;
    // Powers of ten up to this are exact, so the result has few digits. Other numbers are rare.
    if (0..=22).contains(&digits) {
        let scale = 10f64.powi(digits);
        (number * scale).round() / scale
    } else if (-22..0).contains(&digits) {
        let scale = 10f64.powi(-digits);
        (number / scale).round() * scale
    } else {
        format!("{number:.9e}").parse().unwrap_or(number)
    }
}

/// Returns the random number with this index: SplitMix64.
fn random(index: u64) -> u64 {
    let mut bits = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f32]) -> TensorNumbers {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        fingerprint(&bytes, "float32").numbers.unwrap()
    }

    /// The distance of two tensors, as their sketches estimate it, is near the true one.
    #[test]
    fn sketch_estimates_the_distance_of_any_two_tensors() {
        let len = 50_000;
        let a: Vec<f32> = (0..len).map(|i| random(i) as i32 as f32 / 2e9).collect();
        let noise = |i: usize| 1e-5 * (random(i as u64 + 1_000_000) as i32 as f32 / 2e9);
        let changed = |what: &str, i: usize| match what {
            "noise" => a[i] + noise(i),
            "a constant" => a[i] + 1e-3,
            "another order" => a[(i * 7) % a.len()],
            _ => a[i] * if i / 200 == 3 { 2.0 } else { 1.0 },
        };
        for what in ["noise", "a constant", "another order", "a row"] {
            let b: Vec<f32> = (0..a.len()).map(|i| changed(what, i)).collect();
            let differences = a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2));
            let distance = differences.sum::<f64>().sqrt();
            let estimate = of(&a).distance(&of(&b));
            let ratio = estimate / distance;
            assert!((0.3..3.0).contains(&ratio), "{what}: {estimate} for {distance}");
        }
    }

    #[test]
    fn numbers_of_a_tensor_leave_out_what_is_not_finite() {
        let numbers = of(&[3.0, f32::NAN, -4.0, f32::INFINITY]);
        assert_eq!((numbers.norm, numbers.largest, numbers.mean), (5.0, 4.0, -0.25));
        assert_eq!(numbers.nonfinite, 2);
        let numbers = of(&[]);
        assert_eq!((numbers.norm, numbers.largest, numbers.mean), (0.0, 0.0, 0.0));
        // Float64 whose squares are too large.
        let numbers = fingerprint(&[1e200f64, 0.0].map(f64::to_le_bytes).concat(), "float64");
        assert_eq!(numbers.numbers.unwrap().norm, LARGEST);
        assert_eq!(fingerprint(&[1, 2, 3], "float8_e4m3fn").numbers, None);
    }

    #[test]
    fn numbers_are_rounded_to_ten_digits() {
        for exponent in -40..40 {
            let number = 1.234_567_890_123_456 * 10f64.powi(exponent);
            let expected: f64 = format!("{number:.9e}").parse().unwrap();
            assert!((rounded(-number) + expected).abs() <= 1e-15 * expected, "{number:e}");
            let text = format!("{:e}", rounded(number));
            assert!(text.len() <= "1.23456789e-39".len() + 1, "{text}");
        }
        assert_eq!(rounded(0.0), 0.0);
        assert_eq!(rounded(f64::INFINITY), LARGEST);
    }

    #[test]
    fn parts_take_turns() {
        assert_eq!(part_of_step(PART, 7), None);
        let numel = 10 * PART + 3;
        for every in [1, 2, 10, 11, 89, 100] {
            let of = |step: u64| part_of_step(numel, step * every).unwrap();
            let mut seen: Vec<u64> = (0..100).map(|step| of(step).0).collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), 11, "every {every}: {seen:?}");
        }
        let last = (0..100).map(|step| part_of_step(numel, step).unwrap()).max();
        assert_eq!(last, Some((10, 10 * PART, 3)));
    }
}
