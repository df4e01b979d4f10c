//! Panics of ranks: their messages go to the failure report, not directly to the terminal.

use std::any::Any;
use std::backtrace::Backtrace;
use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use crate::error::{Error, Result};

/// The name of [`in_closure`] in a stack trace.
const IN_CLOSURE: &str = concat!(module_path!(), "::in_closure");

thread_local! {
    /// The message and source location of this thread's last panic.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
    /// Whether this is a rank's thread, on which `spawn` reports.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Installs a panic hook that adds a rank's panic to the failure report and does not print it. The report names the place
/// if it is in the program's own code.
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
            let location = info.location().map_or(String::new(), |at| {
                if is_foreign_file(at.file()) {
                    caller().unwrap_or_default()
                } else {
                    format!(" at {at}")
                }
            });
            let message = message(info.payload());
            LAST.with_borrow_mut(|last| *last = Some(format!("panicked{location}: {message}")));
            if wants_backtraces() {
                before(info);
            }
        }));
    });
}

/// Returns whether the user has requested backtraces: `RUST_BACKTRACE`.
pub fn wants_backtraces() -> bool {
    std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0")
}

/// Returns whether the program's author did not write `file`: it belongs to the standard library, to tch or another crate of
/// a registry, or to C code. (tch panics in its own files if libtorch refuses the arguments of a function.)
fn is_foreign_file(file: &str) -> bool {
    let folders = ["/rustlib/src/", "/registry/src/", "/git/checkouts/", "/tch-0."];
    !file.ends_with(".rs")
        || file.starts_with("/rustc/")
        || folders.iter().any(|folder| file.contains(folder))
}

/// Returns whether the program's author did not write `function`: it belongs to the standard library, to tch, to ddp-mp
/// or to C code.
fn is_foreign_function(function: &str) -> bool {
    let crates = [
        "core::",
        "std::",
        "alloc::",
        "tch::",
        "ddp_mp::",
        "ddp_mp_compare::",
        "ddp_mp_engine::",
        "ddp_mp_views::",
        "__rustc",
    ];
    let of_method = function.trim_start_matches('<');
    let of_all_types = ["<T as tch::", "<M as ddp_mp_engine::"];
    !function.contains("::")
        || crates.iter().any(|name| of_method.starts_with(name))
        || of_all_types.iter().any(|prefix| function.starts_with(prefix))
}

/// Returns where the program called the function that panics: file, line and column if the binary has them, else the
/// function. `None` outside of the program's own code.
fn caller() -> Option<String> {
    caller_in(&Backtrace::force_capture().to_string())
}

/// Finds [`caller`] in the text of a backtrace. Each function has a line, and a second one if its place is known. A function
/// that was inlined has no index:
///
/// ```text
///    4: tch::wrappers::tensor::Tensor::matmul
///       my_run::net
///              at ./src/main.rs:9:13
/// ```
fn caller_in(backtrace: &str) -> Option<String> {
    let mut has_panicked = false; // the frames of the hook come before
    let mut lines = backtrace.lines().map(str::trim_start).peekable();
    while let Some(line) = lines.next() {
        let function =
            line.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start_matches(": ");
        let place = lines.next_if(|next| next.starts_with("at "));
        if function.starts_with(IN_CLOSURE) {
            return None;
        }
        let file = place.and_then(|place| place.trim_start_matches("at ").rsplitn(3, ':').last());
        let is_foreign = is_foreign_function(function) || file.is_some_and(is_foreign_file);
        if has_panicked && !is_foreign {
            return Some(
                place.map_or_else(|| format!(" in {function}"), |place| format!(" {place}")),
            );
        }
        has_panicked |= function.starts_with("std::panicking::");
    }
    None
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
/// [`Error::Input`] for a panic, and the error that a function of this crate has thrown.
#[inline(never)] // `caller` looks for its name
pub fn in_closure<T>(what: &str, f: impl FnOnce() -> T) -> Result<T> {
    install_panic_hook();
    let was_watched = WATCHED.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(f));
    WATCHED.set(was_watched);
    result.map_err(|payload| match payload.downcast::<Error>() {
        Ok(error) => *error,
        Err(payload) => Error::usage(format!("{what} {}", describe(&*payload))),
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
    fn files_and_functions_of_others_are_no_place_of_a_panic() {
        for file in [
            "/rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/core/src/iter/traits.rs",
            "/home/user/.rustup/toolchains/stable/lib/rustlib/src/rust/library/core/src/slice.rs",
            "/home/user/.cargo/registry/src/index.crates.io-0123456789abcdef/rand-0.9.1/src/lib.rs",
            "/usr/local/cargo/git/checkouts/x-1/2/src/lib.rs",
            "./nptl/./nptl/pthread_create.c",
            "./misc/../sysdeps/unix/sysv/linux/x86_64/clone3.S",
        ] {
            assert!(is_foreign_file(file), "{file}");
        }
        assert!(!is_foreign_file("src/main.rs") && !is_foreign_file("/home/me/run/src/main.rs"));
        for function in [
            "start_thread",
            "core::ops::function::FnOnce::call_once",
            "<alloc::boxed::Box<F> as core::ops::function::FnOnce<A>>::call_once",
            "tch::wrappers::tensor::Tensor::matmul",
            "<M as ddp_mp_engine::models::Forward>::forward_inputs",
            "ddp_mp::app::App<A>::loss::{{closure}}",
        ] {
            assert!(is_foreign_function(function), "{function}");
        }
        assert!(!is_foreign_function("my_run::model::net"));
        assert!(!is_foreign_function("<my_run::Net as tch::nn::module::Module>::forward"));
    }

    #[test]
    fn the_caller_is_the_first_function_of_the_program_after_the_panic() {
        let trace = "   0: my_run::hook
   1: std::panicking::panic_with_hook
             at /rustc/59807616e1fa/library/std/src/panicking.rs:833:13
   2: core::result::unwrap_failed
   3: tch::wrappers::tensor::Tensor::matmul
             at /home/user/.cargo/registry/src/index/tch-0.26.0/src/wrappers/tensor.rs:7:1
      my_run::model::net
             at ./src/model.rs:9:13
   4: my_run::main
             at ./src/main.rs:20:5
";
        assert_eq!(caller_in(trace).as_deref(), Some(" at ./src/model.rs:9:13"));
        let without_places =
            trace.lines().filter(|line| !line.contains(" at ")).collect::<Vec<_>>();
        assert_eq!(
            caller_in(&without_places.join("\n")).as_deref(),
            Some(" in my_run::model::net")
        );
        let in_closure =
            trace.replace("my_run::model::net", &format!("{IN_CLOSURE}::{{{{closure}}}}"));
        assert_eq!(caller_in(&in_closure), None);
        assert_eq!(caller_in(""), None);
    }

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
