//! The `ddp-mp` program: an [`App`] with the built-in models and the commands of the course.

use ddp_mp::{App, os};

/// Checks the working directory, holds signals until they can be handled, and sets up OpenMP. Runs before `main` and before
/// libtorch's constructors.
#[used]
#[unsafe(link_section = ".preinit_array")]
static BEFORE_MAIN: [os::BeforeMain; 3] =
    [os::check_working_directory, os::hold_user_signals, os::set_up_openmp];

/// The commit that this program was built from. In a copy without a repository it is `DDP_MP_COMMIT` of the build, or empty.
/// Only this file is compiled again after a commit.
#[cfg(in_own_repository)]
const COMMIT: &str = git_version::git_version!(
    args = ["--always", "--exclude=*", "--abbrev=12", "--dirty=-modified"],
    fallback = ""
);
#[cfg(not(in_own_repository))]
const COMMIT: &str = match option_env!("DDP_MP_COMMIT") {
    Some(commit) => commit,
    None => "",
};

fn main() -> std::process::ExitCode {
    App::new("ddp-mp", env!("CARGO_PKG_VERSION")).commit(COMMIT).course().run()
}
