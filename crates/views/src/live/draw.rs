//! Draws the state of the live view into a frame of any size.

use std::io;
use std::time::Duration;

use anstream::{AutoStream, ColorChoice};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, Paragraph, Wrap};
use strum::IntoEnumIterator;

use super::lanes::Phase;
use super::state::LiveState;
use crate::train_texts;

/// Whether the view uses colours. Its letters say the same.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Theme {
    pub colours: bool,
}

impl Theme {
    /// Returns the theme that the environment asks for: `NO_COLOR`, `CLICOLOR` and `CLICOLOR_FORCE`, as `--help` reads
    /// them, too.
    pub(crate) fn from_env() -> Self {
        Self { colours: AutoStream::choice(&io::stderr()) != ColorChoice::Never }
    }

    /// Returns the letter of `phase`, `times` times.
    fn letters(self, phase: Phase, times: usize) -> Span<'static> {
        let (letter, colour) = phase.look();
        let text = letter.to_string().repeat(times);
        let Some(colour) = colour.filter(|_| self.colours) else { return Span::raw(text) };
        let ink = if phase == Phase::Waiting { Color::White } else { Color::Black };
        Span::styled(text, Style::new().bg(colour).fg(ink))
    }

    /// Returns the style of text in `colour`.
    fn ink(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }
}

/// Draws `state` into all of `frame`.
pub(crate) fn draw(frame: &mut Frame<'_>, state: &LiveState, theme: Theme) {
    let area = frame.area();
    let footer_height = u16::from(area.height >= 4);
    let header_height = area.height.saturating_sub(footer_height).min(3);
    let rest = area.height - footer_height - header_height;
    let lanes_height = (state.lanes.len() as u16).saturating_add(2);
    // The panels below many lanes need ten lines to be of use.
    let most = if rest >= 20 { rest - 10 } else { rest };
    let [header, lanes, panels, footer] = Layout::vertical([
        Constraint::Length(header_height),
        Constraint::Length(lanes_height.min(most)),
        Constraint::Min(0),
        Constraint::Length(footer_height),
    ])
    .areas(area);
    draw_header(frame, header, state, theme);
    draw_lanes(frame, lanes, state, theme);
    if panels.height >= 8 {
        let [curve, events] = Layout::vertical([Constraint::Fill(1); 2]).areas(panels);
        draw_curve(frame, curve, state, theme);
        draw_events(frame, events, state);
    } else if panels.height >= 3 {
        draw_events(frame, panels, state);
    }
    let keys = if state.has_ended {
        "the run has ended; any key closes this view"
    } else {
        "q stop after this step  up/down more ranks"
    };
    frame.render_widget(Paragraph::new(keys), footer);
}

