//! The file of `--prometheus`: the latest metrics in Prometheus' text format, for the node exporter's textfile collector.
//!
//! Each write replaces the whole file, so that the collector never reads a part of one.

use std::fmt::Display;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use strum::IntoEnumIterator;

use super::whole_file::{Marks, Output};
use super::{Outcome, RunState, View};
use engine::error::Result;
use engine::events::{End, Event, Observer, RankEnd, Straggler, Wants};
use engine::records::{TrainMetrics, ValidationMetrics};

const MARKS: Marks = Marks { begins: "# HELP ddpmp_", before: "# ddp-mp ", after: "\n" };

/// What is known of a run before its first step.
#[derive(Debug, Clone)]
pub struct RunFacts {
    /// The model's name.
    pub model: &'static str,
    /// The communication backend.
    pub backend: &'static str,
    /// Number of ranks.
    pub world_size: usize,
    /// The number of restarts before this start.
    pub restarts: usize,
}

/// The file, and the latest metrics.
#[derive(Debug)]
pub struct Prometheus {
    output: Output,
    /// The file's name without its ending: the label `run`, which differs between the files of one folder.
    run: String,
    facts: RunFacts,
    began: SystemTime,
    latest: Mutex<Latest>,
}

/// The latest metrics. `None` if there are none yet.
#[derive(Debug, Default)]
struct Latest {
    state: RunState,
    /// The steps that had been made at the start.
    first_step: u64,
    train: Option<TrainMetrics>,
    validation: Option<ValidationMetrics>,
    /// How the run went. `None` until it is over, and if it failed.
    end: Option<End>,
    /// Whether the file could not be written at some time.
    has_failed: bool,
}

impl Prometheus {
    /// Checks that a file can be written at `path`. Writes nothing.
    ///
    /// # Errors
    /// When it cannot.
    pub fn new(path: &Path, facts: RunFacts) -> io::Result<Self> {
        let output = Output::new(path, MARKS)?;
        let run = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { output, run, facts, began: SystemTime::now(), latest: Mutex::default() })
    }

    /// Changes the latest metrics, and writes them.
    fn write(&self, update: impl FnOnce(&mut Latest)) -> Result<()> {
        let mut latest = self.latest.lock();
        update(&mut latest);
        let text = self.text(&latest, SystemTime::now());
        let written = self.output.write_for("--prometheus", |file| file.write_all(text.as_bytes()));
        latest.has_failed |= written.is_err();
        written
    }

    /// Returns all metrics as text. A metric without a value is left out.
    fn text(&self, latest: &Latest, now: SystemTime) -> String {
        let Self { facts, began, .. } = self;
        let Latest { state, first_step, train, validation, end, .. } = latest;
        let (train, validation) = (train.as_ref(), validation.as_ref());
        let program = label("version", env!("CARGO_PKG_VERSION"))
            + &label("model", facts.model)
            + &label("backend", facts.backend);
        let states = RunState::iter()
            .map(|one| (label("state", <&str>::from(one)), f64::from(u8::from(one == *state))));
        let help = "Version, model and backend of the run";
        let mut text = self.metric("run_info", help, [(program, 1.0)]);
        text += &self.metric("run_state", "State of the run: 1 for the current one", states);
        let step = train.map_or(*first_step, |train| train.step);
        let step = step.max(end.as_ref().map_or(0, |end| end.steps)) as f64;
        let skipped = train.and_then(|it| it.skipped_steps).map(|steps| steps as f64);
        let grad_norm = train.and_then(|it| it.grad_norm);
        let bits = validation.and_then(|it| it.bits_per_token);
        let accuracy = validation.and_then(|it| it.accuracy);
        for (name, help, value) in [
            ("start_time_seconds", "Time of this start, since the epoch", seconds(*began)),
            (
                "last_update_time_seconds",
                "Time of the last update of this file, since the epoch",
                seconds(now),
            ),
            ("ranks", "Number of ranks", Some(facts.world_size as f64)),
            ("restarts_total", "Restarts after a failure", Some(facts.restarts as f64)),
            ("steps_total", "Steps of the run, with those before a resume", Some(step)),
            ("skipped_steps_total", "Steps skipped because a value was not finite", skipped),
            ("epoch", "Epoch, from 0", train.map(|it| it.epoch as f64)),
            ("loss", "Mean loss since the last update", train.map(|it| it.loss)),
            ("learning_rate", "Learning rate of the last step", train.map(|it| it.lr)),
            ("gradient_norm", "Norm of the last step's gradients", grad_norm),
            ("step_seconds", "Mean duration of a step", train.map(|it| it.step_us / 1e6)),
            ("samples_per_second", "Samples of all ranks", train.map(|it| it.samples_per_second)),
            ("tokens_per_second", "Tokens of all ranks", train.and_then(|it| it.tokens_per_second)),
            ("validation_loss", "Loss of the last validation", validation.map(|it| it.loss)),
            ("validation_bits_per_token", "Loss of the last validation in bits", bits),
            ("validation_accuracy", "Accuracy of the last validation, from 0 to 1", accuracy),
        ] {
            text += &self.metric(name, help, value.map(|value| (String::new(), value)));
        }
        let metrics = validation.into_iter().flat_map(|it| &it.metrics);
        let metrics = metrics.map(|(name, value)| (label("name", name), *value));
        let help = "A metric of the program, of the last validation";
        text += &self.metric("validation_metric", help, metrics);
        text + &end.as_ref().map_or(String::new(), |end| self.text_of_ranks(end))
    }

    /// Returns the metrics of the ranks, as text, which are known at the end of the run.
    fn text_of_ranks(&self, end: &End) -> String {
        let by_rank = |value: fn(&RankEnd) -> f64| {
            let values = end.ranks.iter().map(value).enumerate();
            values.map(|(rank, value)| (label("rank", rank), value))
        };
        let help = "Time that a rank waited for data, at the end of the run";
        let waits = by_rank(|rank| rank.data_wait_seconds);
        let mut text = self.metric("rank_data_wait_seconds", help, waits);
        let help = "Time of a rank in collectives, with waiting, at the end of the run";
        let collectives = by_rank(|rank| rank.phases.collectives);
        text += &self.metric("rank_collective_seconds", help, collectives);
        let help = "Time that the others waited for the straggler";
        let labels = |it: &Straggler| label("rank", it.rank) + &label("phase", it.phase);
        let straggler = end.straggler.as_ref().map(|it| (labels(it), it.seconds));
        text + &self.metric("straggler_seconds", help, straggler)
    }

    /// Returns the lines of a metric, if there is any sample of it: its labels besides `run`, and its value. One whose name
    /// ends with `_total` is a counter.
    fn metric(
        &self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (String, f64)>,
    ) -> String {
        let run = in_quotes(&self.run);
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        let line = |(labels, value): (String, f64)| {
            let value = match value {
                f64::INFINITY => "+Inf".into(),
                f64::NEG_INFINITY => "-Inf".into(),
                finite => finite.to_string(),
            };
            format!("ddpmp_{name}{{run=\"{run}\"{labels}}} {value}\n")
        };
        let lines: String = samples.into_iter().map(line).collect();
        if lines.is_empty() {
            return lines;
        }
        format!("# HELP ddpmp_{name} {help}\n# TYPE ddpmp_{name} {kind}\n{lines}")
    }
}

