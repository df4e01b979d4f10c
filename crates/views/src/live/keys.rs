//! Key presses, read by a thread of their own.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, unbounded};
use crossterm::event::{self, KeyEvent};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use engine::os::terminal;

/// How long to wait before looking again whether the terminal is this process's.
const BACKGROUND: Duration = Duration::from_millis(200);

/// The shortest time for which crossterm looks at the terminal. With 0 it does not look.
const AT_ONCE: Duration = Duration::from_millis(1);

/// Returns the keys that are pressed from now on. They end when the terminal is gone, and where there is none for input.
///
/// Nobody joins the thread that reads them: after an incomplete escape sequence a read may block until the next key.
pub(crate) fn keys() -> &'static Receiver<KeyEvent> {
    static KEYS: OnceLock<Receiver<KeyEvent>> = OnceLock::new();
    KEYS.get_or_init(|| {
        let (keys_tx, keys_rx) = unbounded();
        let reader = thread::Builder::new().name("keys".into());
        let _ = reader.spawn(move || read(&keys_tx)); // without the thread there are no keys
        keys_rx
    })
}

/// Sends keys to `keys_tx` until the terminal is gone.
fn read(keys_tx: &Sender<KeyEvent>) {
    let opened = if io::stdin().is_terminal() { None } else { File::open("/dev/tty").ok() };
    let stdin = io::stdin();
    let input = opened.as_ref().map_or_else(|| stdin.as_fd(), AsFd::as_fd);
    loop {
        let mut ready = [PollFd::new(&input, PollFlags::IN)];
        match poll(&mut ready, None) {
            Err(Errno::INTR) => continue,
            Ok(_) if ready[0].revents() == PollFlags::IN => {}
            _ => return,
        }
        if !terminal::is_ours() {
            thread::park_timeout(BACKGROUND); // what is typed is for the shell
            continue;
        }
        // One read may give several keys.
        while event::poll(AT_ONCE).unwrap_or(false) {
            let Ok(event) = event::read() else { return };
            if let Some(key) = event.as_key_press_event() {
                let _ = keys_tx.send(key); // the receiver is never dropped
            }
        }
    }
}
