//! `ddp-mp man`: the manual pages of the program and of its commands.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_mangen::Man;

use crate::error::{Error, Shown};
use crate::files::{Place, WholeFile};
use crate::os::limits::unwritable;
use crate::telemetry::Printer;

/// The flags of `man`.
#[derive(Debug, Clone, Args)]
pub struct ManFlags {
    /// Write all pages to DIR; without it, print the first
    ///
    /// One page for each command. man finds pages in ~/.local/share/man/man1
    #[arg(value_name = "DIR")]
    pub folder: Option<PathBuf>,
}

/// Writes the manual page of `command` and of each of its subcommands into a folder, or prints the first one.
///
/// # Errors
/// [`Error::InvalidInput`] when the folder cannot be written, and an error when the disk or stdout can't be written.
pub fn man(flags: &ManFlags, command: Command, printer: &Printer) -> anyhow::Result<()> {
    let version = command.get_version().unwrap_or_default();
    let source = format!("{} {version}", command.get_name());
    let mut command = command.disable_help_subcommand(true);
    command.build(); // gives each subcommand its whole name
    let Some(folder) = &flags.folder else {
        let mut text = Vec::new();
        page(command, &source).render(&mut text)?;
        return Ok(printer.lines(|out| out.write_all(&text))?);
    };
    let written = Place::create_folder(folder).and_then(|()| write_pages(command, &source, folder));
    let unwritable = |error| match unwritable(format!("man {}", folder.shown()), &error) {
        Error::InvalidInput(problem) => Error::InvalidInput(problem + "; use another folder"),
        failure => failure,
    };
    Ok(written.map_err(unwritable)?)
}

fn write_pages(command: Command, source: &str, folder: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands() {
        write_pages(subcommand.clone(), source, folder)?;
    }
    let page = page(command, source);
    let whole = WholeFile::begin(&folder.join(page.get_filename()))?;
    page.render(&mut whole.file())?;
    whole.replace()
}

/// Returns the page of `command`, with all options and the usage of its help. `source` is the program and its version.
fn page(mut command: Command, source: &str) -> Man {
    let usage = command.render_usage().to_string();
    let usage = usage.strip_prefix("Usage: ").unwrap_or(&usage).to_owned();
    let command = command.override_usage(usage).mut_args(|arg| arg.hide_short_help(false));
    Man::new(command).source(source)
}
