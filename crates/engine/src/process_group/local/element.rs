//! Arithmetic on the elements of tensors: reductions in rank order, for every dtype, and the slice that each rank reduces.

use std::ops::Range;
use std::slice;

use half::{bf16, f16};
use tch::Kind;

use crate::process_group::ReduceOp;

/// Defines functions of one expression each. They are compiled with the instructions of their callers.
macro_rules! inlined {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty = $value:expr;)*) => {$(
        #[inline(always)]
        fn $name($($argument: $type),*) -> $result {
            $value
        }
    )*};
}

/// One element of a tensor, and the type in which it is reduced.
trait Element: Copy + 'static {
    type Wide: Copy;
    const ZERO: Self::Wide;
    fn widen(element: Self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn multiply(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    // Floats have no bitwise operations, and integers none with a factor.
    inlined! {
        and(_a: Self::Wide, _b: Self::Wide) -> Self::Wide = refused();
        or(_a: Self::Wide, _b: Self::Wide) -> Self::Wide = refused();
        xor(_a: Self::Wide, _b: Self::Wide) -> Self::Wide = refused();
        scale(_a: Self::Wide, _factor: f64) -> Self::Wide = refused();
        divide(_a: Self::Wide, _by: usize) -> Self::Wide = refused();
    }

    /// Returns the reduced values as elements: `wide` itself if the type is the same, otherwise narrowed into `room`.
    #[inline(always)]
    fn results<'a>(wide: &'a [Self::Wide], room: &'a mut [Self]) -> &'a [Self] {
        for (result, &w) in room.iter_mut().zip(wide) {
            *result = Self::narrow(w);
        }
        room
    }
}

/// Panics. `ReduceOp::check_kind` has refused the operation for this dtype before.
fn refused<T>() -> T {
    unreachable!("a reduce op that this kind does not have")
}

/// Implements `results` for an element that is reduced in its own type.
macro_rules! as_they_are {
    ($element:ty) => {
        #[inline(always)]
        fn results<'a>(wide: &'a [$element], _: &'a mut [$element]) -> &'a [$element] {
            wide
        }
    };
}

macro_rules! float_element {
    ($element:ty, $wide:ty, $widen:expr, $narrow:expr, $($results:tt)*) => {
        impl Element for $element {
            type Wide = $wide;
            const ZERO: $wide = 0.;
            inlined! {
                widen(element: $element) -> $wide = $widen(element);
                narrow(wide: $wide) -> $element = $narrow(wide);
                add(a: $wide, b: $wide) -> $wide = a + b;
                multiply(a: $wide, b: $wide) -> $wide = a * b;
                // Like torch.minimum and torch.maximum: NaN propagates.
                min(a: $wide, b: $wide) -> $wide = if a < b || a.is_nan() { a } else { b };
                max(a: $wide, b: $wide) -> $wide = if a > b || a.is_nan() { a } else { b };
                scale(a: $wide, factor: f64) -> $wide = a * factor as $wide;
                divide(a: $wide, by: usize) -> $wide = a / by as $wide;
            }
            $($results)*
        }
    };
}

float_element!(f64, f64, |x| x, |x| x, as_they_are!(f64););
float_element!(f32, f32, |x| x, |x| x, as_they_are!(f32););
float_element!(f16, f32, f16::to_f32, f16::from_f32,);
float_element!(bf16, f32, bf16::to_f32, bf16::from_f32,);

macro_rules! integer_element {
    ($($element:ty)*) => {$(
        impl Element for $element {
            type Wide = $element;
            const ZERO: $element = 0;
            inlined! {
                widen(element: $element) -> $element = element;
                narrow(wide: $element) -> $element = wide;
                add(a: $element, b: $element) -> $element = a.wrapping_add(b);
                multiply(a: $element, b: $element) -> $element = a.wrapping_mul(b);
                min(a: $element, b: $element) -> $element = a.min(b);
                max(a: $element, b: $element) -> $element = a.max(b);
                and(a: $element, b: $element) -> $element = a & b;
                or(a: $element, b: $element) -> $element = a | b;
                xor(a: $element, b: $element) -> $element = a ^ b;
            }
            as_they_are!($element);
        }
    )*};
}

integer_element!(i64 i32 i16 i8 u8);

/// The dtypes that a reduction reads and writes. They are equal, or it writes a partial result in the [`wide_kind`] of
/// what it reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kinds {
    pub from: Kind,
    pub to: Kind,
}

