//! Draws the state of the live view into a frame of any size.

use std::io;
use std::time::Duration;

use anstream::{AutoStream, ColorChoice};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph};

use super::lanes::{Lane, Phase};
use super::panels::{draw_curve, draw_events, draw_help, draw_last, draw_rank};
use super::state::LiveState;
use crate::telemetry::{gigabytes, rate_text};

/// Whether the view uses colours. Its letters say the same.
#[derive(Debug, Clone, Copy)]
pub(super) struct Theme {
    pub colours: bool,
}

impl Theme {
    /// Returns the theme that the environment asks for: `NO_COLOR`, `CLICOLOR` and `CLICOLOR_FORCE`, as `--help` reads
    /// them, too.
    pub(super) fn from_env() -> Self {
        Self { colours: AutoStream::choice(&io::stderr()) != ColorChoice::Never }
    }

    fn phase(self, phase: Phase) -> Style {
        let colour = match phase {
            Phase::Step => Color::LightYellow,
            Phase::Data => Color::Cyan,
            Phase::Forward => Color::Green,
            Phase::Backward => Color::Blue,
            Phase::Optimizer => Color::Yellow,
            Phase::Communication => Color::Magenta,
            Phase::Waiting => Color::DarkGray,
            Phase::Validation => Color::LightGreen,
            Phase::Checkpoint => Color::LightMagenta,
            Phase::Failed => Color::Red,
            Phase::Unknown | Phase::Start | Phase::Other | Phase::Ended => return Style::new(),
        };
        let letter = if phase == Phase::Waiting { Color::White } else { Color::Black };
        if self.colours { Style::new().bg(colour).fg(letter) } else { Style::new() }
    }

    fn note(self) -> Style {
        let note = Style::new().add_modifier(Modifier::BOLD);
        if self.colours { note.fg(Color::LightRed) } else { note }
    }

    pub(super) fn curve(self) -> Style {
        if self.colours { Style::new().fg(Color::LightGreen) } else { Style::new() }
    }
}

/// Draws `state` into all of `frame`.
pub(super) fn draw(frame: &mut Frame<'_>, state: &LiveState, theme: Theme) {
    let area = frame.area();
    let lanes_height = (state.lanes.len() as u16).saturating_add(2);
    let footer_height = u16::from(area.height >= 4);
    let header_height = area.height.saturating_sub(footer_height).min(3);
    let rest = area.height - footer_height - header_height;
    // The panels below the lanes need ten lines to be of use.
    let lanes_height = if rest >= lanes_height.saturating_add(10) {
        lanes_height
    } else if rest >= 20 {
        rest - 10
    } else {
        lanes_height.min(rest)
    };
    let [header, lanes, panels, footer] = Layout::vertical([
        Constraint::Length(header_height),
        Constraint::Length(lanes_height),
        Constraint::Min(0),
        Constraint::Length(footer_height),
    ])
    .areas(area);
    draw_header(frame, header, state, theme);
    draw_lanes(frame, lanes, state, theme);
    draw_panels(frame, panels, state, theme);
    frame.render_widget(Paragraph::new(keys(state)), footer);
    if state.shows_help {
        draw_help(frame, area);
    }
}

fn keys(state: &LiveState) -> &'static str {
    if state.has_ended {
        "the run has ended; any key closes this view"
    } else {
        "? help  up/down rank  space freeze  d status  s or q stop after this step"
    }
}

fn draw_panels(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    if area.height < 3 {
        return;
    }
    if area.height < 8 {
        return draw_events(frame, area, state);
    }
    let [above, events] = Layout::vertical([Constraint::Fill(1); 2]).areas(area);
    let is_wide = area.width >= 120 && !state.snapshot.has_heartbeats;
    if is_wide {
        let [curve, rank, last] = Layout::horizontal([Constraint::Fill(1); 3]).areas(above);
        draw_curve(frame, curve, state, theme);
        draw_rank(frame, rank, state);
        draw_last(frame, last, state);
    } else {
        let [curve, rank] = Layout::horizontal([Constraint::Fill(1); 2]).areas(above);
        draw_curve(frame, curve, state, theme);
        draw_rank(frame, rank, state);
    }
    draw_events(frame, events, state);
}

