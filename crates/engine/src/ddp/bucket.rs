//! The assignment of parameters to buckets: pure arithmetic, no tensors.

use tch::Kind;

/// The properties of a parameter that determine its bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub dtype: Kind,
    pub num_bytes: usize,
}

/// Assigns parameters to buckets in the given order. A bucket holds one dtype and is closed when it reaches its
/// capacity, in bytes. The buckets of each dtype take their capacities from `caps` in order; the last one applies to
/// all further buckets.
///
/// Follows `torch::dist::compute_bucket_assignment_by_size`. Returns indices into `sizes`, each exactly once, with the
/// buckets in the order in which they were opened.
pub(super) fn assign(sizes: &[Size], caps: &[usize]) -> Vec<Vec<usize>> {
    struct Open {
        dtype: Kind,
        bucket: Option<usize>,
        num_bytes: usize,
        /// The number of buckets of its dtype that were closed before.
        closed: usize,
    }
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    for (index, size) in sizes.iter().enumerate() {
        let at = open.iter().position(|o| o.dtype == size.dtype).unwrap_or_else(|| {
            open.push(Open { dtype: size.dtype, bucket: None, num_bytes: 0, closed: 0 });
            open.len() - 1
        });
        let current = &mut open[at];
        let bucket = *current.bucket.get_or_insert_with(|| {
            buckets.push(Vec::new());
            buckets.len() - 1
        });
        buckets[bucket].push(index);
        current.num_bytes += size.num_bytes;
        let cap = caps.get(current.closed).or(caps.last());
        if cap.is_some_and(|&cap| current.num_bytes >= cap) {
            *current = Open { bucket: None, num_bytes: 0, closed: current.closed + 1, ..*current };
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(sizes: &[usize]) -> Vec<Size> {
        sizes.iter().map(|&num_bytes| Size { dtype: Kind::Float, num_bytes }).collect()
    }

    #[test]
    fn small_model_gets_one_bucket() {
        assert_eq!(assign(&floats(&[80, 4]), &[1 << 20, 25 << 20]), [[0, 1]]);
    }

    #[test]
    fn bucket_closes_when_it_reaches_its_cap() {
        // The first parameter reaches the first capacity; the next two reach the second.
        assert_eq!(assign(&floats(&[10, 50, 60, 7]), &[10, 100]), [vec![0], vec![1, 2], vec![3]]);
        // A parameter larger than the capacity fits: a bucket closes after the parameter that reaches its capacity.
        assert_eq!(assign(&floats(&[5, 1000, 5]), &[10, 100]), [vec![0, 1], vec![2]]);
    }

    #[test]
    fn bucket_caps_apply_in_order_and_the_last_repeats() {
        let sizes = floats(&[4; 10]);
        let expected = [vec![0], vec![1, 2, 3], vec![4, 5], vec![6, 7], vec![8, 9]];
        assert_eq!(assign(&sizes, &[1, 12, 8]), expected);
        assert_eq!(assign(&floats(&[4; 3]), &[8]), [vec![0, 1], vec![2]]);
    }

    #[test]
    fn bucket_holds_one_dtype() {
        let mut sizes = floats(&[4, 4, 4]);
        sizes[1].dtype = Kind::Double;
        assert_eq!(assign(&sizes, &[100, 100]), [vec![0, 2], vec![1]]);
    }

    #[test]
    fn every_parameter_is_in_exactly_one_bucket() {
        for count in 0..30 {
            let sizes: Vec<usize> = (0..count).map(|i| (i * 37) % 50).collect();
            let mut seen: Vec<usize> =
                assign(&floats(&sizes), &[20, 60]).into_iter().flatten().collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..count).collect::<Vec<_>>());
        }
    }
}
