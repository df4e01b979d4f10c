//! What a panicking rank says: to the failure report, instead of straight to the terminal.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic;

use crate::error::Error;

thread_local! {
    /// The message and place of this thread's last panic.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
    /// Whether this thread is a rank's, which `spawn` reports on.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Makes a panic of a rank part of the failure report, with its place, and keeps it off the terminal.
///
/// For a program's `main`, if that does not catch panics in its rank functions itself; it replaces the process's panic hook, and other threads' panics still go to
/// the one before. Without it a rank's panic is printed when it happens, and reported without its place.
/// With `RUST_BACKTRACE` set it is printed as well, for the backtrace.
pub fn install_panic_hook() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !WATCHED.get() {
            return before(info);
        }
        let place = info.location().map_or(String::new(), |at| format!(" at {at}"));
        let message = message(info.payload());
        LAST.with_borrow_mut(|last| *last = Some(format!("panicked{place}: {message}")));
        if std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0") {
            before(info);
        }
    }));
}

/// Makes the hook keep what this thread's panics say, for [`error`].
pub(crate) fn watch_this_thread() {
    WATCHED.set(true);
}

/// A caught panic as an error. Where there is no way to return an error of this crate, as in
/// `ModuleT::forward_t`, it is thrown: then it is that error, and no panic.
pub(crate) fn error(payload: Box<dyn Any + Send>) -> anyhow::Error {
    match payload.downcast::<Error>() {
        Ok(error) => anyhow::Error::new(*error),
        Err(payload) => anyhow::Error::msg(describe(&*payload)),
    }
}

/// What a caught panic said.
pub(crate) fn describe(payload: &(dyn Any + Send)) -> String {
    LAST.take().unwrap_or_else(|| format!("panicked: {}", message(payload)))
}

/// The first line: libtorch's messages go on with a C++ stack trace.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    readable(text)
}

/// tch panics with `unwrap` on its error, whose debug form holds libtorch's message with its line
/// breaks spelled out; the first line of that says it all.
fn readable(text: &str) -> String {
    let first = text.split("\\n").next().unwrap_or(text);
    let first = first.lines().next().unwrap_or(first);
    first.trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_libtorch_message_loses_its_stack_trace() {
        let text = "called `Result::unwrap()` on an `Err` value: Torch(\"mat1 and mat2 shapes cannot \
                    be multiplied (32x20 and 21x1)\\nException raised from meta at x.cpp:1\\nframe #0\")";
        assert!(readable(text).ends_with("(32x20 and 21x1)"), "{}", readable(text));
    }
}
