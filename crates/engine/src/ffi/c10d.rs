//! Rust bindings for `c10d.cpp`. Most calls block. `store` and `gloo` make them on threads of their own.

use std::convert::Infallible;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::time::Duration;

use crossbeam::channel::Sender;
use torch_sys::C_tensor;

use super::shim::{Object, take_message};
use crate::error::{Error, first_line};
use crate::operation::Operation;
use crate::runtime::MAX_WAIT;

/// `c10::intrusive_ptr<c10d::TCPStore>`, only ever behind a pointer.
enum RawStore {}

/// `c10d::ProcessGroupGloo`, only ever behind a pointer.
enum RawGroup {}

type BytesCallback = unsafe extern "C" fn(*mut c_void, *const u8, usize);
type DoneCallback = unsafe extern "C" fn(*mut c_void, *const c_char);

// The numbers of the operations in `c10d.cpp`, between which are the others.
const _: () = assert!(Operation::AllReduce as u8 == 4 && Operation::Recv as u8 == 13);
const _: () = assert!(Operation::Barrier as u8 == 15);

/// One call of an operation.
#[repr(C)]
pub(super) struct GlooArguments {
    pub operation: Operation,
    /// A `c10d::ReduceOp::RedOpType`.
    pub reduce: u8,
    pub peer: c_int,
    pub tag: c_int,
    pub inputs: *const *mut C_tensor,
    pub inputs_len: usize,
    pub outputs: *const *mut C_tensor,
    pub outputs_len: usize,
    pub input_splits: *const i64,
    pub output_splits: *const i64,
    pub splits_len: usize,
}

unsafe extern "C" {
    fn ddp_store_new(
        host: *const c_char,
        port: u16,
        listen_fd: c_int,
        timeout_ms: i64,
        store: *mut *mut RawStore,
    ) -> *mut c_char;
    fn ddp_store_free(store: *mut RawStore);
    fn ddp_store_set(
        store: *mut RawStore,
        key: *const c_char,
        bytes: *const u8,
        len: usize,
    ) -> *mut c_char;
    fn ddp_store_get(
        store: *mut RawStore,
        key: *const c_char,
        take: BytesCallback,
        context: *mut c_void,
    ) -> *mut c_char;
    fn ddp_store_wait(
        store: *mut RawStore,
        keys: *const *const c_char,
        len: usize,
        timeout_ms: i64,
        found: *mut bool,
    ) -> *mut c_char;
    fn ddp_store_add(
        store: *mut RawStore,
        key: *const c_char,
        amount: i64,
        sum: *mut i64,
    ) -> *mut c_char;
    fn ddp_store_set_new(
        store: *mut RawStore,
        key: *const c_char,
        bytes: *const u8,
        len: usize,
        take: BytesCallback,
        context: *mut c_void,
    ) -> *mut c_char;
    fn ddp_gloo_new(
        store: *mut RawStore,
        prefix: *const c_char,
        rank: c_int,
        size: c_int,
        timeout_ms: i64,
        interfaces: *const *const c_char,
        interfaces_len: usize,
        address: *const c_char,
        group: *mut *mut RawGroup,
    ) -> *mut c_char;
    fn ddp_gloo_free(group: *mut RawGroup);
    fn ddp_gloo_start(
        group: *mut RawGroup,
        call: *const GlooArguments,
        done: DoneCallback,
        context: *mut c_void,
    ) -> *mut c_char;
    fn ddp_gloo_set_timeout(group: *mut RawGroup, timeout_ms: i64) -> *mut c_char;
    fn ddp_gloo_abort(group: *mut RawGroup) -> *mut c_char;
}

/// A result whose error is one line of libtorch's message.
pub(super) type Result<T> = std::result::Result<T, String>;

/// One connection to a store, and the server itself in the process that runs it. Calls block until the server
/// responds.
pub(super) struct Connection(Object<RawStore>);

// SAFETY: nothing in the C++ object belongs to a thread. Not Sync: only one thread may call it at a time.
unsafe impl Send for Connection {}

