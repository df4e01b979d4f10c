//! Identity of paths: two paths may name one file, even one that does not exist yet.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, fstat};

/// Links that lead to links, at most: as many as the kernel follows.
const MOST_LINKS: usize = 40;

/// The place that a path leads to.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Without links and `..`; empty if only the identity is known.
    path: PathBuf,
    /// Device and inode, of what is there.
    identity: Option<(u64, u64)>,
    /// Whether the path leads through `/proc`, where each process finds what is its own.
    through_proc: bool,
}

impl Place {
    /// Follows links, also those to what is not there.
    pub(crate) fn of(path: &Path) -> Self {
        let (path, through_proc) = resolve(path);
        Self { identity: identity(&path), path, through_proc }
    }

    /// Whether another process may find something else under the same path, such as `/dev/stdin` and `/dev/fd/3`.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.through_proc
    }

    /// Returns the path without links and `..`.
    pub(crate) fn into_path(self) -> PathBuf {
        self.path
    }

    /// The regular file that `output` writes to: stdout or stderr of the process. `None` if it is not a regular file.
    pub(crate) fn of_output(output: impl AsFd) -> Option<Self> {
        let found = fstat(output).ok()?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        let identity = Some((found.st_dev, found.st_ino));
        is_file.then(|| Self { path: PathBuf::new(), identity, through_proc: true })
    }

    /// Whether both are one file or folder: by links, by `..`, or by hard links.
    pub(crate) fn is(&self, other: &Self) -> bool {
        (self.identity.is_some() && self.identity == other.identity)
            || (!self.path.as_os_str().is_empty() && self.path == other.path)
    }

    /// Whether it is a device that takes or gives bytes.
    pub(crate) fn is_device(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|it| it.file_type().is_char_device())
    }

    /// The way from `folder` down to this, if that is above it.
    pub(crate) fn within(&self, folder: &Self) -> Option<PathBuf> {
        let mut above = self.path.ancestors().skip(1);
        let found = above.find(|it| {
            *it == folder.path || (folder.identity.is_some() && identity(it) == folder.identity)
        })?;
        self.path.strip_prefix(found).ok().map(PathBuf::from)
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// An absolute path without links and `..`, as far as there is something; what is missing is taken as it is written. And
/// whether it leads through `/proc`.
fn resolve(path: &Path) -> (PathBuf, bool) {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let parts = |path: &Path| -> Vec<OsString> {
        path.components().rev().map(|it| it.as_os_str().to_owned()).collect()
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

/// Where a link leads. Those of `/proc` (`/dev/stdout`) name files in a way of their own: the file is followed then.
fn link(path: &Path) -> io::Result<PathBuf> {
    let target = fs::read_link(path)?;
    if path.starts_with("/proc") { fs::canonicalize(path).or(Ok(target)) } else { Ok(target) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn one_file_is_found_under_all_its_names() {
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
        let within =
            |path: &str, folder: &str| Place::of(&at(path)).within(&Place::of(&at(folder)));
        assert_eq!(within("sub/around/x/y", "sub"), Some("x/y".into()));
        assert_eq!(within("new/latest", "new"), Some("latest".into()));
        assert_eq!(within("sub", "sub"), None);
        assert_eq!(within("subx/a", "sub"), None);
    }
}