/// Returns the dtype in which elements of `kind` are reduced: float32 for half precision.
pub(crate) fn wide_kind(kind: Kind) -> Kind {
    if matches!(kind, Kind::Half | Kind::BFloat16) { Kind::Float } else { kind }
}

/// A reduction of the elements of all inputs, in order, into all outputs.
#[derive(Clone, Copy)]
pub(crate) struct Reduction<'a> {
    pub kinds: Kinds,
    /// The address of a partial result of [`wide_kind`] from which the reduction goes on; `None` to begin with the first
    /// input.
    pub partial: Option<*mut u8>,
    /// Addresses of the first element of each input, and of each output.
    pub inputs: &'a [*mut u8],
    pub outputs: &'a [*mut u8],
    /// Number of elements in each of them.
    pub len: usize,
    pub op: ReduceOp,
    /// The number by which an average is divided: how many inputs there are, with those of the partial result.
    pub addends: usize,
}

/// The lists for a rank's reductions. Every reduction reuses them, to avoid allocating.
#[derive(Debug, Default)]
pub(crate) struct ReductionScratch {
    pub inputs: Vec<*mut u8>,
    pub outputs: Vec<*mut u8>,
}

// SAFETY: no reduction uses the pointers that an earlier one has left in these lists.
unsafe impl Send for ReductionScratch {}

impl ReductionScratch {
    /// Lists these inputs and outputs.
    pub(crate) fn list(
        &mut self,
        inputs: impl Iterator<Item = *mut u8>,
        outputs: impl Iterator<Item = *mut u8>,
    ) {
        self.inputs.clear();
        self.inputs.extend(inputs);
        self.outputs.clear();
        self.outputs.extend(outputs);
    }

    /// Returns the reduction of `len` elements of the listed inputs, which are all.
    pub(crate) fn reduction(&self, kind: Kind, len: usize, op: ReduceOp) -> Reduction<'_> {
        let Self { inputs, outputs } = self;
        let kinds = Kinds { from: kind, to: kind };
        Reduction { kinds, partial: None, inputs, outputs, len, op, addends: inputs.len() }
    }
}

/// Reduces with AVX2 and F16C instructions if the processor has them. They change no bit, because every element is
/// computed separately, by the same operations.
///
/// # Safety
/// There is an input. Every input points to at least `len` elements of `kinds.from`, the partial result to as many of their
/// [`wide_kind`], and every output to as many of `kinds.to`. No output overlaps another output or the partial result. An
/// output overlaps an input only if both are the same place, of the same dtype. Until this returns, no other thread writes
/// to these elements of the inputs and of the partial result, or touches those of the outputs.
pub(crate) unsafe fn reduce(reduction: Reduction<'_>) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: the processor has these instructions; the caller promises the rest.
        return unsafe { reduce_with_avx2(reduction) };
    }
    // SAFETY: as the caller promises.
    unsafe { reduce_kind(reduction) }
}

/// # Safety
/// The requirements of [`reduce`], and a processor that has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn reduce_with_avx2(reduction: Reduction<'_>) {
    // SAFETY: as the caller promises.
    unsafe { reduce_kind(reduction) }
}