fn draw_header(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut first: Vec<String> = state.frozen.then(|| "FROZEN".into()).into_iter().collect();
    first.push(state.title.clone());
    if let Some(step) = state.step() {
        first.push(match state.steps {
            Some([steps, _]) if steps > 0 => {
                format!("step {step} of {steps} ({:.0} %)", 100.0 * step as f64 / steps as f64)
            }
            _ => format!("step {step}"),
        });
    }
    first.push(format!("{} passed", clock(state.snapshot.now)));
    first.extend(state.time_left().map(|left| format!("{} left", clock(left))));

    let mut second = Vec::new();
    if let Some(metrics) = &state.metrics {
        second.push(format!("loss {:.4}", metrics.loss));
        second.push(format!("lr {:.3e}", metrics.lr));
        second.push(rate_text(metrics));
    }
    second.extend(state.steps_per_second().map(|rate| format!("{rate:.1} steps/s")));
    if let [Some(used), total] = state.memory {
        let total = total.map_or(String::new(), |total| format!(" of {}", gigabytes(total as f64)));
        second.push(format!("memory {}{total}", gigabytes(used as f64)));
    }
    let third = match (state.snapshot.failed, state.straggler()) {
        (Some(rank), _) => {
            Line::styled(format!("rank {rank} has failed; the run ends"), theme.note())
        }
        (None, Some(straggler)) => Line::styled(straggler, theme.note()),
        (None, None) => Line::raw("no rank keeps the others waiting"),
    };
    let [first, second] = [first, second].map(|parts| parts.join("  "));
    let [first, second] = [&first, &second].map(|line| shortened(line, area.width.into()));
    let lines = vec![Line::styled(first, bold), Line::raw(second), third];
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_lanes(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let window = state.window.as_secs_f64();
    let time =
        if window >= 1.0 { format!("{window:.0} s") } else { format!("{:.1} ms", window * 1e3) };
    let share = if state.snapshot.has_heartbeats { "in collectives" } else { "came last" };
    let title = format!("ranks: the last {time}; % {share}");
    let block = Block::bordered().title(title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let height = usize::from(inner.height);
    // Scrolls as far as the selected rank needs.
    let first = (state.selected + 1).saturating_sub(height);
    let texts: Vec<String> =
        state.lanes.iter().map(|lane| doing(lane, state.snapshot.now)).collect();
    let widest = texts.iter().map(|text| text.chars().count()).max().unwrap_or(0);
    // The text keeps its width while the view is shown: lanes that jump are hard to read.
    let text_width = widest.clamp(24, 60).min(usize::from(inner.width) * 2 / 5).max(1);
    let rows = state.lanes.iter().enumerate().skip(first).take(height);
    for ((rank, lane), y) in rows.zip(inner.y..) {
        let is_selected = rank == state.selected;
        let mark = if is_selected { '>' } else { ' ' };
        // `CPU:1` of `CPU:1 on host, process 7`.
        let label = state.labels.get(rank).and_then(|label| label.split(' ').next()).unwrap_or("");
        let share =
            state.share(rank).map_or("   -".into(), |share| format!("{:3.0}%", 100.0 * share));
        let style =
            if is_selected { Style::new().add_modifier(Modifier::BOLD) } else { Style::new() };
        let text = shortened(&texts[rank], text_width);
        let mut spans = vec![
            Span::styled(format!("{mark}{rank} {label} "), style),
            Span::styled(lane.phase.letter().to_string(), theme.phase(lane.phase).patch(style)),
            Span::styled(format!(" {text:text_width$} {share} "), style),
        ];
        let used: usize = spans.iter().map(|span| span.content.chars().count()).sum();
        let left = usize::from(inner.width).saturating_sub(used);
        spans.extend(timeline(lane, state, left, theme));
        let row = Rect { y, height: 1, ..inner };
        frame.render_widget(Paragraph::new(Line::from(spans)), row);
    }
}

/// Returns `text` in at most `width` characters, cut at the end of a word if possible, and not within parentheses.
pub(super) fn shortened(text: &str, width: usize) -> &str {
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

/// The shortest duration that is shown for an operation known from a heartbeat. Longer than the time between two
/// heartbeats.
const LASTING: Duration = Duration::from_secs(2);

/// Returns what a rank does, for its lane: `waits for rank 2 0.1 s: all_reduce #118`.
fn doing(lane: &Lane, now: Duration) -> String {
    let since = lane.since.map(|since| now.saturating_sub(since));
    let shown_from = lane.heartbeat_age.map_or(Duration::from_millis(100), |_| LASTING);
    let since = since.filter(|since| *since >= shown_from);
    let age = lane.heartbeat_age.filter(|age| since.is_none() || *age >= LASTING);
    let age = age.map_or(String::new(), |age| format!("{:.1} s ago: ", age.as_secs_f64()));
    let since = since.map_or(String::new(), |since| format!(" {:.1} s", since.as_secs_f64()));
    match &lane.waits_for[..] {
        [] => format!("{age}{}{since}", lane.doing),
        [rank] => format!("{age}waits for rank {rank}{since}: {}", lane.doing),
        [first, rest @ ..] => {
            format!("{age}waits for ranks {first} and {} more{since}: {}", rest.len(), lane.doing)
        }
    }
}

/// Returns the lane's phases over the window, a letter for each of `width` moments.
fn timeline(lane: &Lane, state: &LiveState, width: usize, theme: Theme) -> Vec<Span<'static>> {
    let mut cells = vec![None; width];
    let (end, window) = (state.snapshot.now.as_secs_f64(), state.window.as_secs_f64().max(1e-9));
    // The cell whose middle is the first at or after `time`.
    let cell = |time: Duration| {
        let share = (time.as_secs_f64() - (end - window)) / window;
        (share * width as f64 - 0.5).ceil().clamp(0.0, width as f64) as usize
    };
    for (span, phase) in &lane.spans {
        let cells = cells.get_mut(cell(span.start)..cell(span.end)).unwrap_or_default();
        cells.fill(Some(*phase));
    }
    let mut spans: Vec<Span<'static>> = Vec::new();
    for run in cells.chunk_by(|a, b| a == b) {
        spans.push(match run[0] {
            Some(phase) => {
                let letters = phase.letter().to_string().repeat(run.len());
                Span::styled(letters, theme.phase(phase))
            }
            None => Span::raw(" ".repeat(run.len())),
        });
    }
    spans
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
    use crate::operation::{OpId, Operation};
    use crate::records::TrainMetrics;
    use crate::runtime::OpEntry;
    use crate::telemetry::live::snapshot::{RankSnapshot, RunSnapshot, Source};

    /// Rank 1 is late: the others wait for it in all_reduce #2.
    fn state(ranks: usize) -> LiveState {
        let op = |operation, sequence, group, from, to: Option<u64>| OpEntry {
            group,
            bucket: group.map(|_| 0),
            source_line: "src/a.rs:7".into(),
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
        let labels = (0..ranks).map(|rank| format!("CPU:{rank}")).collect();
        let mut state = LiveState::new("mlp on ranks".into(), labels);
        state.update(RunSnapshot {
            now: Duration::from_millis(200),
            ranks: (0..ranks).map(of_rank).collect(),
            ..RunSnapshot::default()
        });
        state.steps = Some([100, 0]);
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
            let terminal = drawn(&state(4), size, false);
            let text = text(&terminal);
            for part in [
                "mlp on ranks  step 41 of 100 (41 %)",
                "loss 1.0000  lr 1.000e-1  9 samples/s",
                ">0 CPU:0 W waits for rank 1",
                " 1 CPU:1 S step #41 0.1 s",
                "WWWW",
                "SSSS",
                "called at src/a.rs:7",
                "CPU:0 | Epoch: 0",
                "s or q stop after this step",
            ] {
                assert!(text.contains(part), "{part:?} is not in\n{text}");
            }
            let cells = terminal.backend().buffer().content();
            assert!(cells.iter().all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset)));
        }
        let cells = drawn(&state(4), [80, 24], true);
        let cells = cells.backend().buffer().content();
        assert!(cells.iter().any(|cell| cell.symbol() == "W" && cell.bg == Color::DarkGray));
    }

    #[test]
    fn numbers_are_shown_whole_or_not_at_all() {
        let mut state = state(4);
        state.select(2);
        for op in &mut state.snapshot.ranks[2].ops {
            op.at.sequence += 123_456;
        }
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
            let mut state = state(ranks);
            for help in [false, true] {
                state.shows_help = help;
                for width in (1..20).chain([40, 79, 80, 119, 120, 200, 500]) {
                    for height in (1..14).chain([23, 24, 60, 200]) {
                        drawn(&state, [width, height], true);
                    }
                }
            }
        }
    }

    #[test]
    fn selected_rank_is_always_shown() {
        let mut state = state(300);
        state.select(250);
        let text = text(&drawn(&state, [80, 24], false));
        assert!(text.contains(">250 CPU:250") && text.contains("rank 250 (CPU:250)"), "{text}");
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
