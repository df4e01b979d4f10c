//! Shortens what is too long to show, with `...` in the middle.

/// The text for everything that is left out.
pub(super) const GAP: &str = "...";

/// Returns the numbers below `count`. If there are more than `most`, only the first and the last, with `None`
/// between.
pub(super) fn shorten(count: usize, most: usize) -> Vec<Option<usize>> {
    if count <= most {
        return (0..count).map(Some).collect();
    }
    let (first, last) = (most.div_ceil(2), most / 2);
    (0..first).map(Some).chain([None]).chain((count - last..count).map(Some)).collect()
}

/// Returns `item` of each of [`shorten`]'s numbers, and [`GAP`] for `None`.
pub(super) fn items(count: usize, most: usize, item: impl Fn(usize) -> String) -> Vec<String> {
    shorten(count, most).into_iter().map(|i| i.map_or(GAP.into(), &item)).collect()
}

/// Returns the ranks to show, with `None` for those left out.
pub(super) fn ranks(world_size: usize) -> Vec<Option<usize>> {
    shorten(world_size, if world_size <= 8 { 8 } else { 6 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_list_omits_only_the_middle() {
        let shown = |count, most| items(count, most, |i| i.to_string()).join(" ");
        assert_eq!(shown(0, 2), "");
        assert_eq!(shown(3, 3), "0 1 2");
        assert_eq!(shown(4, 3), "0 1 ... 3");
        assert_eq!(shown(1000, 2), "0 ... 999");
        assert_eq!(shown(1000, 4), "0 1 ... 998 999");
    }
}
