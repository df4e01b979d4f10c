//! Ranks, samples and numbers, as far as there is room for them.

/// Returns the ranks to show, `None` for a gap: all if they are few, otherwise the first ones and the last.
pub(super) fn shown(ranks: usize) -> Vec<Option<usize>> {
    if ranks <= 8 {
        return (0..ranks).map(Some).collect();
    }
    (0..6).map(Some).chain([None, Some(ranks - 1)]).collect()
}

/// Lists the first samples that there is room for. `count` is the number of all samples.
pub(super) fn samples(first: &[usize], count: usize) -> String {
    const ROOM: usize = 20;
    let listed = |len: usize| {
        let samples: Vec<String> = first[..len].iter().map(usize::to_string).collect();
        samples.join(" ") + if len < count { " ..." } else { "" }
    };
    let fitting = (1..=first.len()).map(listed).take_while(|text| text.len() <= ROOM);
    fitting.last().unwrap_or_else(|| listed(first.len().min(1)))
}

/// Formats all values with the same decimals, such that the largest has `digits` digits.
pub(super) fn numbers(values: &[f64], digits: i32) -> Vec<String> {
    let largest = values.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    let magnitude = if largest == 0.0 { -1 } else { largest.log10().floor() as i32 };
    let decimals = digits.saturating_sub(1).saturating_sub(magnitude).clamp(0, 15) as usize;
    values.iter().map(|value| format!("{value:.decimals$}")).collect()
}

/// Formats one number, exactly if that is short.
pub(super) fn number(value: f64) -> String {
    let exact = value.to_string();
    if exact.len() <= 10 { exact } else { numbers(&[value], 6).remove(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_column_have_equal_decimals() {
        assert_eq!(numbers(&[0.5, -0.25], 6), ["0.500000", "-0.250000"]);
        assert_eq!(numbers(&[12.5, 1.0], 6), ["12.5000", "1.0000"]);
        assert_eq!(numbers(&[0.0], 6), ["0.000000"]);
        assert_eq!(numbers(&[1.5e-9], 6), ["0.00000000150000"]);
        assert_eq!(number(0.001), "0.001");
        assert_eq!(number(1.0 / 3.0), "0.333333");
    }

    #[test]
    fn samples_beyond_the_width_are_left_out() {
        assert_eq!(samples(&[1, 2, 3], 3), "1 2 3");
        assert_eq!(samples(&[1, 2, 3], 32), "1 2 3 ...");
        assert_eq!(samples(&[123456, 234567, 345678, 4], 4), "123456 234567 ...");
        assert_eq!(shown(2), [Some(0), Some(1)]);
        assert_eq!(shown(64).last(), Some(&Some(63)));
    }
}
