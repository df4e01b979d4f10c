//! The slice of a tensor that each rank, or each process, reduces for all.

use std::ops::Range;

/// Returns the elements that a rank reduces for all: equal parts, in whole cache lines.
pub(crate) fn my_slice(numel: usize, rank: usize, world_size: usize) -> Range<usize> {
    let part = numel.div_ceil(world_size).next_multiple_of(64);
    let start = (part * rank).min(numel);
    start..(start + part).min(numel)
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
}
