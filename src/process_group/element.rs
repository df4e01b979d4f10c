//! Arithmetic on the elements of tensors: sums in the order of the ranks, for every kind.

use std::ops::Range;

use half::{bf16, f16};
use tch::Kind;

use super::ReduceOp;

/// One element of a tensor, and the type that it is summed in.
trait Element: Copy {
    type Sum: Copy;
    fn widen(self) -> Self::Sum;
    fn narrow(sum: Self::Sum) -> Self;
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn multiply(a: Self::Sum, factor: f64) -> Self::Sum;
    fn divide(a: Self::Sum, by: usize) -> Self::Sum;
}

macro_rules! float_element {
    ($element:ty, $sum:ty, $widen:expr, $narrow:expr) => {
        impl Element for $element {
            type Sum = $sum;
            fn widen(self) -> $sum {
                $widen(self)
            }
            fn narrow(sum: $sum) -> $element {
                $narrow(sum)
            }
            fn add(a: $sum, b: $sum) -> $sum {
                a + b
            }
            fn multiply(a: $sum, factor: f64) -> $sum {
                a * factor as $sum
            }
            fn divide(a: $sum, by: usize) -> $sum {
                a / by as $sum
            }
        }
    };
}

float_element!(f64, f64, |x| x, |x| x);
float_element!(f32, f32, |x| x, |x| x);
float_element!(f16, f32, f16::to_f32, f16::from_f32);
float_element!(bf16, f32, bf16::to_f32, bf16::from_f32);

macro_rules! integer_element {
    ($($element:ty)*) => {$(
        impl Element for $element {
            type Sum = $element;
            fn widen(self) -> $element {
                self
            }
            fn narrow(sum: $element) -> $element {
                sum
            }
            fn add(a: $element, b: $element) -> $element {
                a.wrapping_add(b)
            }
            fn multiply(_: $element, _: f64) -> $element {
                unreachable!("ReduceOp::check_kind lets integers through for sum only")
            }
            fn divide(_: $element, _: usize) -> $element {
                unreachable!("ReduceOp::check_kind lets integers through for sum only")
            }
        }
    )*};
}

integer_element!(i64 i32 i16 i8 u8);

/// Reduces the elements `range` of all `inputs`, in their order, and writes the result to all of them.
///
/// # Safety
/// Every input points to at least `range.end` elements of `kind`; no two of them overlap; and until
/// this returns nobody else touches the elements `range` of any of them.
pub(super) unsafe fn reduce(kind: Kind, inputs: &[*mut u8], range: Range<usize>, op: ReduceOp) {
    // SAFETY: handed on to the caller of `reduce`, with the type that belongs to `kind`.
    unsafe {
        match kind {
            Kind::Double => reduce_as::<f64>(inputs, range, op),
            Kind::Float => reduce_as::<f32>(inputs, range, op),
            Kind::Half => reduce_as::<f16>(inputs, range, op),
            Kind::BFloat16 => reduce_as::<bf16>(inputs, range, op),
            Kind::Int64 => reduce_as::<i64>(inputs, range, op),
            Kind::Int => reduce_as::<i32>(inputs, range, op),
            Kind::Int16 => reduce_as::<i16>(inputs, range, op),
            Kind::Int8 => reduce_as::<i8>(inputs, range, op),
            Kind::Uint8 => reduce_as::<u8>(inputs, range, op),
            _ => unreachable!("ReduceOp::check_kind lets no other kind through"),
        }
    }
}

/// Small enough for the first-level cache, large enough to hide the loop around it.
const PIECE: usize = 1024;

/// # Safety
/// As [`reduce`], for elements of type `T`.
unsafe fn reduce_as<T: Element>(inputs: &[*mut u8], range: Range<usize>, op: ReduceOp) {
    let mut start = range.start;
    while start < range.end {
        let len = PIECE.min(range.end - start);
        // SAFETY: `start + len` stays within `range`, which the caller vouches for.
        let piece = |input: *mut u8| unsafe { input.cast::<T>().add(start) };
        // SAFETY: nobody writes to these elements while the slice lives: the writes below come after.
        let read = |input| unsafe { std::slice::from_raw_parts(piece(input).cast_const(), len) };

        let mut sums = [T::widen(read(inputs[0])[0]); PIECE];
        let sums = &mut sums[..len];
        for (sum, &x) in sums.iter_mut().zip(read(inputs[0])) {
            *sum = T::widen(x);
        }
        if let ReduceOp::PremulSum(factor) = op {
            sums.iter_mut().for_each(|sum| *sum = T::multiply(*sum, factor));
        }
        for &input in &inputs[1..] {
            let addends = sums.iter_mut().zip(read(input));
            if let ReduceOp::PremulSum(factor) = op {
                addends.for_each(|(s, &x)| *s = T::add(*s, T::multiply(T::widen(x), factor)));
            } else {
                addends.for_each(|(s, &x)| *s = T::add(*s, T::widen(x)));
            }
        }
        if op == ReduceOp::Avg {
            sums.iter_mut().for_each(|sum| *sum = T::divide(*sum, inputs.len()));
        }
        let mut results = [T::narrow(sums[0]); PIECE];
        for (result, &sum) in results.iter_mut().zip(sums.iter()) {
            *result = T::narrow(sum);
        }
        for &input in inputs {
            // SAFETY: `results` is a local array of at least `len` elements, so nothing overlaps.
            unsafe { std::ptr::copy_nonoverlapping(results.as_ptr(), piece(input), len) };
        }
        start += len;
    }
}