impl Observer for Prometheus {
    fn wants(&self) -> Wants {
        Wants { metrics: true, ..Wants::default() }
    }

    fn event(&self, event: &Event) -> anyhow::Result<()> {
        match event {
            Event::Training(training) => self.write(|latest| latest.first_step = training.step)?,
            Event::Metrics(metrics) => self.write(|latest| latest.train = Some(metrics.clone()))?,
            Event::Validation(metrics) => {
                self.write(|latest| latest.validation = Some(metrics.clone()))?;
            }
            Event::End(end) => self.latest.lock().end = Some((**end).clone()),
            _ => {}
        }
        Ok(())
    }
}

impl View for Prometheus {
    /// Writes how the run has ended. A failure is no error here if an earlier write has failed, too: the run has ended with
    /// that error.
    fn finish(&self, outcome: &Outcome) -> Result<()> {
        let has_failed = self.latest.lock().has_failed;
        let written = self.write(|latest| latest.state = outcome.kind);
        if has_failed { Ok(()) } else { written }
    }
}

fn seconds(time: SystemTime) -> Option<f64> {
    time.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64())
}

/// Returns a label as it follows another.
fn label(name: &str, value: impl Display) -> String {
    format!(",{name}=\"{}\"", in_quotes(&value))
}

/// Returns a label's value as it is written between quotes.
fn in_quotes(value: &impl Display) -> String {
    value.to_string().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    fn file(path: &Path) -> Prometheus {
        let facts = RunFacts { model: "mlp", backend: "gloo", world_size: 2, restarts: 1 };
        let began = UNIX_EPOCH + Duration::from_millis(1500);
        Prometheus { began, ..Prometheus::new(path, facts).unwrap() }
    }

    #[test]
    fn text_has_the_format_of_prometheus() {
        let folder = tempfile::tempdir().unwrap();
        let file = file(&folder.path().join("a \"b\"\\c\n.prom"));
        let mut latest = Latest { first_step: 7, ..Latest::default() };
        let now = UNIX_EPOCH + Duration::from_secs(3);
        let version = env!("CARGO_PKG_VERSION");
        let run = "run=\"a \\\"b\\\"\\\\c\\n\"";
        let first = format!(
            "# HELP ddpmp_run_info Version, model and backend of the run\n\
             # TYPE ddpmp_run_info gauge\n\
             ddpmp_run_info{{{run},version=\"{version}\",model=\"mlp\",backend=\"gloo\"}} 1\n\
             # HELP ddpmp_run_state State of the run: 1 for the current one\n\
             # TYPE ddpmp_run_state gauge\n\
             ddpmp_run_state{{{run},state=\"running\"}} 1\n\
             ddpmp_run_state{{{run},state=\"done\"}} 0\n\
             ddpmp_run_state{{{run},state=\"stopped\"}} 0\n\
             ddpmp_run_state{{{run},state=\"failed\"}} 0\n\
             # HELP ddpmp_start_time_seconds Time of this start, since the epoch\n\
             # TYPE ddpmp_start_time_seconds gauge\n\
             ddpmp_start_time_seconds{{{run}}} 1.5\n\
             # HELP ddpmp_last_update_time_seconds Time of the last update of this file, since the epoch\n\
             # TYPE ddpmp_last_update_time_seconds gauge\n\
             ddpmp_last_update_time_seconds{{{run}}} 3\n\
             # HELP ddpmp_ranks Number of ranks\n\
             # TYPE ddpmp_ranks gauge\n\
             ddpmp_ranks{{{run}}} 2\n\
             # HELP ddpmp_restarts_total Restarts after a failure\n\
             # TYPE ddpmp_restarts_total counter\n\
             ddpmp_restarts_total{{{run}}} 1\n\
             # HELP ddpmp_steps_total Steps of the run, with those before a resume\n\
             # TYPE ddpmp_steps_total counter\n\
             ddpmp_steps_total{{{run}}} 7\n"
        );
        assert_eq!(file.text(&latest, now), first);
        latest.train = Some(TrainMetrics {
            step: 20,
            epoch: 1,
            loss: f64::INFINITY,
            lr: 1e-6,
            grad_norm: Some(f64::NAN),
            skipped_steps: None,
            step_us: 250.0,
            samples_per_second: 1234.5,
            tokens_per_second: None,
        });
        let text = file.text(&latest, now);
        for (name, value) in [
            ("steps_total", "20"),
            ("epoch", "1"),
            ("loss", "+Inf"),
            ("learning_rate", "0.000001"),
            ("gradient_norm", "NaN"),
            ("step_seconds", "0.00025"),
            ("samples_per_second", "1234.5"),
        ] {
            assert!(text.contains(&format!("\nddpmp_{name}{{{run}}} {value}\n")), "{text}");
        }
        assert!(!text.contains("skipped") && !text.contains("tokens"), "{text}");
        assert!(!text.contains("validation"), "{text}");
        latest.validation = Some(ValidationMetrics {
            step: 20,
            epoch: 1,
            loss: 0.5,
            bits_per_token: None,
            accuracy: None,
            metrics: [("a \"b\"".into(), 0.25), ("f1".into(), f64::NAN)].into(),
            best: true,
        });
        let text = file.text(&latest, now);
        let expected = format!(
            "ddpmp_validation_metric{{{run},name=\"a \\\"b\\\"\"}} 0.25\n\
             ddpmp_validation_metric{{{run},name=\"f1\"}} NaN\n"
        );
        assert!(text.ends_with(&expected), "{text}");
        assert_eq!(text.matches("TYPE ddpmp_validation_metric gauge").count(), 1, "{text}");
    }

    #[test]
    fn file_is_replaced_whole_and_no_other_file_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/run.prom");
        let read = || fs::read_to_string(&path).unwrap();
        let failed = Outcome { kind: RunState::Failed, text: String::new() };
        let first = file(&path);
        assert!(!path.exists());
        first.write(|latest| latest.first_step = 3).unwrap();
        assert!(read().contains("ddpmp_steps_total{run=\"run\"} 3\n"), "{}", read());
        first.finish(&failed).unwrap();
        assert!(read().contains("{run=\"run\",state=\"failed\"} 1\n"), "{}", read());
        file(&path).write(|_| ()).unwrap(); // that of a later start
        assert!(read().contains("{run=\"run\",state=\"failed\"} 0\n"), "{}", read());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        fs::write(&path, "other_metric 1\n").unwrap();
        let error = first.write(|_| ()).unwrap_err().to_string();
        assert!(error.contains("--prometheus") && error.contains("did not write that file"));
        first.finish(&failed).unwrap(); // that failure is known
        assert_eq!(read(), "other_metric 1\n");
    }
}
