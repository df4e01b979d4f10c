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
    let program = command.get_name().to_owned();
    let mut script = |shell: Shell| {
        let mut script = Vec::new(); // clap_complete panics where it cannot write
        generate(shell, &mut command, program.clone(), &mut script);
        String::from_utf8(script)
    };
    let script = match flags.shell {
        CompletedShell::Bash => with_values(&with_one_name(&script(Shell::Bash)?, &program)),
        CompletedShell::Zsh => script(Shell::Zsh)?,
        CompletedShell::Fish => with_own_letters(&script(Shell::Fish)?),
    };
    Ok(printer.lines(|out| out.write_all(script.as_bytes()))?)
}

/// Returns the script for bash with one name for each subcommand. If there is a `-` in the name of the program,
/// clap_complete 4.6 sets one name and looks up another (clap-rs/clap#6421).
fn with_one_name(script: &str, program: &str) -> String {
    let [found, expected] = ["__subcmd__", "__"].map(|dash| program.replace('-', dash));
    script.replace(&found, &expected)
}

/// Returns the script for bash with two additions. In `--model=m` bash takes `=` for a word of its own, so that the word
/// before the value is not the flag. And a folder gets a `/` instead of a space.
fn with_values(script: &str) -> String {
    let previous = "    prev=\"$3\"\n";
    let flag = "    [[ $prev != = ]] || prev=\"${COMP_WORDS[COMP_CWORD - 2]}\"\n";
    let files = "COMPREPLY=($(compgen -f \"${cur}\"))";
    let as_files = "compopt -o filenames 2>/dev/null || :"; // fails outside of a completion
    script
        .replace(previous, &format!("{previous}{flag}"))
        .replace(files, &format!("{files}; {as_files}"))
}

/// Returns the script for fish with a letter for each flag such as `n-layer`, which fish would read as `-n, --layer`. The
/// letters, `0` and so on, complete nothing.
fn with_own_letters(script: &str) -> String {
    let mut letters = '0'..='9';
    let mut own_letter = |flag: &str| match flag.as_bytes() {
        [_, b'-', ..] => {
            letters.next().map_or(flag.to_owned(), |letter| format!("{letter}-{flag}"))
        }
        _ => flag.to_owned(),
    };
    let mut line = |line: &str| match line.split_once("string join \\n ") {
        Some((before, flags)) => {
            let flags: Vec<String> = flags.split(' ').map(&mut own_letter).collect();
            format!("{before}string join \\n {}\n", flags.join(" "))
        }
        None => format!("{line}\n"),
    };
    script.lines().map(&mut line).collect()
}
