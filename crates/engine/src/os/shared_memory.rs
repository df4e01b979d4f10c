//! Memory that processes of one host share: a sealed memfd, which they pass on through a Unix socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU64;

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
    socket_with,
};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open};

/// The size of the memory of a process, in bytes. Only pages that are used take memory.
const LEN: usize = 64 << 30;

/// The memory of one process, as mapped by this one.
#[derive(Debug)]
pub(crate) struct SharedRegion {
    map: MmapRaw,
    /// The file of this process's own memory, to pass on; `None` for that of another process.
    file: Option<OwnedFd>,
}

impl SharedRegion {
    /// Creates the memory of this process: zeros. No process can change its size.
    ///
    /// # Errors
    /// If the system refuses, for example because of a limit.
    pub(crate) fn create() -> io::Result<Self> {
        // Beyond the limit, the kernel would end the process.
        if let Some(limit) = getrlimit(Resource::Fsize).current
            && limit < LEN as u64
        {
            let limit = limit / 1024;
            return Err(io::Error::other(format!(
                "the limit on file sizes is {limit} KiB; raise it (ulimit -f unlimited)"
            )));
        }
        let file = memory_file("ddp-mp", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, LEN as u64)?;
        fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
        Ok(Self { map: map(&file)?, file: Some(file) })
    }

    /// Maps the memory of another process.
    ///
    /// # Errors
    /// If it has another size, or can become smaller: access would then end this process.
    pub(crate) fn open(file: OwnedFd) -> io::Result<Self> {
        let is_sealed = fcntl_get_seals(&file)?.contains(SEALS);
        if !is_sealed || fstat(&file)?.st_size != LEN as i64 {
            return Err(io::Error::other("the memory of another process is not sealed"));
        }
        Ok(Self { map: map(&file)?, file: None })
    }

    /// Returns the number in the first bytes, by which the processes recognize the memory.
    pub(crate) fn mark(&self) -> &AtomicU64 {
        // SAFETY: the memory begins at a page and has these bytes as long as `self`; all processes use them as an atomic
        // number only, and none sends memory with another layout under the seal and the token.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast()) }
    }

    /// Returns the address of the byte `offset`; `None` if the memory has no `len` bytes there.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (end <= LEN).then(|| self.map.as_mut_ptr().wrapping_add(offset))
    }

    /// Returns the offset of `address`; `None` if the memory has no `len` bytes there.
    pub(crate) fn offset_of(&self, address: *const u8, len: usize) -> Option<usize> {
        let offset = (address as usize).checked_sub(self.map.as_ptr() as usize)?;
        self.at(offset, len).map(|_| offset)
    }

    /// Gives the pages of a range back to the system. They are zeros then. If the system refuses, they stay.
    pub(crate) fn free(&self, offset: usize, len: usize) {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Some(file) = &self.file {
            let _ = fallocate(file, mode, offset as u64, len as u64);
        }
    }

    /// Sends `message` and this memory.
    ///
    /// # Errors
    /// If the other end does not take them at once.
    pub(crate) fn send(&self, socket: &UnixStream, message: &[u8]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let file = self.file.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        let file = [file.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&file));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = sendmsg(socket, &[IoSlice::new(message)], &mut control, flags)?;
        if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Receives a message of this length and the memory of the process at the other end, for [`SharedRegion::open`].
    /// `is_expected` checks the message first. Waits as long as the socket does.
    ///
    /// # Errors
    /// If the other end has sent something else, or nothing.
    pub(crate) fn receive(
        socket: &UnixStream,
        message: &mut [u8],
        is_expected: impl FnOnce(&[u8]) -> bool,
    ) -> io::Result<OwnedFd> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let length = message.len();
        let mut into = [IoSliceMut::new(message)];
        let received =
            retry_on_intr(|| recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC))?;
        if received.bytes == 0 {
            return Err(io::Error::other("the process at the other end has ended"));
        }
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        match file {
            Some(file) if received.bytes == length && is_expected(message) => Ok(file),
            _ => Err(io::Error::other("another program has sent something else")),
        }
    }
}

/// The seals that keep the size.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Creates a file in memory that is never executed: a system may refuse others.
pub(crate) fn memory_file(name: &str, flags: MemfdFlags) -> Result<OwnedFd, Errno> {
    match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(name, flags), // before Linux 6.3
        file => file,
    }
}

fn map(file: &OwnedFd) -> io::Result<MmapRaw> {
    let map = MmapOptions::new().len(LEN).no_reserve_swap().map_raw(file);
    let map = map.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NOMEM) => io::Error::other(
            "64 GiB of addresses are not available; raise the limit (ulimit -v unlimited)",
        ),
        _ => error,
    })?;
    map.advise(Advice::DontDump)?; // a core dump would allocate every page
    Ok(map)
}

/// Connects to the socket `name`, which has no file, without waiting.
///
/// # Errors
/// If no process listens there, or too many connections wait to be accepted.
pub(crate) fn connect(name: &str) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    let socket = UnixStream::from(socket);
    socket.set_nonblocking(false)?;
    Ok(socket)
}

/// Returns the process at the other end of `socket`, as a file that becomes readable when it ends. `None` if the system
/// has none, or if the process is in a namespace that this one does not see.
///
/// # Errors
/// If that process belongs to another user.
pub(crate) fn peer(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes a `ucred` of this size.
    let refused = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    };
    if refused != 0 {
        return Err(io::Error::last_os_error());
    }
    if peer.uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other(format!("a process of user {} listens", peer.uid)));
    }
    Ok(Pid::from_raw(peer.pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_passes_through_a_socket_and_cannot_shrink() {
        let (here, there) = UnixStream::pair().unwrap();
        let region = SharedRegion::create().unwrap();
        region.send(&here, b"hello").unwrap();
        let mut message = [0; 5];
        let theirs = SharedRegion::receive(&there, &mut message, |it| it == b"hello");
        let theirs = SharedRegion::open(theirs.unwrap()).unwrap();
        let at = |region: &SharedRegion, offset| region.at(offset, 1).unwrap();
        // SAFETY: both addresses are those of one byte of memory, which this test alone uses. The compiler does not know that
        // they are the same byte, and that the kernel changes it.
        unsafe {
            at(&region, LEN - 1).write_volatile(7);
            assert_eq!(at(&theirs, LEN - 1).read_volatile(), 7);
            region.free(LEN - 4096, 4096);
            assert_eq!(at(&theirs, LEN - 1).read_volatile(), 0);
        }
        assert!(region.at(LEN, 1).is_none() && region.at(usize::MAX, 2).is_none());
        assert_eq!(region.offset_of(at(&region, 8), 8), Some(8));
        assert_eq!(region.offset_of(at(&theirs, 8), 8), None);
        assert_eq!(ftruncate(region.file.as_ref().unwrap(), 0), Err(Errno::PERM));
        assert!(peer(&there).unwrap().is_some());
    }

    #[test]
    fn memory_that_can_shrink_and_strange_messages_are_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        let receive = || {
            let file = SharedRegion::receive(&there, &mut [0; 2], |it| it == b"ok")?;
            SharedRegion::open(file)
        };
        SharedRegion::create().unwrap().send(&here, b"no").unwrap();
        assert!(receive().unwrap_err().to_string().contains("something else"));
        rustix::io::write(&here, b"ok").unwrap();
        assert!(receive().unwrap_err().to_string().contains("something else"));
        let file = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, LEN as u64).unwrap();
        SharedRegion { map: map(&file).unwrap(), file: Some(file) }.send(&here, b"ok").unwrap();
        assert!(receive().unwrap_err().to_string().contains("not sealed"));
    }
}
