//! Reports a mapped file that can no longer be read.
//!
//! Accessing a missing page ends a process with SIGBUS, without a message. Pages go missing if the file was truncated,
//! the disk fails, or the network file system is gone. The handler here prints the file's name. It is installed when
//! the first file is mapped, and leaves any other SIGBUS to the previous handler.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// The memory of a mapped file. This entry is never freed, because the handler may be reading it. It is small.
pub(crate) struct WatchedMapping {
    start: usize,
    /// The length in bytes. 0 when the file is no longer mapped.
    len: AtomicUsize,
    message: String,
    next: AtomicPtr<WatchedMapping>,
}

/// The newest entry, the head of a linked list.
static NEWEST: AtomicPtr<WatchedMapping> = AtomicPtr::new(ptr::null_mut());

/// The previous SIGBUS action.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Registers `len` bytes: a SIGBUS in them reports `file`.
pub(crate) fn watch_mapping(start: *const u8, len: usize, file: &str) -> &'static WatchedMapping {
    install();
    let message = format!(
        "ddp-mp: a data file that is mapped has become shorter or cannot be read: {file}\n"
    );
    let watched = Box::into_raw(Box::new(WatchedMapping {
        start: start as usize,
        len: AtomicUsize::new(len),
        message,
        next: AtomicPtr::default(),
    }));
    // SAFETY: never freed.
    let mine = unsafe { &*watched };
    let mut newest = NEWEST.load(Ordering::Acquire);
    loop {
        mine.next.store(newest, Ordering::Relaxed);
        match NEWEST.compare_exchange(newest, watched, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return mine,
            Err(newer) => newest = newer,
        }
    }
}

impl WatchedMapping {
    /// Makes the handler ignore this memory, because the file is no longer mapped.
    pub(crate) fn forget(&self) {
        self.len.store(0, Ordering::Release);
    }

    fn holds(&self, address: usize) -> bool {
        address.checked_sub(self.start).is_some_and(|at| at < self.len.load(Ordering::Acquire))
    }
}

fn install() {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if INSTALLED.swap(true, Ordering::AcqRel) {
        return;
    }
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both calls get whole structs (in C all zeros is a valid one) or null. The handler only does what a
    // handler may: it reads atomics and memory that is never freed, and calls write, _exit and sigaction. It runs
    // on the signal stack that Rust gives its threads, if there is one.
    unsafe {
        libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr());
        let _ = PREVIOUS.set(previous.assume_init());
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
    }
}

extern "C" fn on_bus_error(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a whole siginfo, which has an address for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut next = NEWEST.load(Ordering::Acquire);
    // SAFETY: null, or one of the list, which are never freed.
    while let Some(watched) = unsafe { next.as_ref() } {
        if watched.holds(address) {
            super::terminal::restore();
            let message = watched.message.as_bytes();
            // SAFETY: writes memory that is there; `_exit` does not return.
            unsafe {
                libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
                libc::_exit(1);
            }
        }
        next = watched.next.load(Ordering::Acquire);
    }
    // Not ours: on return the SIGBUS occurs again, and the previous action handles it.
    if let Some(previous) = PREVIOUS.get() {
        // SAFETY: puts back what sigaction gave.
        unsafe { libc::sigaction(libc::SIGBUS, previous, ptr::null_mut()) };
    }
}
