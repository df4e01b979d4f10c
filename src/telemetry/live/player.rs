//! The playback of recorded traces in the live view, and single frames of it as text.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crossbeam::channel::RecvTimeoutError;
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::draw::{Theme, draw};
use super::keys::keys;
use super::recording::Recording;
use super::state::{LiveState, Playback};
use super::view::Screen;
use crate::error::{Error, Result, Shown};
use crate::os::terminal::{self, screen_problem};

/// The time between two frames.
const FRAMES: Duration = Duration::from_millis(50);

/// The slowest and the fastest speed.
pub(crate) const SPEEDS: [f64; 2] = [1e-6, 1e6];

/// A playback of recorded traces.
#[derive(Debug)]
pub(crate) struct Player {
    recording: Recording,
    state: LiveState,
    now: Duration,
    playback: Playback,
}

impl Player {
    /// Reads the traces of one run, a file for each of its processes, to play them at `speed` times their own.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if one is no trace, or they are not of one run.
    pub(crate) fn new(traces: &[PathBuf], speed: f64) -> Result<Self> {
        let recording = Recording::read(traces)?;
        let names: Vec<String> = traces.iter().map(|path| path.shown().into_owned()).collect();
        let title = format!("replay of {}", names.join(", "));
        let playback = Playback { length: recording.length, speed, paused: false };
        let state = LiveState::new(title, recording.labels.clone());
        Ok(Self { recording, state, now: Duration::ZERO, playback })
    }

    /// Returns the frame at `time`, of `width` columns and `height` lines, as text.
    ///
    /// # Errors
    /// When the frame cannot be drawn.
    pub(crate) fn frame(mut self, time: Duration, [width, height]: [u16; 2]) -> io::Result<String> {
        self.playback.paused = true;
        self.seek(time);
        self.refresh();
        let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
        let Ok(_) = terminal.draw(|frame| draw(frame, &self.state, Theme { colours: false }));
        let buffer = terminal.backend().buffer();
        let mut text = String::new();
        for row in buffer.content().chunks(usize::from(width)) {
            let row: String = row.iter().map(|cell| cell.symbol()).collect();
            text.push_str(row.trim_end());
            text.push('\n');
        }
        Ok(text)
    }

    /// Plays on the terminal until the user quits.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] without a terminal; an error when the terminal cannot be used.
    pub(crate) fn play(mut self) -> anyhow::Result<()> {
        if let Some(problem) = screen_problem() {
            return Err(Error::InvalidInput(format!(
                "replay: {problem}, so nothing can be played; run it in a terminal, or print a frame with --frame SECONDS"
            ))
            .into());
        }
        terminal::end_at_signals()?;
        let (mut screen, theme) = (Screen::enter()?, Theme::from_env());
        let mut before = Instant::now();
        loop {
            let passed = std::mem::replace(&mut before, Instant::now()).elapsed();
            if !self.playback.paused {
                let passed = passed.as_secs_f64() * self.playback.speed;
                let passed = Duration::try_from_secs_f64(passed).unwrap_or(self.playback.length);
                self.now = self.now.saturating_add(passed).min(self.playback.length);
            }
            self.refresh();
            screen.terminal.draw(|frame| draw(frame, &self.state, theme))?;
            match keys().recv_timeout(FRAMES) {
                Ok(key) if self.press(key) => {}
                Err(RecvTimeoutError::Timeout) => {}
                // The user quits, or the terminal is gone.
                Ok(_) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    fn refresh(&mut self) {
        self.state.update(self.recording.snapshot_at(self.now));
        self.state.playback = Some(self.playback);
    }

    /// Changes what is shown as `key` says. Returns false if the playback is to end.
    fn press(&mut self, key: KeyEvent) -> bool {
        let twentieth = self.playback.length / 20;
        let playback = &mut self.playback;
        match key.code {
            KeyCode::Char('q') => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Up | KeyCode::Char('k') => self.state.select(-1),
            KeyCode::Down | KeyCode::Char('j') => self.state.select(1),
            KeyCode::Char(' ') => playback.paused = !playback.paused,
            KeyCode::Char('+' | '=') => playback.speed = (2.0 * playback.speed).min(SPEEDS[1]),
            KeyCode::Char('-') => playback.speed = (playback.speed / 2.0).max(SPEEDS[0]),
            KeyCode::Char('?' | 'h') => self.state.shows_help = !self.state.shows_help,
            KeyCode::Esc => self.state.shows_help = false,
            KeyCode::Left => self.seek_step(false),
            KeyCode::Right => self.seek_step(true),
            KeyCode::PageUp => self.seek(self.now.saturating_sub(twentieth)),
            KeyCode::PageDown => self.seek(self.now.saturating_add(twentieth)),
            KeyCode::Home => self.seek(Duration::ZERO),
            KeyCode::End => self.seek(self.playback.length),
            _ => {}
        }
        true
    }

    /// Goes to the start of the next step of any rank, or of the one before.
    fn seek_step(&mut self, after: bool) {
        let end = if after { self.playback.length } else { Duration::ZERO };
        self.seek(self.recording.step_beside(self.now, after).unwrap_or(end));
    }

    fn seek(&mut self, time: Duration) {
        self.now = time.min(self.playback.length);
        self.state.forget();
    }
}
