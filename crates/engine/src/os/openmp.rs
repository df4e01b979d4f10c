//! Sets up libtorch's OpenMP: limits how long its threads spin while they wait for each other, and leaves it to `--bind`
//! to bind them.
//!
//! At the end of each parallel loop libgomp's threads spin about 300,000 times (about 14 ms) before they sleep. If
//! other programs use the cores, a spinning thread can keep the thread that it waits for from running. A step then
//! takes a hundred times longer. 10,000 spins bridge the gaps between the loops of a step on an idle machine. libgomp
//! reads the number once, before `main`, so the program restarts itself with it.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;

/// A function that the system runs before `main`, with the arguments and the environment of the process.
pub type BeforeMain = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char);

/// The variable that is added to the environment.
const SPIN_COUNT: &CStr = c"GOMP_SPINCOUNT=10000";

/// The variables with which users choose a wait policy. They take precedence.
const CHOSEN: [&[u8]; 2] = [b"GOMP_SPINCOUNT=", b"OMP_WAIT_POLICY="];

/// The number of environment variables that are passed on. With more, the program does not restart.
const MAX_VARIABLES: usize = 4096;

/// The variable in which the restarted program reads the name of a variable that was left out.
const LEFT_OUT: &str = "DDP_MP_LEFT_OUT";

/// The variables with which an OpenMP library binds threads, each as the value of [`LEFT_OUT`]. libgomp binds the main thread
/// before `main`, so that the process seems to have one CPU. Later it binds the threads of each rank, to the same CPUs.
const BIND: [&CStr; 4] = [
    c"DDP_MP_LEFT_OUT=OMP_PROC_BIND=",
    c"DDP_MP_LEFT_OUT=OMP_PLACES=",
    c"DDP_MP_LEFT_OUT=GOMP_CPU_AFFINITY=",
    c"DDP_MP_LEFT_OUT=KMP_AFFINITY=",
];

/// The values of `OMP_PROC_BIND` with which nothing is bound, whatever the others say.
const BIND_NOTHING: [&[u8]; 2] = [b"OMP_PROC_BIND=f", b"OMP_PROC_BIND=F"];

/// Restarts the program with a limit on spinning, unless the environment already sets a wait policy, and without the
/// variables with which OpenMP binds threads. Run it from `.preinit_array`, before the constructors of libraries: those of
/// libtorch take 0.1 s, the restart a few ms. If the restart fails, the program continues unchanged.
///
/// # Safety
/// `argv` and `envp` must be what the system gave the process: arrays of C strings that end with null. No other thread
/// may run.
pub unsafe extern "C" fn set_up_openmp(
    _argc: c_int,
    argv: *const *const c_char,
    envp: *const *const c_char,
) {
    // Libraries are loaded but not initialised, so use only system calls, and do not allocate.
    if is_run_by_linker() {
        return; // the executable is the linker, and `argv` does not name it
    }
    let mut variables = [ptr::null(); MAX_VARIABLES + 3];
    let (mut count, mut is_chosen, mut binds_nothing) = (0, false, false);
    loop {
        // SAFETY: the loop ends at the null that ends the array.
        let variable = unsafe { *envp.add(count) };
        if variable.is_null() {
            break;
        }
        if count == MAX_VARIABLES {
            return;
        }
        // SAFETY: a C string, as the caller promises.
        let is_one_of =
            |names: &[&[u8]]| names.iter().any(|it| unsafe { begins_with(variable, it) });
        is_chosen |= is_one_of(&CHOSEN);
        binds_nothing |= is_one_of(&BIND_NOTHING);
        variables[count] = variable;
        count += 1;
    }
    let (mut kept, left_out) = if binds_nothing {
        (count, None)
    } else {
        // SAFETY: C strings, as the caller promises.
        unsafe { leave_out_binding(&mut variables[..count]) }
    };
    if is_chosen && left_out.is_none() {
        return;
    }
    for added in [left_out, (!is_chosen).then_some(SPIN_COUNT)].into_iter().flatten() {
        variables[kept] = added.as_ptr();
        kept += 1;
    }
    variables[kept] = ptr::null();
    // SAFETY: both end with null, and the caller promises the rest.
    unsafe { restart(argv, &variables) };
}

