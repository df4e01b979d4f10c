//! The panels below the lanes of the live view: the loss curve, the selected rank, the events; and the help.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::symbols::Marker;
use ratatui::text::Line;
use ratatui::widgets::{Axis, Block, Chart, Clear, Dataset, GraphType, Paragraph, Wrap};
use strum::IntoEnumIterator;

use super::draw::{Theme, shortened};
use super::lanes::Phase;
use super::state::LiveState;
use crate::error::list_ranks;

/// Draws the losses over the steps.
pub(super) fn draw_curve(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
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
        .style(theme.curve())
        .data(&points);
    let label = |loss: f64| Line::raw(format!("{loss:.4}"));
    let chart = Chart::new(vec![dataset])
        .block(block)
        .x_axis(Axis::default().bounds(steps).labels(steps.map(|step| format!("{step:.0}"))))
        .y_axis(Axis::default().bounds(losses).labels(losses.map(label)));
    frame.render_widget(chart, area);
}

/// Draws what the selected rank does and did.
pub(super) fn draw_rank(frame: &mut Frame<'_>, area: Rect, state: &LiveState) {
    let rank = state.selected;
    let label = state.labels.get(rank).map_or("", String::as_str);
    let block = Block::bordered().title(format!("rank {rank} ({label})"));
    let (Some(lane), Some(snapshot)) = (state.lanes.get(rank), state.snapshot.ranks.get(rank))
    else {
        return frame.render_widget(block, area);
    };
    let now = state.snapshot.now;
    let name: &str = lane.phase.into();
    let since = lane.since.map_or(String::new(), |since| {
        format!(", for {:.3} s", now.saturating_sub(since).as_secs_f64())
    });
    let mut lines = vec![format!("{} {name}: {}{since}", lane.phase.letter(), lane.doing)];
    if !lane.waits_for.is_empty() {
        lines.push(format!("waits for {}", list_ranks(&lane.waits_for)));
    }
    let open = snapshot.ops.iter().rev().find(|op| op.is_open());
    let line = open.map(|op| op.source_line.to_string()).filter(|line| !line.is_empty());
    lines.extend(line.map(|line| format!("called at {line}")));
    if let Some(age) = lane.heartbeat_age {
        lines.push(format!("its last heartbeat came {:.1} s ago", age.as_secs_f64()));
    }
    for op in snapshot.ops.iter().rev().filter(|op| !op.is_open()).take(usize::from(area.height)) {
        let time = op.end(now).saturating_sub(op.started_at).as_secs_f64() * 1e3;
        lines.push(format!("{time:9.3} ms {op}"));
    }
    let lines: Vec<Line<'_>> = lines.into_iter().map(Line::raw).collect();
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: false }).block(block), area);
}

/// Draws the newest collectives, the newest at the top, each with the rank that came last.
pub(super) fn draw_last(frame: &mut Frame<'_>, area: Rect, state: &LiveState) {
    let lines = state.last_ranks.lines().take(usize::from(area.height)).collect();
    draw_lines(frame, area, Block::bordered().title("who came last"), lines);
}

/// Draws the newest events, the newest at the bottom.
pub(super) fn draw_events(frame: &mut Frame<'_>, area: Rect, state: &LiveState) {
    let ranks: Vec<String> =
        state.last_ranks.ranks().take(12).map(|rank| rank.to_string()).collect();
    let title = if ranks.is_empty() {
        "events".to_owned()
    } else {
        format!("events; newest collectives, last rank: {}", ranks.join(" "))
    };
    let block = Block::bordered().title(title);
    let count = usize::from(block.inner(area).height);
    let skipped = state.events.len().saturating_sub(count);
    let line = |(at, text): &(Duration, String)| {
        format!("{:8.2} {}", at.as_secs_f64(), text.strip_prefix("ddp-mp: ").unwrap_or(text))
    };
    draw_lines(frame, area, block, state.events.iter().skip(skipped).map(line).collect());
}

/// Draws lines in a block, each cut at the end of a word.
fn draw_lines(frame: &mut Frame<'_>, area: Rect, block: Block<'_>, lines: Vec<String>) {
    let width = usize::from(block.inner(area).width);
    let lines: Vec<Line<'_>> = lines.iter().map(|line| shortened(line, width).into()).collect();
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// The keys, and what they do.
const KEYS: &[[&str; 2]] = &[
    ["up, down, k, j", "select a rank"],
    ["space", "freeze the view, and go on"],
    ["d", "add the table of what each rank does to the events"],
    ["s, q", "stop after this step, with exit code 0"],
    ["Ctrl-C", "stop after this step; again: end at once"],
    ["Ctrl-L", "draw all anew"],
    ["?, Esc", "show this help, and hide it"],
];

/// Draws the keys and the letters over the rest.
pub(super) fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let mut lines: Vec<String> =
        KEYS.iter().map(|[keys, effect]| format!("{keys:15} {effect}")).collect();
    lines.push(String::new());
    let letters: Vec<String> = Phase::iter()
        .map(|phase| {
            let name: &str = phase.into();
            format!("{} {name:14}", phase.letter())
        })
        .collect();
    lines.extend(letters.chunks(4).map(|row| row.concat()));
    let width = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0) as u16;
    let help = area.centered(
        ratatui::layout::Constraint::Length(width.saturating_add(2).min(area.width)),
        ratatui::layout::Constraint::Length(
            (lines.len() as u16).saturating_add(2).min(area.height),
        ),
    );
    frame.render_widget(Clear, help);
    let lines: Vec<Line<'_>> = lines.into_iter().map(Line::raw).collect();
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("help")), help);
}
