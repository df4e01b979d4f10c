//! The screen of the live view: a thread that looks at the ranks, draws, and reads keys. The ranks do not notice it.

use std::io::{self, BufWriter};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::RecvTimeoutError;
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use parking_lot::Mutex;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;

use super::draw::{Theme, draw};
use super::keys::keys;
use super::state::LiveState;
use crate::Printer;
use crate::printer::Feed;
use engine::events::{RanksActivity, RunSnapshot};
use engine::os::limits::not_started;
use engine::os::terminal::{self, EnteredScreen};
use engine::runtime::{StopReason, StopRequest};

/// The shortest and the longest time between two frames.
const FRAMES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// A frame may take this fraction of the time until the next one, so that the view costs less than 1 % of a run.
const FRAME_SHARE: u32 = 200;

/// How long to wait for a key before the end of the run is noticed.
const KEY_WAIT: Duration = Duration::from_millis(20);

/// The screen of a live view, until it is dropped. Lines for the terminal are printed then.
#[derive(Debug)]
pub(crate) struct LiveScreen {
    printer: Arc<Printer>,
    ranks: Arc<RanksActivity>,
    /// What the screen shows besides the ranks.
    pub feed: Arc<Mutex<Feed>>,
    /// The ranks when they have ended.
    last: Arc<OnceLock<RunSnapshot>>,
    /// Whether the screen is to close.
    closes: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl LiveScreen {
    /// Shows `ranks` on the terminal, under `title`. The key to stop sets `stop`.
    ///
    /// # Errors
    /// If the terminal cannot be used.
    pub(crate) fn open(
        printer: &Arc<Printer>,
        title: &str,
        ranks: &Arc<RanksActivity>,
        stop: &Arc<StopRequest>,
    ) -> io::Result<Self> {
        let unusable = |error| io::Error::other(format!("the terminal cannot be used: {error}"));
        let screen = Screen::enter(printer).map_err(unusable)?;
        let feed = printer.open_live();
        let (last, closes) = (Arc::<OnceLock<_>>::default(), Arc::<AtomicBool>::default());
        let (title, labels) = (title.to_owned(), ranks.labels.clone());
        let drawing = Drawing {
            state: LiveState { title, labels, ..LiveState::default() },
            ranks: ranks.clone(),
            last: last.clone(),
            feed: feed.clone(),
            stop: stop.clone(),
            theme: Theme::from_env(),
            closes: closes.clone(),
            snapshot_at: Instant::now(),
        };
        let thread = thread::Builder::new().name("live".into());
        let reporter = printer.clone();
        let run = move || {
            if let Err(error) = drawing.run(screen) {
                reporter.report(&format!("--live: the view has ended: {error}"));
            }
        };
        let refused = |error| io::Error::other(not_started("the thread of --live", &error));
        let thread = Some(thread.spawn(run).map_err(refused)?);
        Ok(Self { printer: printer.clone(), ranks: ranks.clone(), feed, last, closes, thread })
    }

    /// Returns whether the screen is still drawn.
    pub(super) fn is_open(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Shows from now on how the ranks have ended.
    pub(crate) fn end_ranks(&self) {
        let _ = self.last.set(self.ranks.snapshot());
    }

    /// Waits until the view has closed: until the user presses a key, or a signal asks the run to stop. Its [`Screen`] then
    /// prints the lines for the terminal.
    pub(crate) fn join(&mut self) {
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            self.printer.report("--live: the view has failed; the run was not affected");
        }
    }
}

impl Drop for LiveScreen {
    fn drop(&mut self) {
        self.closes.store(true, Ordering::Release);
        self.join();
    }
}

/// The terminal while it shows a view. Brought back to normal when it is dropped: at the end of the view's thread, which may be
/// before that of the run, and where that thread cannot be started.
struct Screen {
    terminal: Terminal<CrosstermBackend<BufWriter<EnteredScreen>>>,
    /// Gets the terminal's lines back.
    printer: Arc<Printer>,
}

impl Screen {
    /// Switches to the view's screen.
    fn enter(printer: &Arc<Printer>) -> io::Result<Self> {
        terminal::enter_screen().inspect_err(|_| terminal::restore())?;
        // One write for a frame: the screen itself has no buffer.
        let backend = CrosstermBackend::new(BufWriter::with_capacity(1 << 16, EnteredScreen));
        let terminal = Terminal::new(backend).inspect_err(|_| terminal::restore())?;
        Ok(Self { terminal, printer: printer.clone() })
    }

