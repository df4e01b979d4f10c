//! A leading `~/` in a path: the home folder. A shell expands it only at the start of a word, so not in `--flag=~/file`.

use std::borrow::Cow;
use std::env;

/// Returns `path` with the home folder in the place of a leading `~/`, or of `~` alone.
pub fn expand_home(path: &str) -> Cow<'_, str> {
    let below = path.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/'));
    let home = below
        .and_then(|_| env::home_dir())
        .and_then(|home| home.into_os_string().into_string().ok());
    match (home, below) {
        (Some(home), Some(below)) => Cow::Owned(home.trim_end_matches('/').to_owned() + below),
        _ => Cow::Borrowed(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_leading_tilde_of_its_own_is_the_home_folder() {
        let home = env::home_dir().unwrap().into_os_string().into_string().unwrap();
        assert_eq!(expand_home("~/run"), format!("{}/run", home.trim_end_matches('/')));
        assert_eq!(expand_home("~"), home.trim_end_matches('/'));
        for path in ["~run", "run/~/a", "./~", "/~", ""] {
            assert_eq!(expand_home(path), path);
        }
    }
}
