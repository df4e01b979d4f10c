//! Appends rows to a file. Each row is written as a whole, even if the process is killed.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Error, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::fstat;

use super::{open_regular, refuse_special, wait_for};

/// How long the reader of a pipe may read nothing before a write fails.
const MAX_LOCK_WAIT: Duration = Duration::from_secs(60);

/// Buffers what is written, and writes it to the file in one piece at each flush.
#[derive(Debug)]
pub struct Appender {
    file: File,
    kind: FileType,
    /// Whether the file is the process's stdout or stderr.
    is_own_output: bool,
    /// Whether the last line of the file has no line break.
    is_cut: bool,
    /// The bytes that are written but not flushed.
    row: Vec<u8>,
}

/// Lines of an existing file, without their line breaks.
#[derive(Debug)]
pub struct LinesBefore {
    /// The first line.
    pub first: Vec<u8>,
    /// The last line that has a line break. If none has, the only line.
    pub last: Vec<u8>,
    /// The text after the last line break.
    pub cut: Vec<u8>,
    /// Whether the last line has no line break.
    is_cut: bool,
}

/// The number of bytes of a line that are read.
const MAX_LINE_BYTES: u64 = 1 << 16;

impl Appender {
    /// Opens the file at `path` for appending, and creates it if necessary. It may be a pipe with a reader, or a device
    /// such as `/dev/null`. `/dev/stdout` and `/dev/stderr` share their position with the process's own output.
    ///
    /// # Errors
    /// If the file cannot be opened, or is a pipe without a reader. Never waits for a reader.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let opened = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
        let file = opened.map_err(|error| match error.raw_os_error() {
            Some(libc::ENXIO) => Error::other("this pipe has no reader; start its reader first"),
            _ => error,
        })?;
        refuse_special(file.metadata()?.file_type())?;
        match own_output(&file)? {
            Some(own) => Self::new(own.into(), true),
            None => Self::new(file, false),
        }
    }

    /// Creates the file at `path` for appending.
    ///
    /// # Errors
    /// If the file cannot be created, or exists.
    pub fn create_new(path: &Path) -> io::Result<Self> {
        Self::new(OpenOptions::new().append(true).create_new(true).open(path)?, false)
    }

    /// Makes the first row begin with a line break, if the last line of the file has none.
    pub fn after(self, before: Option<&LinesBefore>) -> Self {
        Self { is_cut: before.is_some_and(|lines| lines.is_cut), ..self }
    }

    fn new(file: File, is_own_output: bool) -> io::Result<Self> {
        let kind = file.metadata()?.file_type();
        Ok(Self { file, kind, is_own_output, is_cut: false, row: Vec::new() })
    }

    /// Returns the number of bytes that are written but not flushed.
    pub fn pending(&self) -> usize {
        self.row.len()
    }

    /// Returns the length of the file, if it may be truncated. `None` for anything but a regular file, and for the
    /// process's own output, whose position would then be beyond the end.
    fn len(&self) -> io::Result<Option<u64>> {
        let is_ours = self.kind.is_file() && !self.is_own_output;
        is_ours.then(|| Ok(self.file.metadata()?.len())).transpose()
    }

    /// Removes the last `written` bytes from the file, which had `before` bytes before. Does nothing if another process
    /// has written as well.
    fn take_back(&self, before: Option<u64>, written: usize) -> io::Result<()> {
        match (before, self.len()?) {
            (Some(before), Some(now)) if written > 0 && now == before + written as u64 => {
                self.file.set_len(before)
            }
            _ => Ok(()),
        }
    }

    /// Writes the row, and counts the bytes in `written`.
    fn write_row(&mut self, written: &mut usize) -> io::Result<()> {
        while *written < self.row.len() {
            match self.file.write(&self.row[*written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(now) => *written += now,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if !wait_for(&self.file, PollFlags::OUT, MAX_LOCK_WAIT)? {
                        return Err(stalled());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Write for Appender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if std::mem::take(&mut self.is_cut) {
            self.row.push(b'\n');
        }
        self.row.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let before = self.len()?;
        let mut written = 0;
        let result = self.write_row(&mut written);
        self.row.clear();
        match result {
            // As with stdout: the reader has closed the pipe.
            Err(error) if error.kind() == ErrorKind::BrokenPipe && self.kind.is_fifo() => Ok(()),
            Err(error) => {
                self.take_back(before, written)?; // leave no part of a row
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }
}

/// Returns the lines of the file at `path`, before rows are appended. `None` if the file does not exist or is empty.
/// Also `None` if it is not a regular file or is the output of this process, which may hold anything.
///
/// # Errors
/// If the file cannot be read.
pub fn lines_before(path: &Path) -> io::Result<Option<LinesBefore>> {
    let kind = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found?.file_type(),
    };
    if !kind.is_file() && !kind.is_dir() {
        return Ok(None);
    }
    let mut file = open_regular(path)?;
    let len = file.metadata()?.len();
    if len == 0 || own_output(&file)?.is_some() {
        return Ok(None);
    }
    let mut first = Vec::new();
    (&file).take(MAX_LINE_BYTES).read_to_end(&mut first)?;
    first.truncate(first.iter().position(|&byte| byte == b'\n').unwrap_or(first.len()));
    let mut end = Vec::new();
    file.seek(SeekFrom::Start(len.saturating_sub(MAX_LINE_BYTES)))?;
    file.read_to_end(&mut end)?;
    let mut parts = end.rsplitn(3, |&byte| byte == b'\n').map(<[u8]>::to_vec);
    let cut = parts.next().unwrap_or_default();
    let is_cut = !cut.is_empty();
    let (last, cut) = match parts.next() {
        Some(last) => (last, cut),
        None => (cut, Vec::new()),
    };
    Ok(Some(LinesBefore { first, last, cut, is_cut }))
}

/// Returns the process's stdout or stderr, if `file` is one of them. With separate positions in one file, the two
/// would overwrite each other's output.
fn own_output(file: &File) -> io::Result<Option<OwnedFd>> {
    let found = fstat(file)?;
    let is_same = |other: &dyn AsFd| {
        fstat(other.as_fd())
            .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (found.st_dev, found.st_ino))
    };
    match (is_same(&io::stdout()), is_same(&io::stderr())) {
        (true, _) => io::stdout().as_fd().try_clone_to_owned().map(Some),
        (_, true) => io::stderr().as_fd().try_clone_to_owned().map(Some),
        _ => Ok(None),
    }
}

fn stalled() -> Error {
    Error::other(format!(
        "the reader of this pipe has read nothing for {} s; check that program",
        MAX_LOCK_WAIT.as_secs()
    ))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType as Type, Mode, mknodat};

    use super::*;

    #[test]
    fn rows_are_appended_whole_on_flush() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows");
        fs::write(&path, "before\n").unwrap();
        let mut rows = Appender::open(&path).unwrap();
        writeln!(rows, "one {}", 1).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "before\n");
        rows.flush().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "before\none 1\n");
        let mut full = Appender::open(Path::new("/dev/full")).unwrap();
        full.write_all(b"row").unwrap();
        assert_eq!(full.flush().unwrap_err().kind(), ErrorKind::StorageFull);
        assert!(Appender::open(folder.path()).is_err());
    }

    #[test]
    fn take_back_never_removes_bytes_of_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows");
        fs::write(&path, "before\n").unwrap();
        let mut rows = Appender::open(&path).unwrap();
        let write = |rows: &mut Appender| {
            let before = rows.len().unwrap();
            rows.write_all(b"part of a row").unwrap();
            let mut written = 0;
            rows.write_row(&mut written).unwrap();
            rows.row.clear();
            (before, written)
        };
        let text = || fs::read_to_string(&path).unwrap();
        let (before, written) = write(&mut rows);
        rows.take_back(before, written).unwrap();
        assert_eq!(text(), "before\n");
        let (before, written) = write(&mut rows);
        let mut other = OpenOptions::new().append(true).open(&path).unwrap();
        other.write_all(b"of another\n").unwrap();
        rows.take_back(before, written).unwrap();
        assert_eq!(text(), "before\npart of a rowof another\n");
        // The process's own output is not truncated either.
        let mut own = Appender { is_own_output: true, ..rows };
        let (before, written) = write(&mut own);
        own.take_back(before, written).unwrap();
        assert!(text().ends_with("of another\npart of a row"), "{}", text());
    }

    #[test]
    fn pipe_accepts_rows_while_it_has_a_reader() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        mknodat(CWD, &path, Type::Fifo, Mode::RWXU, 0).unwrap();
        let error = Appender::open(&path).unwrap_err().to_string();
        assert!(error.contains("this pipe has no reader"), "{error}");
        assert!(open_regular(&path).is_err());
        let flags = libc::O_NONBLOCK;
        let mut reader = OpenOptions::new().read(true).custom_flags(flags).open(&path).unwrap();
        let mut rows = Appender::open(&path).unwrap();
        writeln!(rows, "row").unwrap();
        rows.flush().unwrap();
        let mut row = [0; 4];
        reader.read_exact(&mut row).unwrap();
        assert_eq!(&row, b"row\n");
        drop(reader);
        writeln!(rows, "more").unwrap();
        rows.flush().unwrap();
    }
}