/// Moves the variables that bind no threads to the front. Returns how many they are, and the first of the others.
///
/// # Safety
/// `variables` must be C strings.
unsafe fn leave_out_binding(variables: &mut [*const c_char]) -> (usize, Option<&'static CStr>) {
    let (mut kept, mut left_out) = (0, None);
    for index in 0..variables.len() {
        let variable = variables[index];
        // SAFETY: a C string, as the caller promises.
        let is_it =
            |told: &&CStr| unsafe { begins_with(variable, &told.to_bytes()[LEFT_OUT.len() + 1..]) };
        match BIND.into_iter().find(is_it) {
            Some(told) => left_out = left_out.or(Some(told)),
            None => {
                variables[kept] = variable;
                kept += 1;
            }
        }
    }
    (kept, left_out)
}

/// Runs this program's file in place of the program, with these arguments and variables. Returns if it fails.
///
/// # Safety
/// Both must be arrays of C strings that end with null.
unsafe fn restart(argv: *const *const c_char, variables: &[*const c_char]) {
    let mut program = [0u8; libc::PATH_MAX as usize];
    let link = c"/proc/self/exe".as_ptr();
    // SAFETY: the length leaves room for the null at the buffer's end; the arrays end with null. If the program's
    // file is gone, `execve` returns.
    unsafe {
        if libc::readlink(link, program.as_mut_ptr().cast(), program.len() - 1) > 0 {
            libc::execve(program.as_ptr().cast(), argv, variables.as_ptr());
        }
    }
}

/// Restarts the program from `main` with a limit on spinning, as [`set_up_openmp`] does before it. No other thread may run.
/// For a program without a `.preinit_array`.
#[doc(hidden)]
pub fn limit_spinning_in_main() {
    let is_set = |name: &[u8]| {
        let name = name.strip_suffix(b"=").unwrap_or(name);
        std::env::var_os(OsStr::from_bytes(name)).is_some()
    };
    if is_run_by_linker() || CHOSEN.into_iter().any(is_set) {
        return;
    }
    let Ok(program) = std::env::current_exe() else { return };
    let variable = SPIN_COUNT.to_str().ok().and_then(|variable| variable.split_once('='));
    let mut args = std::env::args_os();
    let mut program = Command::new(program);
    program.arg0(args.next().unwrap_or_default()).args(args).envs(variable);
    let _ = program.exec(); // returns if the program's file is gone
}

/// Returns a note for the user on the variable with which OpenMP binds threads, if [`set_up_openmp`] has left one out.
#[doc(hidden)]
pub fn binding_note() -> Option<String> {
    let name = std::env::var_os(LEFT_OUT)?;
    Some(format!(
        "{} is left out, as all variables that make OpenMP bind threads: those of all ranks would share CPUs; --bind \
         gives each rank CPUs of its own",
        name.to_string_lossy().trim_end_matches('=')
    ))
}

/// Returns whether the user started the dynamic linker with this program as its argument, as in `ld.so ddp-mp`. The
/// process's executable is then the linker.
#[doc(hidden)]
pub fn is_run_by_linker() -> bool {
    // The kernel sets AT_BASE to the linker's address only if it loaded the linker for a program.
    // SAFETY: reads a number that the system has left in the process.
    unsafe { libc::getauxval(libc::AT_BASE) == 0 }
}

/// Returns whether `text` begins with `name`.
///
/// # Safety
/// `text` must be a C string.
unsafe fn begins_with(text: *const c_char, name: &[u8]) -> bool {
    // SAFETY: stops at the first difference, at the latest at the null at the end.
    name.iter().enumerate().all(|(at, byte)| unsafe { *text.add(at) } as u8 == *byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variable_is_matched_by_its_whole_name() {
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
