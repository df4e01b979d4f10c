//! Panics of ranks: their messages go to the failure report, not directly to the terminal.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use crate::error::{Error, Result};

thread_local! {
    /// The message and source location of this thread's last panic.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
    /// Whether this is a rank's thread, on which `spawn` reports.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Installs a panic hook that adds a rank's panic with its location to the failure report and does not print it.
///
/// `spawn` calls this; a program's `main` may call it earlier. It wraps the process's panic hook, which still receives
/// the panics of all other threads. With `RUST_BACKTRACE` set, that hook also receives those of ranks, for the
/// backtrace.
pub fn install_panic_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !WATCHED.get() {
                return before(info);
            }
            let place = info.location().map_or(String::new(), |at| {
                let caller = is_of_tch("", at.file()).then(caller_of_tch).flatten();
                caller.unwrap_or_else(|| format!(" at {at}"))
            });
            let message = message(info.payload());
            LAST.with_borrow_mut(|last| *last = Some(format!("panicked{place}: {message}")));
            if wants_backtraces() {
                before(info);
            }
        }));
    });
}

/// Returns whether the user has requested backtraces: `RUST_BACKTRACE`.
pub(crate) fn wants_backtraces() -> bool {
    std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0")
}

/// Returns whether a frame is in tch. Its functions panic in their own files if libtorch refuses their arguments.
fn is_of_tch(function: &str, file: &str) -> bool {
    let functions = ["tch::", "<tch::", "<T as tch::"];
    functions.iter().any(|prefix| function.starts_with(prefix)) || file.contains("/tch-0.")
}

/// Returns whether a frame is in the standard library.
fn is_of_std(function: &str, file: &str) -> bool {
    let functions = ["core::", "<core::", "std::", "<std::", "alloc::", "<alloc::"];
    functions.iter().any(|prefix| function.starts_with(prefix)) || file.starts_with("/rustc/")
}

/// Returns where the program called the tch function that panics: file and line if the binary has them, else the
/// function. A frame of this crate is used only if no other is found.
fn caller_of_tch() -> Option<String> {
    let (mut is_inside, mut mine, mut user) = (false, None, None);
    backtrace::trace(|frame| {
        backtrace::resolve_frame(frame, |symbol| {
            let function = symbol.name().map_or(String::new(), |name| format!("{name:#}"));
            let file =
                symbol.filename().map_or(String::new(), |file| file.to_string_lossy().into_owned());
            if is_of_tch(&function, &file) {
                is_inside = true;
            } else if is_inside && !is_of_std(&function, &file) {
                let line = symbol.lineno().filter(|_| !file.is_empty());
                // The last is a method of this crate for all types.
                let mine_begin = ["ddp_mp::", "<ddp_mp::", "<M as ddp_mp::"];
                let is_mine = mine_begin.iter().any(|prefix| function.starts_with(prefix));
                let place =
                    line.map_or(format!(" in {function}"), |line| format!(" at {file}:{line}"));
                if is_mine { &mut mine } else { &mut user }.get_or_insert(place);
            }
        });
        user.is_none()
    });
    user.or(mine)
}

/// Installs the hook and makes it store this thread's panic messages, for [`error`].
pub(crate) fn watch_this_thread() {
    install_panic_hook();
    WATCHED.set(true);
}

/// Converts a caught panic to an error. Functions that cannot return an error of this crate, such as
/// `ModuleT::forward_t`, throw it as the payload. Then that error is returned instead.
pub(crate) fn error(payload: Box<dyn Any + Send>) -> anyhow::Error {
    match payload.downcast::<Error>() {
        Ok(error) => anyhow::Error::new(*error),
        Err(payload) => anyhow::Error::msg(describe(&*payload)),
    }
}

/// Runs a closure of the user. Its panic is an error that names the closure, `what`, and the place.
///
/// # Errors
/// [`Error::InvalidInput`] for a panic, and the error that a function of this crate has thrown.
pub(crate) fn in_closure<T>(what: &str, f: impl FnOnce() -> T) -> Result<T> {
    install_panic_hook();
    let was_watched = WATCHED.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(f));
    WATCHED.set(was_watched);
    result.map_err(|payload| match payload.downcast::<Error>() {
        Ok(error) => *error,
        Err(payload) => Error::InvalidInput(format!("{what} {}", describe(&*payload))),
    })
}

/// Returns the message of a caught panic.
pub(crate) fn describe(payload: &(dyn Any + Send)) -> String {
    LAST.take().unwrap_or_else(|| format!("panicked: {}", message(payload)))
}

/// Returns the text in the payload of a panic.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    readable(text)
}

/// Returns the first line of `text`. tch panics with `unwrap` on its error, whose debug form is libtorch's message with
/// escaped line breaks. Of that, only the message without its C++ stack trace is returned.
fn readable(text: &str) -> String {
    let unwrapped = text.split_once("on an `Err` value: Torch(\"").map(|(_, message)| message);
    let first = unwrapped.unwrap_or(text).split("\\n").next().unwrap_or(text);
    let first = first.lines().next().unwrap_or(first).trim();
    match unwrapped {
        Some(_) => first.trim_end_matches("\")").replace("\\\"", "\""),
        None => first.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_message_of_libtorch_loses_its_stack_trace() {
        let text = "called `Result::unwrap()` on an `Err` value: Torch(\"mat1 and mat2 shapes cannot \
                    be multiplied (32x20 and 21x1)\\nException raised from meta at x.cpp:1\\nframe #0\")";
        let expected = "mat1 and mat2 shapes cannot be multiplied (32x20 and 21x1)";
        assert_eq!(readable(text), expected);
        let text = "called `Result::unwrap()` on an `Err` value: Torch(\"no \\\"x\\\" (1)\")";
        assert_eq!(readable(text), "no \"x\" (1)");
        assert_eq!(readable("on purpose\nand more"), "on purpose");
    }
}