/// # Safety
/// The requirements of [`reduce`].
#[inline(always)] // compiled with the instructions of its caller
unsafe fn reduce_kind(reduction: Reduction<'_>) {
    // SAFETY: as the caller of `reduce` promises, with the types that belong to `kinds`.
    unsafe {
        match (reduction.kinds.from, reduction.kinds.to) {
            (Kind::Half, Kind::Float) => reduce_as::<f16, f32>(reduction),
            (Kind::BFloat16, Kind::Float) => reduce_as::<bf16, f32>(reduction),
            (from, to) if from != to => refused(),
            (Kind::Double, _) => reduce_as::<f64, f64>(reduction),
            (Kind::Float, _) => reduce_as::<f32, f32>(reduction),
            (Kind::Half, _) => reduce_as::<f16, f16>(reduction),
            (Kind::BFloat16, _) => reduce_as::<bf16, bf16>(reduction),
            (Kind::Int64, _) => reduce_as::<i64, i64>(reduction),
            (Kind::Int, _) => reduce_as::<i32, i32>(reduction),
            (Kind::Int16, _) => reduce_as::<i16, i16>(reduction),
            (Kind::Int8, _) => reduce_as::<i8, i8>(reduction),
            // A bool is a byte of 0 or 1, and its operations keep it so.
            (Kind::Uint8 | Kind::Bool, _) => reduce_as::<u8, u8>(reduction),
            _ => refused(),
        }
    }
}

/// Elements per piece: small enough for the first-level cache, large enough to hide the loop around it.
const PIECE_ELEMENTS: usize = 1024;

/// Elements for which there is a smaller buffer, because to clear a large one takes longer than the reduction.
const FEW_ELEMENTS: usize = 128;

/// Bytes of results that are copied at once. For 2 KiB and more glibc's memcpy uses `rep movsb`, which takes ten times as
/// long on some AMD processors if source and target lie at almost the same place of their pages. A step of two ranks then
/// takes a third longer.
const COPY_BYTES: usize = 1024;

/// # Safety
/// The requirements of [`reduce`], for inputs of type `T` and outputs of type `R`.
#[inline(always)]
unsafe fn reduce_as<T: Element, R: Element<Wide = T::Wide>>(reduction: Reduction<'_>) {
    let Reduction { outputs, len, .. } = reduction;
    let (mut small_room, mut small_results, mut large_room, mut large_results);
    let (room, results) = if len <= FEW_ELEMENTS {
        small_room = [T::ZERO; FEW_ELEMENTS];
        small_results = [R::narrow(R::ZERO); FEW_ELEMENTS];
        (&mut small_room[..], &mut small_results[..])
    } else {
        large_room = [T::ZERO; PIECE_ELEMENTS];
        large_results = [R::narrow(R::ZERO); PIECE_ELEMENTS];
        (&mut large_room[..], &mut large_results[..])
    };
    for start in (0..len).step_by(PIECE_ELEMENTS) {
        let len = PIECE_ELEMENTS.min(len - start);
        let wide = &mut room[..len];
        // SAFETY: as the caller promises; `start + len` stays within the elements.
        unsafe { reduce_piece::<T>(reduction, start, wide) };
        let results = R::results(wide, &mut results[..len]);
        for &output in outputs {
            // SAFETY: `start + len` stays within the elements that the caller vouches for.
            let mut output = unsafe { output.cast::<R>().add(start) };
            for part in results.chunks(COPY_BYTES / size_of::<R>()) {
                // SAFETY: all parts together have `len` elements; `results` is a local array, so nothing overlaps.
                unsafe {
                    std::ptr::copy_nonoverlapping(part.as_ptr(), output, part.len());
                    output = output.add(part.len());
                }
            }
        }
    }
}

