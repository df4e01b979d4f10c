//! Reads paths that may be anything, such as a pipe without a writer, or an endless device.

use std::fs::FileType;
use std::io::{self, Error, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use compare::{not_regular, open_regular, open_without_waiting};
use rustix::event::PollFlags;

use super::wait_for;

/// The timeout for each part of a configuration that is read through a pipe.
const MAX_READ_WAIT: Duration = Duration::from_secs(10);

/// Returns the contents of a regular file of at most `limit` bytes.
///
/// # Errors
/// The errors of [`open_regular`]; also if the file has more bytes.
pub(crate) fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit { Err(too_long(limit)) } else { Ok(bytes) }
}

/// Returns the contents, of at most `limit` bytes, of a regular file or of a pipe such as `/dev/stdin`.
///
/// # Errors
/// The errors of `read_regular`; also if a pipe sends no data for `MAX_READ_WAIT`.
pub fn read_stream(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut file = open_without_waiting(path)?;
    refuse_special(file.metadata()?.file_type())?;
    let (mut bytes, mut part) = (Vec::new(), [0; 1 << 12]);
    loop {
        if !wait_for(&file, PollFlags::IN, MAX_READ_WAIT)? {
            return Err(Error::other(format!(
                "nothing was written to this pipe within {} s; start its writer first",
                MAX_READ_WAIT.as_secs()
            )));
        }
        match file.read(&mut part) {
            Ok(0) => break,
            Ok(read) => bytes.extend_from_slice(&part[..read]),
            Err(error)
                if [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted]
                    .contains(&error.kind()) => {}
            Err(error) => return Err(error),
        }
        if bytes.len() as u64 > limit {
            return Err(too_long(limit));
        }
    }
    Ok(bytes)
}

/// Rejects anything but a regular file, a pipe, or a character device.
///
/// # Errors
/// An error that names the type of the file.
pub(crate) fn refuse_special(kind: FileType) -> io::Result<()> {
    let streams = kind.is_file() || kind.is_fifo() || kind.is_char_device();
    if streams { Ok(()) } else { Err(not_regular(kind)) }
}

fn too_long(limit: u64) -> Error {
    Error::other(format!("this is longer than {limit} bytes, the most that can be read here"))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;
    use std::thread;

    use rustix::fs::{CWD, FileType as Type, Mode, mknodat};

    use super::*;

    fn pipe(path: &Path) {
        mknodat(CWD, path, Type::Fifo, Mode::RWXU, 0).unwrap();
    }

    #[test]
    fn open_regular_refuses_pipes_devices_and_folders() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        pipe(&at("pipe"));
        fs::write(at("file"), "12345").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("pipe"), at("to-pipe")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read_regular(&at(name), 5).unwrap(), b"12345");
            let error = read_regular(&at(name), 4).unwrap_err().to_string();
            assert!(error.contains("longer than 4 bytes"), "{error}");
        }
        for (path, problem) in [
            (at("pipe"), "this is a pipe"),
            (at("to-pipe"), "this is a pipe"),
            (at(""), "Is a directory"),
            ("/dev/zero".into(), "this is a device"),
            ("/dev/random".into(), "this is a device"),
        ] {
            let error = open_regular(&path).unwrap_err().to_string();
            assert!(error.contains(problem), "{path:?}: {error}");
        }
        let error = read_stream(Path::new("/dev/zero"), 1 << 20).unwrap_err().to_string();
        assert!(error.contains("longer than 1048576 bytes"), "{error}");
    }

    #[test]
    fn read_stream_reads_a_pipe_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        pipe(&path);
        let to = path.clone();
        let writer = thread::Builder::new().spawn(move || {
            let mut pipe = File::options().write(true).open(to).unwrap(); // waits for the reader
            pipe.write_all(b"seed = ").unwrap();
            pipe.write_all(b"1").unwrap();
        });
        let writer = writer.unwrap();
        assert_eq!(read_stream(&path, 100).unwrap(), b"seed = 1");
        writer.join().unwrap();
    }
}
