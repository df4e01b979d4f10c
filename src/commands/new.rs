//! `ddp-mp new`: a cargo project with a model, a data set, a training loop and a test, to start from.

use std::borrow::Cow;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::error::{Error, Result};
use crate::ffi::library_folder;
use crate::os::limits::explain;
use crate::telemetry::Printer;

/// The project's files, from `assets/project`, and what each is there. The package of the lessons compiles them here.
const FILES: [(&str, &str); 7] = [
    ("Cargo.toml", include_str!("../../assets/project/manifest.toml")),
    (".cargo/config.toml", include_str!("../../assets/project/config.toml")),
    (".gitignore", "/target\n"),
    ("build.rs", include_str!("../../assets/project/build.rs")),
    ("src/main.rs", include_str!("../../assets/project/src/main.rs")),
    ("src/model.rs", include_str!("../../assets/project/src/model.rs")),
    ("src/data.rs", include_str!("../../assets/project/src/data.rs")),
];

/// Names that cargo refuses for a program, or that the project's dependencies have.
const TAKEN: [&str; 11] = [
    "anyhow",
    "build",
    "core",
    "ddp-mp",
    "ddp_mp",
    "deps",
    "examples",
    "incremental",
    "std",
    "tch",
    "test",
];

/// The flags of `new`.
#[derive(Debug, Clone, Args)]
pub struct NewFlags {
    /// Folder to create, whose last part names the project
    #[arg(value_name = "NAME")]
    pub name: PathBuf,
    /// Clone of ddp-mp to depend on, instead of the released crate
    ///
    /// Cargo.toml then has its absolute path
    #[arg(long, value_name = "DIR")]
    pub path: Option<PathBuf>,
}

/// Writes the project.
///
/// # Errors
/// [`Error::InvalidInput`] when there is something of that name, when cargo would refuse the name, or when `--path` is
/// no clone of ddp-mp; and an error when the files can't be written.
pub fn new(flags: &NewFlags, printer: &Printer) -> anyhow::Result<()> {
    let name = project_name(&flags.name)?;
    let dependency = match &flags.path {
        None => toml_text(env!("CARGO_PKG_VERSION")),
        Some(clone) => format!("{{ path = {} }}", toml_text(text_of(&clone_folder(clone)?)?)),
    };
    let libtorch = library_folder().and_then(|lib| lib.parent().map(Path::to_path_buf));
    let libtorch = libtorch.filter(|folder| folder.join("include").is_dir());
    let has_libtorch = libtorch.is_some();
    let libtorch = libtorch.unwrap_or_else(|| PathBuf::from("/path/to/libtorch"));
    let values = [
        ("__NAME__", name.to_owned()),
        ("__DDP_MP__", dependency),
        ("__LIBTORCH__", toml_text(text_of(&libtorch)?)),
    ];
    create(&flags.name, &values)?;
    let folder = flags.name.display();
    if !has_libtorch {
        printer.report(&format!(
            "this libtorch has no headers; name the folder of one that has them in {folder}/.cargo/config.toml"
        ));
    }
    if flags.path.is_none() {
        printer.report(&format!(
            "the project depends on ddp-mp {} from crates.io; until it is published there, use --path",
            env!("CARGO_PKG_VERSION")
        ));
    }
    printer.line(&format!("{folder} has a model, a data set, a training loop and a test."))?;
    printer.line("The first build takes about 5 minutes on two cores:")?;
    printer.line("")?;
    printer.line(&format!("    cd {}", quote_for_shell(&flags.name.to_string_lossy())))?;
    Ok(printer.line("    cargo run --release")?)
}

/// Returns `text` as one word for a shell.
fn quote_for_shell(text: &str) -> Cow<'_, str> {
    shlex::try_quote(text).unwrap_or(Cow::Borrowed(text)) // fails only for text with a NUL, which no path has
}

/// Returns the last part of `folder`, if it can name the project.
fn project_name(folder: &Path) -> Result<&str> {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
    let is_name = name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(is_known);
    if is_name && !TAKEN.contains(&name) {
        return Ok(name);
    }
    Err(Error::InvalidInput(format!(
        "{}: the last part of the path is no valid name for a project; use lower-case letters, digits, - and _, \
         beginning with a letter, such as my-run, and no name of a dependency or that cargo reserves",
        folder.display()
    )))
}

/// Returns the absolute path of the clone of ddp-mp in `folder`.
fn clone_folder(folder: &Path) -> Result<PathBuf> {
    let refuse = |problem: &str| {
        let text = format!("--path: {}: {problem}; name a clone of ddp-mp", folder.display());
        Error::InvalidInput(text)
    };
    let clone = folder.canonicalize().map_err(|error| refuse(&error.to_string()))?;
    let manifest = fs::read_to_string(clone.join("Cargo.toml"));
    let manifest = manifest.map_err(|error| refuse(&format!("Cargo.toml: {error}")))?;
    let table: toml::Table = manifest.parse().map_err(|_| refuse("Cargo.toml is no TOML"))?;
    let name = table.get("package").and_then(|package| package.get("name"));
    match name.and_then(toml::Value::as_str) {
        Some(env!("CARGO_PKG_NAME")) => Ok(clone),
        _ => Err(refuse("its Cargo.toml is that of something else")),
    }
}

/// Returns a path as text, as TOML needs it.
fn text_of(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| {
        Error::InvalidInput(format!(
            "{} is no UTF-8, which cargo's files need; move it to another folder",
            path.display()
        ))
    })
}

/// Returns `text` between quotes.
fn toml_text(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// Creates `folder` with all files, with `values` in the place of their names. Removes what it has created if a file
/// cannot be written.
fn create(folder: &Path, values: &[(&str, String)]) -> Result<()> {
    let failed = |path: &Path, error: &std::io::Error| {
        Error::InvalidInput(format!("{}: {}", path.display(), explain(error)))
    };
    match fs::create_dir(folder) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            return Err(Error::InvalidInput(format!(
                "{} is there already; use another name, or remove it",
                folder.display()
            )));
        }
        result => result.map_err(|error| failed(folder, &error))?,
    }
    for (name, text) in FILES {
        let text =
            values.iter().fold(text.to_owned(), |text, (name, value)| text.replace(name, value));
        let path = folder.join(name);
        let written = path.parent().map_or(Ok(()), fs::create_dir_all);
        if let Err(error) = written.and_then(|()| fs::write(&path, text)) {
            let _ = fs::remove_dir_all(folder); // it was created here
            return Err(failed(&path, &error));
        }
    }
    Ok(())
}
