//! A file that is written as a whole, or not at all, and over nothing but an older one of its kind.

use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, Error, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A file to write in the end.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    path: PathBuf,
    /// What a file of its kind begins with.
    begins: &'static str,
}

impl Output {
    /// To be written at `path`; the folder is made if need be.
    ///
    /// # Errors
    /// When it cannot be, or something else is there.
    pub(crate) fn new(path: &Path, begins: &'static str) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        if path.file_name().is_none() || path.ends_with("..") {
            return Err(Error::other("that is no name of a file"));
        }
        let output = Self { path, begins };
        output.check()?;
        output.beside().map(drop)?; // which removes it
        Ok(output)
    }

    /// Where it will be.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Has `write` write it.
    ///
    /// # Errors
    /// When it cannot be written; then what was there still is.
    pub(crate) fn write(
        &self,
        write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
    ) -> io::Result<()> {
        self.check()?;
        let beside = self.beside()?;
        let mut file = BufWriter::new(beside.as_file());
        write(&mut file)?;
        file.flush()?;
        drop(file);
        beside.persist(self.place()).map(drop).map_err(|error| error.error)
    }

    /// What is there now must be of the same kind, or empty.
    fn check(&self) -> io::Result<()> {
        let found = match fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        if found.is_dir() {
            return Err(Error::from(io::ErrorKind::IsADirectory));
        }
        if !found.is_file() {
            return Err(Error::other("that is no plain file"));
        }
        let mut begins = vec![0; self.begins.len().min(found.len() as usize)];
        File::open(&self.path)?.read_exact(&mut begins)?;
        match begins.is_empty() || begins == self.begins.as_bytes() {
            true => Ok(()),
            false => {
                Err(Error::other("something else is in that file; remove it, or use another name"))
            }
        }
    }

    /// Where it really is: through links, which stay.
    fn place(&self) -> PathBuf {
        fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone())
    }

    /// A new file in the same folder, where it can take that one's place at once.
    fn beside(&self) -> io::Result<tempfile::NamedTempFile> {
        let place = self.place();
        let folder = place.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)?;
        let everybody = Permissions::from_mode(0o666); // but for the umask
        tempfile::Builder::new().prefix(".ddp-mp-").permissions(everybody).tempfile_in(folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_else_is_written_over_and_nothing_is_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let write = |name: &str, text: &str| {
            Output::new(&at(name), "kind ")?.write(|file| file.write_all(text.as_bytes()))
        };
        write("new/a", "kind one").unwrap();
        write("new/a", "kind two").unwrap();
        assert_eq!(fs::read_to_string(at("new/a")).unwrap(), "kind two");
        std::os::unix::fs::symlink(at("new/a"), at("link")).unwrap();
        write("link", "kind three").unwrap();
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(at("new/a")).unwrap(), "kind three");
        fs::write(at("other"), "of others").unwrap();
        fs::write(at("empty"), "").unwrap();
        write("empty", "kind").unwrap();
        for wrong in ["other", "new", "new/..", "other/a"] {
            assert!(write(wrong, "kind").is_err(), "{wrong}");
        }
        assert!(write("/dev/null", "kind").is_err());
        assert_eq!(fs::read_to_string(at("other")).unwrap(), "of others");
        let output = Output::new(&at("fails"), "kind ").unwrap();
        assert!(output.write(|_| Err(Error::other("no"))).is_err());
        let mut names: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|it| it.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["empty", "link", "new", "other"]);
    }
}
