//! The slice of a tensor that each rank, or each process, reduces for all.

use std::ops::Range;

/// Returns the elements that a rank reduces for all: equal parts, in whole cache lines.
pub(crate) fn my_slice(numel: usize, rank: usize, world_size: usize) -> Range<usize> {
    let part = numel.div_ceil(world_size).next_multiple_of(64);
    let start = (part * rank).min(numel);
    start..(start + part).min(numel)
}

/// Returns the elements that a rank reduces for all in tensors of these lengths: its slice of all tensors in sequence,
/// as the index of each tensor that it touches and the range there. Tensors whose lengths are multiples of a cache line
/// are cut at cache lines only.
pub(crate) fn my_slices(
    lengths: impl Iterator<Item = usize> + Clone,
    rank: usize,
    world_size: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let slice = my_slice(lengths.clone().sum(), rank, world_size);
    let starts = lengths.clone().scan(0, |end, len| Some(std::mem::replace(end, *end + len)));
    starts.zip(lengths).enumerate().filter_map(move |(index, (start, len))| {
        let from = slice.start.clamp(start, start + len) - start;
        let to = slice.end.clamp(start, start + len) - start;
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