impl Connection {
    /// Connects to the server at `host`, an address. With a `listener`, a socket that listens there, this process
    /// becomes the server. libtorch takes the socket over.
    pub(super) fn new(
        host: &str,
        port: u16,
        listener: Option<c_int>,
        timeout: Duration,
    ) -> Result<Self> {
        let (host, listener) = (c_string(host)?, listener.unwrap_or(-1));
        // SAFETY: reads one string; a store is freed with `ddp_store_free`.
        let store = unsafe {
            Object::new(ddp_store_free, |store| {
                ddp_store_new(host.as_ptr(), port, listener, millis(timeout), store)
            })
        };
        store.map(Self)
    }

    pub(super) fn set(&mut self, key: &str, value: &[u8]) -> Result<()> {
        let key = c_string(key)?;
        // SAFETY: `self` is live; reads one string, and bytes with their length.
        take_message(unsafe { ddp_store_set(self.0.at, key.as_ptr(), value.as_ptr(), value.len()) })
    }

    pub(super) fn get(&mut self, key: &str) -> Result<Vec<u8>> {
        let (key, mut value) = (c_string(key)?, Vec::new());
        let context = (&raw mut value).cast();
        // SAFETY: `self` is live; `take` is called before this returns, with the vector that is its context.
        take_message(unsafe { ddp_store_get(self.0.at, key.as_ptr(), take, context) })?;
        Ok(value)
    }

    /// Waits for all `keys`. Returns `false` after `timeout`; with less than a millisecond, only looks whether they are set.
    pub(super) fn wait(&mut self, keys: &[String], timeout: Duration) -> Result<bool> {
        let (keys, mut there) = (CStringArray::new(keys)?, false);
        // SAFETY: `self` is live; reads strings with their number, writes one bool to a valid place.
        take_message(unsafe {
            ddp_store_wait(
                self.0.at,
                keys.pointers.as_ptr(),
                keys.pointers.len(),
                millis(timeout),
                &mut there,
            )
        })?;
        Ok(there)
    }

    pub(super) fn add(&mut self, key: &str, amount: i64) -> Result<i64> {
        let (key, mut sum) = (c_string(key)?, 0);
        // SAFETY: `self` is live; reads one string, writes one number to a valid place.
        take_message(unsafe { ddp_store_add(self.0.at, key.as_ptr(), amount, &mut sum) })?;
        Ok(sum)
    }

    /// Sets `key` if it is not set. Returns its value.
    pub(super) fn set_new(&mut self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        let (key, mut now) = (c_string(key)?, Vec::new());
        let (bytes, len, context) = (value.as_ptr(), value.len(), (&raw mut now).cast());
        // SAFETY: as in `set` and `get`.
        take_message(unsafe {
            ddp_store_set_new(self.0.at, key.as_ptr(), bytes, len, take, context)
        })?;
        Ok(now)
    }
}

/// A `ProcessGroupGloo`. Dropping it waits until its operations have ended.
pub(super) struct GlooHandle(Object<RawGroup>);

// SAFETY: nothing in the C++ object belongs to a thread. Not Sync: only one thread may call it at a time.
unsafe impl Send for GlooHandle {}

impl GlooHandle {
    /// Joins a group. Blocks until all ranks are connected, at most for the timeout.
    pub(super) fn new(
        store: &mut Connection,
        prefix: &str,
        rank: usize,
        size: usize,
        timeout: Duration,
        interfaces: &[String],
        address: &str,
    ) -> Result<Self> {
        let (prefix, address) = (c_string(prefix)?, c_string(address)?);
        let interfaces = CStringArray::new(interfaces)?;
        // SAFETY: the store is live, and C++ keeps a handle of its own to it; reads strings with their number; a group is
        // freed with `ddp_gloo_free`.
        let group = unsafe {
            Object::new(ddp_gloo_free, |group| {
                ddp_gloo_new(
                    store.0.at,
                    prefix.as_ptr(),
                    rank as c_int,
                    size as c_int,
                    millis(timeout),
                    interfaces.pointers.as_ptr(),
                    interfaces.pointers.len(),
                    address.as_ptr(),
                    group,
                )
            })
        };
        group.map(Self)
    }