/// Reduces the elements of all inputs from `start` on into `wide`.
///
/// # Safety
/// The requirements of [`reduce`], for inputs of type `T` that have these elements.
#[inline(always)] // compiled with the instructions of its caller
unsafe fn reduce_piece<T: Element>(
    Reduction { inputs, partial, op, addends, .. }: Reduction<'_>,
    start: usize,
    wide: &mut [T::Wide],
) {
    let len = wide.len();
    // SAFETY: `start + len` stays within the elements that the caller vouches for. No thread writes to them while the
    // slice lives: the results are written after it.
    let read = |input: *mut u8| unsafe { slice::from_raw_parts(input.cast::<T>().add(start), len) };
    if let Some(partial) = partial {
        // SAFETY: likewise.
        wide.copy_from_slice(unsafe {
            slice::from_raw_parts(partial.cast::<T::Wide>().add(start), len)
        });
    }

    // The first two inputs at once save a pass over the cache. Each operation has a loop of its own, so that the
    // choice is made outside of it.
    macro_rules! fold {
        ($load:expr, $combine:expr) => {{
            let further = match *inputs {
                ref all if partial.is_some() => all,
                [one, two, ref further @ ..] => {
                    let both = read(one).iter().zip(read(two));
                    for (w, (&a, &b)) in wide.iter_mut().zip(both) {
                        *w = $combine($load(a), $load(b));
                    }
                    further
                }
                [one] => {
                    wide.iter_mut().zip(read(one)).for_each(|(w, &x)| *w = $load(x));
                    &[]
                }
                [] => return,
            };
            for &input in further {
                for (w, &x) in wide.iter_mut().zip(read(input)) {
                    *w = $combine(*w, $load(x));
                }
            }
        }};
    }
    match op {
        ReduceOp::Sum => fold!(T::widen, T::add),
        ReduceOp::Avg => {
            fold!(T::widen, T::add);
            wide.iter_mut().for_each(|w| *w = T::divide(*w, addends));
        }
        ReduceOp::PremulSum(factor) => fold!(|x| T::scale(T::widen(x), factor), T::add),
        ReduceOp::Product => fold!(T::widen, T::multiply),
        ReduceOp::Min => fold!(T::widen, T::min),
        ReduceOp::Max => fold!(T::widen, T::max),
        ReduceOp::Band => fold!(T::widen, T::and),
        ReduceOp::Bor => fold!(T::widen, T::or),
        ReduceOp::Bxor => fold!(T::widen, T::xor),
    }
}

/// Returns the elements that a rank reduces for all: equal parts, in whole cache lines.
pub(crate) fn my_slice(numel: usize, rank: usize, world_size: usize) -> Range<usize> {
    let part = numel.div_ceil(world_size).next_multiple_of(64);
    let start = (part * rank).min(numel);
    start..(start + part).min(numel)
}

/// Returns the elements that a rank reduces for all in tensors of these lengths: its slice of all tensors in sequence.
/// Tensors whose lengths are multiples of a cache line are cut at cache lines only.
pub(crate) fn my_slices(
    lengths: impl Iterator<Item = usize> + Clone,
    rank: usize,
    world_size: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let slice = my_slice(lengths.clone().sum(), rank, world_size);
    in_tensors(lengths, slice)
}

/// Returns where the elements `range` of tensors of these lengths are, in sequence: the index of each tensor that has some,
/// and the range there.
pub(crate) fn in_tensors(
    lengths: impl Iterator<Item = usize> + Clone,
    range: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let starts = lengths.clone().scan(0, |end, len| Some(std::mem::replace(end, *end + len)));
    starts.zip(lengths).enumerate().filter_map(move |(index, (start, len))| {
        let from = range.start.clamp(start, start + len) - start;
        let to = range.end.clamp(start, start + len) - start;
        (from < to).then_some((index, from..to))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_slices_cover_every_element_once() {
        for numel in [0, 1, 63, 64, 65, 1000, 4096] {
            for world_size in 1..6 {
                let mut next = 0;
                for rank in 0..world_size {
                    let slice = my_slice(numel, rank, world_size);
                    assert_eq!(slice.start, next);
                    next = slice.end;
                }
                assert_eq!(next, numel);
            }
        }
    }

    #[test]
    fn rank_slices_of_several_tensors_cover_every_element_once() {
        for lengths in [&[][..], &[0], &[64, 128], &[5, 0, 70, 640], &[4096, 16, 16, 7]] {
            for world_size in 1..6 {
                let mut covered: Vec<Vec<usize>> =
                    lengths.iter().map(|&len| vec![0; len]).collect();
                for rank in 0..world_size {
                    for (index, range) in my_slices(lengths.iter().copied(), rank, world_size) {
                        covered[index][range].iter_mut().for_each(|times| *times += 1);
                    }
                }
                assert!(covered.iter().flatten().all(|&times| times == 1));
            }
        }
    }
}
