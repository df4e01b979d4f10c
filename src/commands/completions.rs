//! `ddp-mp completions`: the script with which a shell completes commands, flags and values.

use clap::{Args, Command};
use clap_complete::{Shell, generate};
use strum::{Display, EnumString, VariantNames};

use crate::config::name;
use crate::telemetry::Printer;

/// A shell that completes command lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum CompletedShell {
    /// bash, with the package bash-completion or without.
    Bash,
    /// zsh.
    Zsh,
    /// fish.
    Fish,
}

/// The flags of `completions`.
#[derive(Debug, Clone, Args)]
pub struct CompletionsFlags {
    /// Shell
    ///
    /// bash reads completions from ~/.local/share/bash-completion/completions/ddp-mp, fish from
    /// ~/.local/share/fish/vendor_completions.d/ddp-mp.fish, zsh from a file _ddp-mp in a folder of fpath
    #[arg(value_name = "SHELL", value_parser = name::<CompletedShell>())]
    pub shell: CompletedShell,
}

/// Prints the completions of `command` for a shell.
///
/// # Errors
/// When stdout cannot be written.
pub fn completions(
    flags: &CompletionsFlags,
    mut command: Command,
    printer: &Printer,
) -> anyhow::Result<()> {
    let shell = match flags.shell {
        CompletedShell::Bash => Shell::Bash,
        CompletedShell::Zsh => Shell::Zsh,
        CompletedShell::Fish => Shell::Fish,
    };
    let program = command.get_name().to_owned();
    let [wrong, right] = ["__subcmd__", "__"].map(|dash| program.replace('-', dash));
    let mut script = Vec::new(); // clap_complete panics where it cannot write
    generate(shell, &mut command, program, &mut script);
    let mut script = String::from_utf8(script)?;
    if shell == Shell::Bash {
        // clap_complete 4.6 gives a subcommand of a program with `-` in its name two names, of which it looks up one.
        script = script.replace(&wrong, &right);
    }
    Ok(printer.lines(|out| out.write_all(script.as_bytes()))?)
}
