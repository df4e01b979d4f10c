//! Compares paths: two paths may name the same file, even one that does not exist yet.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, fstat};

/// The number of links that are followed, at most. The kernel has the same limit.
const MOST_LINKS: usize = 40;

/// The place that a path leads to.
#[derive(Debug, Clone)]
pub struct Place {
    /// The path without links and `..`. Empty if only the identity is known.
    path: PathBuf,
    /// The device and inode. `None` if there is no such file.
    identity: Option<(u64, u64)>,
    /// Whether the path leads through `/proc`, whose contents differ between processes.
    through_proc: bool,
}

impl Place {
    /// Returns the place that `path` leads to. Follows links, even those whose target does not exist.
    pub fn of(path: &Path) -> Self {
        let (path, through_proc) = resolve(path);
        Self { identity: identity(&path), path, through_proc }
    }

    /// Returns whether the same path may name another file in another process, such as `/dev/stdin` and `/dev/fd/3`.
    pub fn is_of_this_process(&self) -> bool {
        self.through_proc
    }

    /// Creates the folder at `path`, and those above it. A link may lead to a folder that does not exist yet.
    ///
    /// # Errors
    /// When one cannot be created.
    pub fn create_folder(path: &Path) -> io::Result<()> {
        fs::create_dir_all(Self::of(path).path)
    }

    /// Creates the folder that the file at `path` is in, or the one that it leads to if it is a link.
    ///
    /// # Errors
    /// When one cannot be created.
    pub fn create_folder_of(path: &Path) -> io::Result<()> {
        match Self::of(path).path.parent() {
            Some(parent) => fs::create_dir_all(parent),
            None => Ok(()),
        }
    }

    /// Returns what does not exist of `path` and the folders above it, the lowest first.
    pub fn missing_folders(path: &Path) -> Vec<PathBuf> {
        let Self { path, .. } = Self::of(path);
        path.ancestors().take_while(|folder| !folder.exists()).map(Path::to_path_buf).collect()
    }

    /// Returns the path without links and `..`.
    pub(crate) fn into_path(self) -> PathBuf {
        self.path
    }

    /// Returns the regular file that `output`, the process's stdout or stderr, writes to. `None` if it is not a regular
    /// file.
    pub fn from_output(output: impl AsFd) -> Option<Self> {
        let found = fstat(output).ok()?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        let identity = Some((found.st_dev, found.st_ino));
        is_file.then(|| Self { path: PathBuf::new(), identity, through_proc: true })
    }

    /// Returns whether both are the same file or folder, considering links, `..`, and hard links.
    pub fn is(&self, other: &Self) -> bool {
        (self.identity.is_some() && self.identity == other.identity)
            || (!self.path.as_os_str().is_empty() && self.path == other.path)
    }

    /// Returns whether the place is a character device.
    pub fn is_device(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|metadata| metadata.file_type().is_char_device())
    }

    /// Returns the relative path from `folder` to this place. `None` if it is not inside `folder`.
    pub fn within(&self, folder: &Self) -> Option<PathBuf> {
        let mut above = self.path.ancestors().skip(1);
        let found = above.find(|path| {
            *path == folder.path || (folder.identity.is_some() && identity(path) == folder.identity)
        })?;
        self.path.strip_prefix(found).ok().map(PathBuf::from)
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Returns the absolute path without links and `..`, and whether it leads through `/proc`. Parts that do not exist are
/// kept as written.
fn resolve(path: &Path) -> (PathBuf, bool) {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let parts = |path: &Path| -> Vec<OsString> {
        path.components().rev().map(|component| component.as_os_str().to_owned()).collect()
    };
    let (mut rest, mut resolved, mut links) = (parts(&absolute), PathBuf::from("/"), 0);
    let mut through_proc = false;
    while let Some(part) = rest.pop() {
        match Path::new(&part).components().next() {
            Some(Component::ParentDir) => drop(resolved.pop()),
            Some(Component::Normal(_)) => {
                let next = resolved.join(&part);
                through_proc |= next.starts_with("/proc");
                match link(&next) {
                    Ok(target) if links < MOST_LINKS => {
                        links += 1;
                        rest.extend(parts(&target));
                    }
                    _ => resolved = next,
                }
            }
            Some(Component::RootDir) => resolved = PathBuf::from("/"),
            _ => {}
        }
    }
    (resolved, through_proc)
}

/// Returns the target of a link. The text of links in `/proc` (`/dev/stdout`) need not be a path, so these are resolved
/// by the kernel.
fn link(path: &Path) -> io::Result<PathBuf> {
    let target = fs::read_link(path)?;
    if path.starts_with("/proc") { fs::canonicalize(path).or(Ok(target)) } else { Ok(target) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn file_is_recognized_under_every_name() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        fs::write(at("file"), "").unwrap();
        fs::hard_link(at("file"), at("hard")).unwrap();
        symlink("file", at("link")).unwrap();
        symlink("../sub", at("sub/around")).unwrap();
        symlink("not-yet", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        for (one, other, same) in [
            ("file", "hard", true),
            ("file", "link", true),
            ("file", "sub/../file", true),
            ("file", "sub/around/around/../link", true),
            ("dangling", "not-yet", true),
            ("new/a", "sub/../new/./a", true),
            ("new/a", "new/b", false),
            ("file", "sub", false),
            ("loop", "file", false),
        ] {
            assert_eq!(Place::of(&at(one)).is(&Place::of(&at(other))), same, "{one} {other}");
        }
        Place::create_folder(&at("dangling/a")).unwrap();
        assert!(at("not-yet/a").is_dir());
        let within =
            |path: &str, folder: &str| Place::of(&at(path)).within(&Place::of(&at(folder)));
        assert_eq!(within("sub/around/x/y", "sub"), Some("x/y".into()));
        assert_eq!(within("new/latest", "new"), Some("latest".into()));
        assert_eq!(within("sub", "sub"), None);
        assert_eq!(within("subx/a", "sub"), None);
    }
}
