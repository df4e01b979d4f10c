//! A file that is written completely or not at all, and replaces nothing but an older file of its kind.
//!
//! Its last bytes are a fingerprint of all others: a file that was changed since is not overwritten.

use std::fs::File;
use std::io::{self, BufWriter, Error, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3Default;

use engine::error::Shown;
use engine::files::{WholeFile, check_file_name, open_regular};
use engine::os::limits::output_failed;

/// The marks by which files of one kind are recognized.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Marks {
    /// Their first bytes.
    pub begins: &'static str,
    /// The bytes before the fingerprint, which it covers too.
    pub before: &'static str,
    /// Their last bytes, after the fingerprint.
    pub after: &'static str,
}

/// The hexadecimal digits of a fingerprint.
const DIGITS: usize = 16;

/// Returns the fingerprint of the first `len` bytes of `file`, which is their xxh3. The next read or write of the file is
/// after them.
fn fingerprint(mut file: &File, len: u64) -> io::Result<String> {
    let mut hash = Xxh3Default::new();
    file.rewind()?;
    io::copy(&mut file.take(len), &mut hash)?;
    Ok(format!("{:0DIGITS$x}", hash.digest()))
}

/// A file to be written later.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    path: PathBuf,
    marks: Marks,
}

impl Output {
    /// Checks that a file can be written at `path`, and creates its folder if needed.
    ///
    /// # Errors
    /// When no file can be created there, or `path` is a file of another kind.
    pub(crate) fn new(path: &Path, marks: Marks) -> io::Result<Self> {
        check_file_name(path)?;
        let path = std::path::absolute(path)?;
        let output = Self { path, marks };
        output.check()?;
        WholeFile::begin(&output.path)?; // and removes it
        Ok(output)
    }

    /// Returns the file's absolute path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file, which `flag` names, with `write`.
    ///
    /// # Errors
    /// [`Error::Write`](engine::Error::Write); an older file then stays unchanged.
    pub(crate) fn write_for(
        &self,
        flag: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> engine::error::Result<()> {
        let failed = |error| output_failed(&format!("{flag} {}", self.path.shown()), &error);
        self.write(write).map_err(failed)
    }

    /// Writes the file with `write`, then appends its fingerprint.
    ///
    /// # Errors
    /// When it cannot be written; an older file then stays unchanged.
    pub(crate) fn write(
        &self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        self.check()?;
        let whole = WholeFile::begin(&self.path)?;
        whole.take_permissions()?;
        let mut file = BufWriter::new(whole.file());
        write(&mut file)?;
        file.write_all(self.marks.before.as_bytes())?;
        let mut file = file.into_inner()?;
        let end = fingerprint(file, file.metadata()?.len())? + self.marks.after;
        file.write_all(end.as_bytes())?;
        whole.replace()
    }

    /// Checks that a file at the path is of the same kind, or empty.
    fn check(&self) -> io::Result<()> {
        let found = match open_regular(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        if found.metadata()?.len() == 0 || self.is_ours(&found)? {
            Ok(())
        } else {
            Err(Error::other(
                "this program did not write that file, or it was changed since; remove it, or use another name",
            ))
        }
    }

    /// Returns whether `file` is unchanged since this program wrote it.
    fn is_ours(&self, file: &File) -> io::Result<bool> {
        let Marks { begins, before, after } = self.marks;
        let (end, len) = (DIGITS + after.len(), file.metadata()?.len() as usize);
        if len < begins.len() + before.len() + end {
            return Ok(false);
        }
        let (mut first, mut last) = (vec![0; begins.len()], vec![0; before.len() + end]);
        file.read_exact_at(&mut first, 0)?;
        let last_begins = len - last.len();
        file.read_exact_at(&mut last, last_begins as u64)?;
        let is_marked = first == begins.as_bytes()
            && last.starts_with(before.as_bytes())
            && last.ends_with(after.as_bytes());
        if !is_marked {
            return Ok(false);
        }
        let fingerprint = fingerprint(file, (len - end) as u64)?;
        Ok(last[before.len()..].starts_with(fingerprint.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const MARKS: Marks = Marks { begins: "kind ", before: " (", after: ")\n" };

    #[test]
    fn output_replaces_only_its_own_files_and_leaves_no_parts() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let write = |name: &str, text: &str| {
            Output::new(&at(name), MARKS)?.write(|file| file.write_all(text.as_bytes()))
        };
        write("new/a", "kind one").unwrap();
        write("new/a", "kind two").unwrap();
        let text = || fs::read_to_string(at("new/a")).unwrap();
        assert_eq!(text(), "kind two (99c951493471c008)\n"); // as older versions wrote it, whose files stay ours
        std::os::unix::fs::symlink(at("new/a"), at("link")).unwrap();
        write("link", "kind three").unwrap();
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        assert!(text().starts_with("kind three ("), "{}", text());
        fs::write(at("other"), "of others").unwrap();
        fs::write(at("empty"), "").unwrap();
        write("empty", "kind").unwrap();
        for wrong in ["other", "new", "new/..", "other/a"] {
            assert!(write(wrong, "kind").is_err(), "{wrong}");
        }
        assert!(write("/dev/null", "kind").is_err());
        assert_eq!(fs::read_to_string(at("other")).unwrap(), "of others");
        let output = Output::new(&at("fails"), MARKS).unwrap();
        assert!(output.write(|_| Err(Error::other("no"))).is_err());
        let mut names: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["empty", "link", "new", "other"]);
    }

    #[test]
    fn replaced_file_keeps_its_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        for set in [0o600, 0o666, 0o444] {
            for text in [&b"kind one"[..], b"kind two"] {
                Output::new(&path, MARKS).unwrap().write(|file| file.write_all(text)).unwrap();
            }
            fs::set_permissions(&path, Permissions::from_mode(set)).unwrap();
            Output::new(&path, MARKS).unwrap().write(|file| file.write_all(b"kind three")).unwrap();
            assert_eq!(mode(), set, "{set:o}");
        }
    }

    #[test]
    fn error_does_not_show_the_temporary_path() {
        let written = Output::new(Path::new("/proc/a"), MARKS).and_then(|it| it.write(|_| Ok(())));
        let error = written.unwrap_err().to_string();
        assert!(error.ends_with(" (os error 2)") || error.ends_with(" (os error 13)"), "{error}");
    }

    #[test]
    fn changed_file_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let write = || Output::new(&path, MARKS)?.write(|file| file.write_all(b"kind of text"));
        write().unwrap();
        let whole = fs::read(&path).unwrap();
        let flipped = (0..whole.len()).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            bytes
        });
        let cut = (1..whole.len()).map(|len| whole[..len].to_vec());
        let longer = [[&whole[..], b"\n"].concat(), [&whole[..], &whole[..]].concat()];
        for changed in flipped.chain(cut).chain(longer) {
            fs::write(&path, &changed).unwrap();
            let error = write().unwrap_err().to_string();
            assert!(error.contains("did not write that file"), "{error}");
            assert_eq!(fs::read(&path).unwrap(), changed);
        }
        fs::write(&path, &whole).unwrap();
        write().unwrap();
    }
}
