//! The functions that `ddp_mp` in Python calls by ctypes: fingerprints of tensors, and the program `ddp-mp-diff`.

use std::ffi::{CStr, OsString, c_char, c_int};
use std::io::{self, Write};
use std::os::unix::ffi::OsStringExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

use clap::Parser;
use compare::{DiffFlags, escaped};

/// The exit code of a mistake in what the user gave.
const WRONG_INPUT: c_int = 2;

/// The first number in which two training runs differ
///
/// Compares two records of ddp_mp.record, or two safetensors files. The steps are compared in order, and within a step the
/// batch, what modules return, the loss, the gradients, their averages over all ranks, the parameters and the buffers
#[derive(Debug, Parser)]
#[command(name = "ddp-mp-diff", version)]
struct CommandLine {
    #[command(flatten)]
    flags: DiffFlags,
}

/// Writes the fingerprint of a tensor, or of a part of one, into `text`, as JSON. Returns its length; 0 if there is not enough
/// room.
///
/// `elements` has `len` bytes: the elements in row-major order. `dtype` is PyTorch's name of theirs.
///
/// # Safety
/// `elements` must have `len` bytes, `dtype` must end with a zero, and `text` must have `room` bytes. `elements` may be null if
/// `len` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ddp_mp_fingerprint(
    elements: *const u8,
    len: usize,
    dtype: *const c_char,
    part: i64,
    text: *mut u8,
    room: usize,
) -> usize {
    let bytes = if len == 0 {
        &[]
    } else {
        // SAFETY: the caller says so.
        unsafe { slice::from_raw_parts(elements, len) }
    };
    // SAFETY: the caller says so.
    let (dtype, room) = unsafe { (CStr::from_ptr(dtype), slice::from_raw_parts_mut(text, room)) };
    let mut made = compare::fingerprint(bytes, dtype.to_str().unwrap_or_default());
    made.part = u64::try_from(part).ok();
    let json = serde_json::to_vec(&made).unwrap_or_default();
    match room.get_mut(..json.len()) {
        Some(room) => {
            room.copy_from_slice(&json);
            json.len()
        }
        None => 0,
    }
}

/// The part of a tensor that is due in a step.
#[derive(Debug)]
#[repr(C)]
pub struct Part {
    /// Its index; -1 if the tensor is one part.
    pub index: i64,
    /// Its first element.
    pub first: usize,
    /// Its elements.
    pub len: usize,
}

/// Returns the part of a tensor of `numel` elements that is due in a step.
#[unsafe(no_mangle)]
pub extern "C" fn ddp_mp_part_of_step(numel: usize, step: u64) -> Part {
    match compare::part_of_step(numel, step) {
        Some((index, first, len)) => Part { index: index as i64, first, len },
        None => Part { index: -1, first: 0, len: numel },
    }
}

/// Runs the program `ddp-mp-diff` with these arguments, the first of which is its name. Returns the exit code.
///
/// # Safety
/// `arguments` must have `count` strings that end with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ddp_mp_diff(count: usize, arguments: *const *const c_char) -> c_int {
    // SAFETY: the caller says so.
    let arguments = unsafe { slice::from_raw_parts(arguments, count) };
    let text = |argument: &*const c_char| {
        // SAFETY: the caller says so.
        let bytes = unsafe { CStr::from_ptr(*argument) }.to_bytes().to_vec();
        OsString::from_vec(bytes)
    };
    let arguments: Vec<OsString> = arguments.iter().map(text).collect();
    // A panic must not go through Python. It has been printed.
    catch_unwind(AssertUnwindSafe(|| run(arguments))).unwrap_or(WRONG_INPUT)
}

fn run(arguments: Vec<OsString>) -> c_int {
    let flags = match CommandLine::try_parse_from(arguments) {
        Ok(CommandLine { flags }) => flags,
        Err(error) => {
            let _ = error.print();
            return error.exit_code();
        }
    };
    let found = match compare::diff(&flags) {
        Ok(found) => found,
        Err(refused) => {
            let refused = refused.to_string();
            let _ = writeln!(io::stderr(), "ddp-mp-diff: error: {}", escaped(&refused));
            return WRONG_INPUT;
        }
    };
    let mut text = found.lines.join("\n");
    text.push('\n');
    let mut stdout = io::stdout();
    match stdout.write_all(escaped(&text).as_bytes()).and_then(|()| stdout.flush()) {
        // Whoever reads it has seen enough.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "ddp-mp-diff: error: writing stdout: {error}");
            WRONG_INPUT
        }
        _ => c_int::from(!found.is_equal),
    }
}
