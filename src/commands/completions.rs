//! `ddp-mp completions`: the script with which a shell completes commands, flags and values.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Arg, Args, Command, ValueHint};
use clap_complete::{Shell, generate};

use views::Printer;

/// The flags of `completions`.
#[derive(Debug, Clone, Args)]
pub struct CompletionsFlags {
    /// Choose the shell
    ///
    /// For a program NAME, bash reads completions from ~/.local/share/bash-completion/completions/NAME, fish from
    /// ~/.local/share/fish/vendor_completions.d/NAME.fish, zsh from a file _NAME in a folder of fpath
    #[arg(value_name = "SHELL", value_parser = shell())]
    pub shell: Shell,
}

/// Parses the name of a shell that has been tried.
fn shell() -> impl TypedValueParser<Value = Shell> {
    PossibleValuesParser::new(["bash", "zsh", "fish"]).try_map(|name| name.parse::<Shell>())
}

/// Prints the completions of `command` for a shell.
///
/// # Errors
/// When stdout cannot be written.
pub fn completions(
    flags: &CompletionsFlags,
    command: Command,
    printer: &Printer,
) -> anyhow::Result<()> {
    let program = command.get_name().to_owned();
    let identifier = program.replace('-', "_");
    let adapted = |script: &str| {
        script.replace("ddp_mp", &identifier).replace("ddp-mp", &program).into_bytes()
    };
    let script = match flags.shell {
        // With a `-` in the name, clap_complete 4.6 sets one name for a subcommand and looks up another
        // (clap-rs/clap#6421).
        Shell::Bash => {
            let generated = generated(Shell::Bash, with_file_hints(command), &identifier);
            [generated, adapted(include_str!("completions.bash"))].concat()
        }
        Shell::Fish => {
            let generated = generated(Shell::Fish, command, &program);
            [generated, adapted(include_str!("completions.fish"))].concat()
        }
        shell => generated(shell, command, &program),
    };
    Ok(printer.lines(|out| out.write_all(&script))?)
}

/// Returns clap_complete's script that completes `command` as `program`.
fn generated(shell: Shell, mut command: Command, program: impl Into<String>) -> Vec<u8> {
    let mut script = Vec::new(); // clap_complete panics where it cannot write
    generate(shell, &mut command, program, &mut script);
    script
}

/// Returns `command` with the hint that a free value is a file, so that bash ends a folder with `/` and not with a space.
fn with_file_hints(command: Command) -> Command {
    let with_hint = |arg: Arg| {
        let is_free = arg.get_action().takes_values() && arg.get_possible_values().is_empty();
        if is_free { arg.value_hint(ValueHint::FilePath) } else { arg }
    };
    command.mut_args(with_hint).mut_subcommands(with_file_hints)
}