fn draw_header(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut first = vec![state.title.clone()];
    first.extend(state.step.map(|step| {
        let percent = |all: u64| format!(" of {all} ({:.0} %)", 100.0 * step as f64 / all as f64);
        let of_all = state.steps.filter(|steps| *steps > 0).map(percent);
        format!("step {step}{}", of_all.unwrap_or_default())
    }));
    first.push(format!("{} passed", clock(state.now)));
    first.extend(state.time_left().map(|left| format!("{} left", clock(left))));
    let mut second = state.metrics.as_ref().map_or(Vec::new(), |it| train_texts(it).to_vec());
    second.extend(state.steps_per_second().map(|rate| format!("{rate:.1} steps/s")));
    let failed = state.failed.map(|rank| format!("rank {rank} has failed; the run ends"));
    let third = match failed.or_else(|| state.straggler()) {
        Some(note) => Line::styled(note, bold.patch(theme.ink(Color::LightRed))),
        None => Line::raw("no rank keeps the others waiting"),
    };
    let [first, second] = [first, second].map(|parts| parts.join("  "));
    let [first, second] = [&first, &second].map(|line| shortened(line, area.width.into()));
    let lines = vec![Line::styled(first, bold), Line::raw(second), third];
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_lanes(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let legend = Phase::iter().take_while(|phase| *phase != Phase::Start).flat_map(|phase| {
        let name: &str = phase.into();
        [theme.letters(phase, 1), Span::raw(format!(" {name} "))]
    });
    let block = Block::bordered()
        .title("ranks: now, % of the time in collectives, and the last seconds")
        .title_bottom(legend.collect::<Line<'_>>());
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let height = usize::from(inner.height);
    let widest = state.lanes.iter().map(|lane| lane.text.chars().count()).max().unwrap_or(0);
    // The text keeps its width while the view is shown: lanes that jump are hard to read.
    let text_width = widest.clamp(24, 60).min(usize::from(inner.width) * 2 / 5).max(1);
    let first = state.first_lane.min(state.lanes.len().saturating_sub(height));
    let rows = state.lanes.iter().enumerate().skip(first).take(height);
    for ((rank, lane), y) in rows.zip(inner.y..) {
        // `CPU:1` of `CPU:1 on host, process 7`.
        let label = state.labels.get(rank).and_then(|label| label.split(' ').next()).unwrap_or("");
        let share =
            state.share(rank).map_or("   -".into(), |share| format!("{:3.0}%", 100.0 * share));
        let text = shortened(&lane.text, text_width);
        let mut spans = vec![
            Span::raw(format!("{rank} {label} ")),
            theme.letters(lane.phase, 1),
            Span::raw(format!(" {text:text_width$} {share} ")),
        ];
        let used: usize = spans.iter().map(|span| span.content.chars().count()).sum();
        let moments = usize::from(inner.width).saturating_sub(used).min(state.history.len());
        let newest = state.history.range(state.history.len() - moments..);
        let phases: Vec<Phase> =
            newest.map(|phases| phases.get(rank).copied().unwrap_or_default()).collect();
        let runs = phases.chunk_by(|a, b| a == b);
        spans.extend(runs.map(|run| theme.letters(run[0], run.len())));
        frame.render_widget(Line::from(spans), Rect { y, height: 1, ..inner });
    }
}

/// Draws the losses over the steps.
fn draw_curve(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let points: Vec<(f64, f64)> =
        state.curve.iter().copied().filter(|(_, loss)| loss.is_finite()).collect();
    let block = Block::bordered().title("loss");
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        let text = "the first loss comes after --log-every steps, or at the end of the epoch";
        let text = Paragraph::new(text).wrap(Wrap { trim: true });
        return frame.render_widget(text.block(block), area);
    };
    let least = points.iter().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
    let most = points.iter().map(|(_, loss)| *loss).fold(f64::NEG_INFINITY, f64::max);
    // A flat curve lies in the middle.
    let margin = if most > least { 0.0 } else { least.abs().max(1e-9) };
    let steps = [first.0, last.0.max(first.0 + 1.0)];
    let losses = [least - margin, most + margin];
    let dataset = Dataset::default()
        .marker(if points.len() < 2 { Marker::Dot } else { Marker::Braille })
        .graph_type(GraphType::Line)
        .style(theme.ink(Color::LightGreen))
        .data(&points);
    let label = |loss: f64| Line::raw(format!("{loss:.4}"));
    let chart = Chart::new(vec![dataset])
        .block(block)
        .x_axis(Axis::default().bounds(steps).labels(steps.map(|step| format!("{step:.0}"))))
        .y_axis(Axis::default().bounds(losses).labels(losses.map(label)));
    frame.render_widget(chart, area);
}

/// Draws the newest events, the newest at the bottom, each cut at the end of a word.
fn draw_events(frame: &mut Frame<'_>, area: Rect, state: &LiveState) {
    let block = Block::bordered().title("events");
    let inner = block.inner(area);
    let skipped = state.events.len().saturating_sub(inner.height.into());
    let line = |(at, text): &(Duration, String)| {
        let text = text.strip_prefix("ddp-mp: ").unwrap_or(text);
        let line = format!("{:8.2} {text}", at.as_secs_f64());
        Line::raw(shortened(&line, inner.width.into()).to_owned())
    };
    let lines: Vec<Line<'_>> = state.events.iter().skip(skipped).map(line).collect();
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// Returns `text` in at most `width` characters, cut at the end of a word if possible, and not within parentheses.
fn shortened(text: &str, width: usize) -> &str {
    let Some((end, next)) = text.char_indices().nth(width) else { return text };
    let kept = &text[..end];
    let words = match kept.rsplit_once(' ') {
        Some((words, _)) if !matches!(next, ' ' | ':') => words,
        _ => kept,
    };
    let complete = match words.rsplit_once(" (") {
        Some((before, inside)) if !inside.contains(')') => before,
        _ => words,
    };
    complete.trim_end_matches(':')
}

/// Returns a time as `1:02:03` or `2:03`.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::style::Color;

    use super::*;
    use engine::events::{RankSnapshot, RunSnapshot, Source};
    use engine::operation::{OpId, Operation};
    use engine::records::TrainMetrics;
    use engine::runtime::OpEntry;

    /// Rank 1 is late: the others wait for it in all_reduce #2.
    fn snapshot(ranks: usize) -> RunSnapshot {
        let op = |operation, sequence, group, from, to: Option<u64>| OpEntry {
            group,
            bucket: group.map(|_| 0),
            finished_at: to.map(Duration::from_millis),
            ..OpEntry::new(OpId { operation, sequence }, Duration::from_millis(from))
        };
        let of_rank = |rank: usize| {
            let mut ops = vec![
                op(Operation::Step, 40, None, 0, Some(1)),
                op(Operation::Backward, 40, None, 1, Some(100)),
                op(Operation::Step, 41, None, 100, (rank != 1).then_some(101)),
            ];
            if rank != 1 {
                ops.push(op(Operation::Backward, 41, None, 101, None));
                ops.push(op(Operation::AllReduce, 2, Some(0), 110, None));
            }
            let at = OpId { operation: Operation::UserCode, sequence: 0 };
            RankSnapshot { at, ops, source: Source::Direct }
        };
        RunSnapshot {
            now: Duration::from_millis(200),
            ranks: (0..ranks).map(of_rank).collect(),
            groups: [(0, (0..ranks).collect())].into(),
            failed: None,
        }
    }

    fn state(snapshot: &RunSnapshot) -> LiveState {
        let labels = (0..snapshot.ranks.len()).map(|rank| format!("CPU:{rank}")).collect();
        let title = "mlp on ranks".into();
        let mut state = LiveState { title, labels, ..LiveState::default() };
        for _ in 0..12 {
            state.update(snapshot);
        }
        state.steps = Some(100);
        let all = TrainMetrics { lr: 0.1, samples_per_second: 9.0, ..TrainMetrics::default() };
        let point = |step, loss| TrainMetrics { step, loss, ..all.clone() };
        state.add_points(vec![point(1, 2.0), point(2, f64::NAN), point(3, 1.0)]);
        state.add_events(Duration::ZERO, vec!["CPU:0 | Epoch: 0".into()]);
        state
    }

    fn drawn(state: &LiveState, size: [u16; 2], colours: bool) -> Terminal<TestBackend> {
        let mut terminal = Terminal::new(TestBackend::new(size[0], size[1])).unwrap();
        terminal.draw(|frame| draw(frame, state, Theme { colours })).unwrap();
        terminal
    }

    fn text(terminal: &Terminal<TestBackend>) -> String {
        let buffer = terminal.backend().buffer();
        let rows = buffer.content().chunks(usize::from(buffer.area.width));
        rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>() + "\n").collect()
    }

    #[test]
    fn view_says_who_waits_for_whom_in_letters_at_both_sizes() {
        for size in [[80, 24], [200, 60]] {
            let terminal = drawn(&state(&snapshot(4)), size, false);
            let text = text(&terminal);
            for part in [
                "mlp on ranks  step 41 of 100 (41 %)",
                "the others wait for rank 1: in collectives 0 % of the time, they 100 %",
                "loss 1.0000  lr 1.000e-1  9 samples/s",
                "0 CPU:0 W waits for rank 1",
                "1 CPU:1 S step #41 0.1 s",
                "WWWW",
                "SSSS",
                "S step D data F forward",
                "CPU:0 | Epoch: 0",
                "q stop after this step",
            ] {
                assert!(text.contains(part), "{part:?} is not in\n{text}");
            }
            let cells = terminal.backend().buffer().content();
            assert!(cells.iter().all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset)));
        }
        let cells = drawn(&state(&snapshot(4)), [80, 24], true);
        let cells = cells.backend().buffer().content();
        assert!(cells.iter().any(|cell| cell.symbol() == "W" && cell.bg == Color::DarkGray));
    }

    #[test]
    fn numbers_are_shown_whole_or_not_at_all() {
        let mut snapshot = snapshot(4);
        for op in &mut snapshot.ranks[2].ops {
            op.at.sequence += 123_456;
        }
        let mut state = state(&snapshot);
        state.add_events(Duration::ZERO, vec!["epoch 0: loss 0.123456".into()]);
        let known = ["123456", "123458", "123496", "123497", "0.123456"];
        for width in 30..130 {
            let text = text(&drawn(&state, [width, 40], false));
            for start in ["1234", "0.1234"] {
                let mut found = text.match_indices(start).map(|(at, _)| &text[at..]);
                let cut = found.find(|rest| !known.iter().any(|known| rest.starts_with(known)));
                assert_eq!(cut, None, "{width}");
            }
        }
    }

    #[test]
    fn view_can_be_drawn_at_any_size() {
        for ranks in [0, 1, 3, 300] {
            let state = state(&snapshot(ranks));
            for width in (1..20).chain([40, 79, 80, 119, 120, 200, 500]) {
                for height in (1..14).chain([23, 24, 60, 200]) {
                    drawn(&state, [width, height], true);
                }
            }
        }
    }

    #[test]
    fn lanes_that_have_no_room_are_scrolled_to() {
        let mut state = state(&snapshot(300));
        state.scroll(250);
        assert!(text(&drawn(&state, [80, 24], false)).contains("250 CPU:250 W waits"));
        state.scroll(300);
        assert!(text(&drawn(&state, [80, 24], false)).contains("299 CPU:299 W waits"));
        state.scroll(-300);
        assert!(text(&drawn(&state, [80, 24], false)).contains("0 CPU:0 W waits"));
    }

    #[test]
    fn text_of_a_lane_is_cut_between_words() {
        let text = "waits for rank 12 0.1 s: all_reduce #118";
        for (width, expected) in [
            (40, text),
            (39, "waits for rank 12 0.1 s: all_reduce"),
            (24, "waits for rank 12 0.1 s"),
            (23, "waits for rank 12 0.1 s"),
            (17, "waits for rank 12"),
            (16, "waits for rank"),
            (3, "wai"),
        ] {
            assert_eq!(shortened(text, width), expected, "{width}");
        }
        let bucket = "all_reduce #169 (bucket 0) of backward #16";
        let cut = [40, 25, 13].map(|width| shortened(bucket, width));
        assert_eq!(
            cut,
            ["all_reduce #169 (bucket 0) of backward", "all_reduce #169", "all_reduce"]
        );
    }

    #[test]
    fn times_are_shown_as_a_clock() {
        let times = [7, 65, 3600].map(|seconds| clock(Duration::from_secs(seconds)));
        assert_eq!(times, ["0:07", "1:05", "1:00:00"]);
    }
}
