//! What a system error means for the user.

use std::io;

/// Returns the system's own words, with a remedy where the user can mend the cause.
pub(crate) fn reason(error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::StorageFull => "; free some space, or use another disk",
        io::ErrorKind::QuotaExceeded => "; free some of your quota, or use another disk",
        io::ErrorKind::FileTooLarge => "; raise the limit on file sizes (ulimit -f)",
        io::ErrorKind::ReadOnlyFilesystem => "; use a folder that can be written to",
        _ => "",
    };
    format!("{error}{remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_and_a_size_limit_have_a_remedy() {
        let text = |errno| reason(&io::Error::from_raw_os_error(errno));
        assert!(
            text(libc::ENOSPC).ends_with("(os error 28); free some space, or use another disk")
        );
        assert!(
            text(libc::EFBIG).ends_with("(os error 27); raise the limit on file sizes (ulimit -f)")
        );
        assert!(text(libc::EDQUOT).contains("quota"));
        assert!(text(libc::ENOENT).ends_with("(os error 2)"));
    }
}
