//! How long libtorch's OpenMP threads spin while they wait for each other.
//!
//! At the end of each parallel loop libgomp's threads spin about 300,000 times, some 14 ms, before they sleep. Where
//! other programs want the cores, the thread that is waited for has none, and the one that spins keeps it from running:
//! a step takes a hundred times as long. 10,000 spins are enough to bridge the gaps between the loops of a step on a
//! quiet machine. libgomp reads the number once, before `main`, so the program starts itself anew with it.

use std::ffi::{c_char, c_int};
use std::ptr;

/// A function that the system runs before `main`, with the arguments and the environment of the process.
pub type BeforeMain = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char);

/// What is added to the environment.
const SPINS: &[u8] = b"GOMP_SPINCOUNT=10000\0";

/// The variables by which users choose for themselves.
const CHOSEN: [&[u8]; 2] = [b"GOMP_SPINCOUNT=", b"OMP_WAIT_POLICY="];

/// The most variables that are passed on; with more the program stays as it is.
const MOST: usize = 4096;

/// Starts the program anew with a bound on spinning, unless its environment already says how to wait. To be run before
/// the constructors of libraries, from `.preinit_array`: libtorch's take a tenth of a second, and this takes a few
/// milliseconds. Where it cannot, the program goes on as it is.
///
/// # Safety
/// `argv` and `envp` must be what the system gave the process: arrays of C strings that end with null. No other thread
/// may run.
pub unsafe extern "C" fn limit_spinning(
    _argc: c_int,
    argv: *const *const c_char,
    envp: *const *const c_char,
) {
    // Libraries are loaded, but not initialised: system calls only, and no allocation.
    if is_run_by_linker() {
        return; // the file of this process is the linker's, and `argv` does not name it
    }
    let mut variables = [ptr::null(); MOST + 2];
    let mut count = 0;
    loop {
        // SAFETY: the loop ends at the null that ends the array.
        let variable = unsafe { *envp.add(count) };
        if variable.is_null() {
            break;
        }
        // SAFETY: a C string, as the caller promises.
        let is_chosen = |name: &&[u8]| unsafe { begins_with(variable, name) };
        if count == MOST || CHOSEN.iter().any(is_chosen) {
            return;
        }
        variables[count] = variable;
        count += 1;
    }
    variables[count] = SPINS.as_ptr().cast();
    let mut program = [0u8; libc::PATH_MAX as usize];
    let link = c"/proc/self/exe".as_ptr();
    // SAFETY: the buffer is as long as is said, but for the null at its end; the arrays end with null. Where the
    // program's file is gone, `execve` returns.
    unsafe {
        if libc::readlink(link, program.as_mut_ptr().cast(), program.len() - 1) > 0 {
            libc::execve(program.as_ptr().cast(), argv, variables.as_ptr());
        }
    }
}

/// Whether the user has started the dynamic linker with this program as its argument, as in `ld.so ddp-mp`. The process's
/// own file is the linker then.
pub(crate) fn is_run_by_linker() -> bool {
    // A linker that the system has loaded has an address.
    // SAFETY: reads a number that the system has left in the process.
    unsafe { libc::getauxval(libc::AT_BASE) == 0 }
}

/// Whether `text` begins with `name`.
///
/// # Safety
/// `text` must be a C string.
unsafe fn begins_with(text: *const c_char, name: &[u8]) -> bool {
    // SAFETY: stops at the first difference, which the null at the end is one of.
    name.iter().enumerate().all(|(at, byte)| unsafe { *text.add(at) } as u8 == *byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_known_by_its_name_and_not_by_its_beginning() {
        let is_chosen = |text: &std::ffi::CStr| {
            // SAFETY: a C string.
            CHOSEN.iter().any(|name| unsafe { begins_with(text.as_ptr(), name) })
        };
        assert!(is_chosen(c"OMP_WAIT_POLICY=active") && is_chosen(c"GOMP_SPINCOUNT="));
        assert!(
            !is_chosen(c"OMP_WAIT_POLICY") && !is_chosen(c"GOMP_SPINCOUNTS=1") && !is_chosen(c"")
        );
    }
}