    /// Clears the screen, so that the next frame draws all of it. (`Terminal::clear` would ask the terminal for the
    /// cursor, on stdout.)
    fn clear(&mut self) -> io::Result<()> {
        let size = self.terminal.size()?;
        self.terminal.resize(size.into())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal writes its own last words first.
        let _ = self.terminal.show_cursor();
        terminal::restore();
        self.printer.close_live();
    }
}

/// What the thread of the screen works on.
struct Drawing {
    state: LiveState,
    /// Looked at until they have ended. That takes no lock that a rank needs.
    ranks: Arc<RanksActivity>,
    last: Arc<OnceLock<RunSnapshot>>,
    feed: Arc<Mutex<Feed>>,
    stop: Arc<StopRequest>,
    theme: Theme,
    closes: Arc<AtomicBool>,
    /// The moment of the last snapshot.
    snapshot_at: Instant,
}

impl Drawing {
    fn run(mut self, mut screen: Screen) -> io::Result<()> {
        let mut was_ours = true;
        while !self.is_over() {
            let began = Instant::now();
            // In the background, after Ctrl-Z and `bg`, the terminal is the shell's.
            if !terminal::is_ours() {
                was_ours = false;
                if self.last.get().is_some() {
                    return Ok(()); // nobody could press a key
                }
                thread::park_timeout(FRAMES.0);
                continue;
            }
            if !std::mem::replace(&mut was_ours, true) {
                screen.clear()?;
            }
            self.refresh();
            screen.terminal.draw(|frame| draw(frame, &self.state, self.theme))?;
            let next = (began.elapsed() * FRAME_SHARE).clamp(FRAMES.0, FRAMES.1);
            self.wait(&mut screen, next)?;
        }
        Ok(())
    }

    /// Looks at the ranks and takes what has come since.
    fn refresh(&mut self) {
        if !self.state.has_ended {
            let last = self.last.get().cloned();
            self.state.has_ended = last.is_some();
            self.state.update(&last.unwrap_or_else(|| self.ranks.snapshot()));
            self.snapshot_at = Instant::now();
        }
        let now = self.state.now.saturating_add(self.snapshot_at.elapsed());
        let mut feed = self.feed.lock();
        self.state.steps = feed.steps;
        let (lines, points) = feed.take();
        drop(feed);
        self.state.add_events(now, lines);
        self.state.add_points(points);
    }

    /// Returns whether the view closes: the view is not being kept open, or the user has seen how the run has ended.
    fn is_over(&self) -> bool {
        let is_asked = self.stop.request_reason().is_some();
        self.closes.load(Ordering::Acquire) || (self.state.has_ended && is_asked)
    }

    /// Waits for `time`, or until a key was pressed or the ranks end.
    fn wait(&mut self, screen: &mut Screen, time: Duration) -> io::Result<()> {
        let (began, runs) = (Instant::now(), !self.state.has_ended);
        while began.elapsed() < time && !self.is_over() && !(runs && self.last.get().is_some()) {
            match keys().recv_timeout(KEY_WAIT) {
                Ok(key) => return self.press(screen, key),
                Err(RecvTimeoutError::Timeout) => {}
                // Without a terminal for input there are no keys.
                Err(RecvTimeoutError::Disconnected) if runs => thread::park_timeout(KEY_WAIT),
                Err(RecvTimeoutError::Disconnected) => self.closes.store(true, Ordering::Release),
            }
        }
        Ok(())
    }

    fn press(&mut self, screen: &mut Screen, key: KeyEvent) -> io::Result<()> {
        if self.state.has_ended {
            self.closes.store(true, Ordering::Release);
            return Ok(());
        }
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if is_control => terminal::interrupt(),
            KeyCode::Char('l') if is_control => screen.clear()?,
            KeyCode::Up | KeyCode::Char('k') => self.state.scroll(-1),
            KeyCode::Down | KeyCode::Char('j') => self.state.scroll(1),
            KeyCode::Char('s' | 'q') => {
                self.stop.ask_unless_asked(StopReason::Key); // the exit code of a signal stays
            }
            _ => {}
        }
        Ok(())
    }
}
