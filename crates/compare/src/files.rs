//! Files that a user names. They are opened without waiting.

use std::fmt::Display;
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Error};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The errors of a path, each with the remedy. They apply only at the end of an error, which names the path before it.
const PATHS: [(&str, &str); 3] = [
    ("No such file or directory (os error 2)", "check the path"),
    ("Permission denied (os error 13)", "check who may use this path (ls -l)"),
    ("Is a directory (os error 21)", "name a file"),
];

/// Returns the remedy for an error of a path; `None` if it is of another kind, or has its remedy already.
pub fn remedy_of_path(error: &str) -> Option<&'static str> {
    let (_, remedy) = PATHS.iter().find(|(words, _)| error.ends_with(words))?;
    Some(remedy)
}

/// Returns the text of an error of a path, with the remedy.
pub fn explain_path(error: impl Display) -> String {
    let error = error.to_string();
    match remedy_of_path(&error) {
        Some(remedy) => format!("{error}; {remedy}"),
        None => error,
    }
}

/// Returns the path of the file of one of several processes: `a.0.json` and so on for `a.json`.
pub fn numbered_path(path: &Path, process: usize) -> PathBuf {
    let extension = path.extension().map(|extension| format!(".{}", extension.to_string_lossy()));
    path.with_extension(format!("{process}{}", extension.unwrap_or_default()))
}

/// Opens a regular file. The check is on the opened file, so the path cannot be replaced in between.
///
/// # Errors
/// If the file cannot be opened, or is not a regular file. Never waits for the other end of a pipe.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let file = open_without_waiting(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() { Ok(file) } else { Err(not_regular(kind)) }
}

/// Opens a file without waiting, and without making it the controlling terminal.
pub fn open_without_waiting(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

/// Returns the error of a path that is of this kind, where a regular file is needed.
pub fn not_regular(kind: FileType) -> Error {
    if kind.is_dir() {
        return Error::from_raw_os_error(libc::EISDIR);
    }
    Error::other(format!("this is {}; use a regular file", name_of_kind(kind)))
}

/// Returns what is at a path.
pub fn name_of_kind(kind: FileType) -> &'static str {
    match kind {
        _ if kind.is_file() => "a file",
        _ if kind.is_dir() => "a folder",
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    }
}