    /// Starts an operation. Its result is sent to `ended`.
    ///
    /// # Safety
    /// The pointers of `call` point to live tensors and splits, in the numbers that it states.
    pub(super) unsafe fn start(&mut self, call: &GlooArguments, ended: GlooEnd) -> Result<()> {
        let context = Box::into_raw(Box::new(ended)).cast();
        // SAFETY: `self` is live; the call is as the caller promises, and libtorch has handles of its own to the
        // tensors while it works; `done` is called once, with the box that is its context, unless this fails.
        let started = unsafe { take_message(ddp_gloo_start(self.0.at, call, done, context)) };
        if started.is_err() {
            // SAFETY: it was not started, so the box is still ours.
            drop(unsafe { Box::from_raw(context.cast::<GlooEnd>()) });
        }
        started
    }

    /// Makes operations that start from now on fail after `timeout`.
    pub(super) fn set_timeout(&mut self, timeout: Duration) -> Result<()> {
        // SAFETY: `self` is live.
        take_message(unsafe { ddp_gloo_set_timeout(self.0.at, millis(timeout)) })
    }

    /// Makes all operations fail at once, here and on the ranks that wait for this one.
    pub(super) fn abort(&mut self) -> Result<()> {
        // SAFETY: `self` is live.
        take_message(unsafe { ddp_gloo_abort(self.0.at) })
    }
}

/// The channels on which the end of an operation is reported, and its name.
pub(super) struct GlooEnd {
    /// The operation's name, for its error.
    pub doing: &'static str,
    pub result: Sender<crate::error::Result<()>>,
    /// A clone of the group's sender. Its channel closes when all operations have ended.
    pub running: Sender<Infallible>,
}

unsafe extern "C" fn done(context: *mut c_void, error: *const c_char) {
    // SAFETY: the box of `start`, which is given back here, once.
    let ended = unsafe { Box::from_raw(context.cast::<GlooEnd>()) };
    let result = if error.is_null() {
        Ok(())
    } else {
        // SAFETY: a NUL-terminated string that lives as long as this call.
        let reason = first_line(&unsafe { CStr::from_ptr(error) }.to_string_lossy());
        Err(Error::Gloo { doing: ended.doing, reason: plain(reason) })
    };
    // The send fails if the caller dropped the receiver.
    let _ = ended.result.send(result);
    drop(ended.running);
}

/// Removes the position in Gloo's source from the beginning of its message.
pub(super) fn plain(reason: String) -> String {
    match reason.split_once("] ") {
        Some((source, rest)) if source.starts_with('[') && source.contains(".cc:") => rest.into(),
        _ => reason,
    }
}

unsafe extern "C" fn take(context: *mut c_void, bytes: *const u8, len: usize) {
    // SAFETY: the vector on the stack of `get` or `set_new`, which waits for this call.
    let value = unsafe { &mut *context.cast::<Vec<u8>>() };
    if len > 0 {
        // SAFETY: `len` bytes, which live until this call returns.
        value.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes, len) });
    }
}

/// An array of strings for C. The pointers are valid while this lives.
struct CStringArray {
    _strings: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl CStringArray {
    fn new(strings: &[String]) -> Result<Self> {
        let strings: Vec<CString> = strings.iter().map(|s| c_string(s)).collect::<Result<_>>()?;
        let pointers = strings.iter().map(|s| s.as_ptr()).collect();
        Ok(Self { _strings: strings, pointers })
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| format!("{text:?} contains a NUL character"))
}

fn millis(duration: Duration) -> i64 {
    // Beyond 292 years, in nanoseconds, libtorch's clock overflows.
    i64::try_from(duration.min(MAX_WAIT).as_millis()).unwrap_or(i64::MAX)
}
