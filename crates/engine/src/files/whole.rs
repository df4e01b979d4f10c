//! A file that appears whole or not at all: it is written beside its place, under a name that no user knows.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

use super::Place;

/// A file that has not appeared yet. Dropping it removes it.
#[derive(Debug)]
pub struct WholeFile {
    temporary: NamedTempFile,
    place: PathBuf,
}

impl WholeFile {
    /// Begins a file that is to appear at `path`, behind symbolic links, even if their target does not exist yet. Creates its
    /// folder if needed.
    ///
    /// # Errors
    /// When no file can be created there.
    pub fn begin(path: &Path) -> io::Result<Self> {
        check_file_name(path)?;
        let place = Place::of(path).into_path();
        let folder = place.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)?;
        // Everybody may read and write it, reduced by the umask. Errors do not show this path, which the user does not know.
        let create =
            |path: &Path| File::options().read(true).write(true).create_new(true).open(path);
        let temporary = Builder::new().prefix(".ddp-mp-").make_in(folder, create)?;
        Ok(Self { temporary, place })
    }

    /// Returns the file to write to.
    pub fn file(&self) -> &File {
        self.temporary.as_file()
    }

    /// Gives the file the permissions of the one that it is to replace, if there is one. Call this before it has contents
    /// that not every user may read.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn take_permissions(&self) -> io::Result<()> {
        let Ok(replaced) = fs::metadata(&self.place) else { return Ok(()) };
        let mode = replaced.permissions().mode() & 0o777;
        self.file().set_permissions(Permissions::from_mode(mode))
    }

    /// Lets the file appear, in the place of an older one if there is one.
    ///
    /// # Errors
    /// When it cannot be renamed; the older one stays then.
    pub fn replace(self) -> io::Result<()> {
        self.temporary.persist(self.place).map(drop).map_err(|error| error.error)
    }

    /// Lets the file appear as a new one.
    ///
    /// # Errors
    /// When there is a file of that name, which stays, or the file cannot be renamed.
    pub(crate) fn appear(self) -> io::Result<()> {
        let Self { temporary, place } = self;
        match temporary.persist_noclobber(&place) {
            Ok(_) => Ok(()),
            Err(failed) if failed.error.kind() == io::ErrorKind::AlreadyExists => Err(failed.error),
            // A file system may have neither such a rename nor hard links.
            Err(failed) => {
                File::create_new(&place)?;
                failed.file.persist(&place).map(drop).map_err(|error| error.error)
            }
        }
    }
}

/// Refuses a path that names no file: that ends with `/` or `..`.
///
/// # Errors
/// If it does.
pub fn check_file_name(path: &Path) -> io::Result<()> {
    let names_folder = path.as_os_str().as_bytes().ends_with(b"/") || path.ends_with("..");
    if path.file_name().is_none() || names_folder {
        return Err(io::Error::other("that is not a file name"));
    }
    Ok(())
}
