//! The page of a report: its HTML with the data of a run.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::tracks::Tracks;
use crate::curve::Curve;
use crate::whole_file::{Marks, Output};
use engine::records::{TrainMetrics, ValidationMetrics};

/// The page's HTML, and the parts that are inserted into it.
const HTML: &str = include_str!("page.html");
const PARTS: [(&str, &str); 2] =
    [("__REPORT_CSS__", include_str!("page.css")), ("__REPORT_JS__", SCRIPT)];
/// The page's script, in reading order.
const SCRIPT: &str = concat!(
    include_str!("helpers.js"),
    include_str!("verdict.js"),
    include_str!("curves.js"),
    include_str!("timeline.js"),
    include_str!("samples.js"),
    include_str!("page.js"),
);
const DATA: &str = "__REPORT_DATA__";

/// The most points of a curve.
const POINTS: usize = 4000;

/// The data of a page: its scripts know each value by its key.
#[derive(Debug, Serialize)]
pub(crate) struct Page<'a> {
    /// All but the two below.
    #[serde(flatten)]
    pub data: Value,
    #[serde(flatten)]
    pub curves: &'a Curves,
    pub timeline: Tracks<'a>,
}

/// Training and validation metrics over the run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Curves {
    pub train: Curve<TrainMetrics, POINTS>,
    pub validation: Vec<ValidationMetrics>,
}

impl Curves {
    /// Returns the points until `step` of the page that an earlier run has written to `output`; none if there is none.
    pub(crate) fn of_earlier(output: &Output, step: u64) -> Self {
        let page = fs::read_to_string(output.path()).unwrap_or_default();
        // The data is escaped, so that its script ends where no other text can.
        let data = HTML.split_once(DATA).and_then(|(before, after)| {
            let begin = before.lines().last()?;
            let end = after.lines().next()?;
            Some(page.split_once(begin)?.1.split_once(end)?.0)
        });
        let data = data.and_then(|data| serde_json::from_str(data).ok());
        let data: Value = data.unwrap_or_default();
        let train = points::<TrainMetrics>(&data["train"]).filter(|point| point.step <= step);
        let validation = points::<ValidationMetrics>(&data["validation"]);
        Self {
            train: train.collect(),
            validation: validation.filter(|point| point.step <= step).collect(),
        }
    }

    /// Returns the mean loss of the first quarter of the steps, and of the last. `None` with fewer than four points.
    pub(crate) fn losses(&self) -> Option<[f64; 2]> {
        let [first, _, _, .., last] = &self.train[..] else { return None };
        let quarter = last.step.saturating_sub(first.step) / 4;
        let from_first = self.train.partition_point(|point| point.step <= first.step + quarter);
        let before_last =
            self.train.partition_point(|point| point.step < last.step.saturating_sub(quarter));
        let mean = |points: &[TrainMetrics]| {
            points.iter().map(|point| point.loss).sum::<f64>() / points.len() as f64
        };
        Some([&self.train[..from_first], &self.train[before_last..]].map(mean))
    }
}

/// Returns the points of a curve, without those that are not finite.
fn points<T: DeserializeOwned>(curve: &Value) -> impl Iterator<Item = T> {
    curve.as_array().into_iter().flatten().filter_map(|point| T::deserialize(point).ok())
}

impl Page<'_> {
    /// Returns the file of a page at `path`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn output(path: &Path) -> io::Result<Output> {
        let (first_lines, _) = HTML.split_once("\n<html").unwrap_or((HTML, ""));
        Output::new(path, Marks { begins: first_lines, before: "<!-- xxh3 ", after: " -->\n" })
    }

    /// Writes the page.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        // Escaped: no text in the data can end the script.
        let data = serde_json::to_string(self)?.replace('<', "\\u003c");
        let page =
            PARTS.iter().fold(HTML.to_owned(), |page, (place, part)| page.replace(place, part));
        // Inserted last, so that its text is not taken for a placeholder.
        out.write_all(page.replacen(DATA, &data, 1).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_and_last_quarter_are_those_of_the_steps() {
        // As after a resume: the earlier run has left fewer points for as many steps.
        let steps = (0..1000).step_by(100).chain(1000..=2000);
        let point = |step| TrainMetrics { step, loss: step as f64, ..TrainMetrics::default() };
        let curves = Curves { train: steps.map(point).collect(), ..Curves::default() };
        assert_eq!(curves.losses(), Some([250.0, 1750.0]));
        let three = Curves { train: (0..3).map(point).collect(), ..Curves::default() };
        assert_eq!(three.losses(), None);
    }
}
