//! `ddp-mp new`: a cargo project with a program of one's own and its tests, to start from.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Args;
use strum::{Display, EnumString, VariantNames};

use crate::config::name;
use crate::session::path_in_shell;
use engine::error::{Error, Result, Shown};
use engine::ffi::library_folder;
use engine::os::limits::unwritable;
use views::Printer;

/// A file of the project: its path there, and its text.
type ProjectFile = (&'static str, &'static str);

/// The files that every project has, from `assets/project`.
const SHARED_FILES: [ProjectFile; 4] = [
    ("Cargo.toml", include_str!("../../assets/project/manifest.toml")),
    (".cargo/config.toml", include_str!("../../assets/project/config.toml")),
    (".gitignore", include_str!("../../assets/project/gitignore")),
    ("build.rs", include_str!("../../assets/project/build.rs")),
];

/// What the project is at first: `--template`. The package of the lessons compiles each here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum Template {
    /// A model and a data set of one's own.
    Spirals,
    /// A convolutional network of one's own, on files of images.
    DigitsCnn,
    /// The gpt, on a text of one's own.
    Gpt,
}

impl Template {
    /// Returns the files that only this template has.
    fn files(self) -> &'static [ProjectFile] {
        match self {
            Template::Spirals => &[
                ("run.toml", include_str!("../../assets/project/spirals/run.toml")),
                ("src/data.rs", include_str!("../../assets/project/spirals/src/data.rs")),
                ("src/main.rs", include_str!("../../assets/project/spirals/src/main.rs")),
                ("src/model.rs", include_str!("../../assets/project/spirals/src/model.rs")),
            ],
            Template::DigitsCnn => &[
                ("run.toml", include_str!("../../assets/project/digits-cnn/run.toml")),
                ("src/main.rs", include_str!("../../assets/project/digits-cnn/src/main.rs")),
                ("src/model.rs", include_str!("../../assets/project/digits-cnn/src/model.rs")),
            ],
            Template::Gpt => &[
                ("run.toml", include_str!("../../assets/project/gpt/run.toml")),
                ("src/main.rs", include_str!("../../assets/project/gpt/src/main.rs")),
                ("text.txt", include_str!("../../assets/project/gpt/text.txt")),
            ],
        }
    }
}

/// Names that cargo refuses for a program, or that the project's dependencies have.
const TAKEN: &str = "anyhow build clap core ddp-mp ddp_mp deps examples incremental std tch test";

/// The folder that this program was built in.
const BUILT_IN: &str = env!("CARGO_MANIFEST_DIR");

/// The folder in which cargo keeps released crates.
const RELEASED: &str = "/registry/src/";

/// The flags of `new`.
#[derive(Debug, Clone, Args)]
pub struct NewFlags {
    /// Create this folder; its last part names the project
    #[arg(value_name = "NAME")]
    pub name: PathBuf,
    /// Choose the first content of the project
    ///
    /// spirals: its own model and data set. digits-cnn: a convolutional network for images. gpt: a text
    #[arg(long, value_name = "NAME", value_parser = name::<Template>(), default_value_t = Template::Spirals)]
    pub template: Template,
    /// Depend on the clone of ddp-mp in this folder
    ///
    /// Cargo.toml gets its absolute path. Without --path, the project depends on the clone that this program was built
    /// in. A program built from the released crate makes it depend on that crate
    #[arg(long, value_name = "DIR")]
    pub path: Option<PathBuf>,
}

/// Writes the project.
///
/// # Errors
/// [`Error::Input`] when there is something of that name, when cargo would refuse the name, or when there is no
/// clone of ddp-mp to depend on; and an error when the files can't be written.
pub fn new(flags: &NewFlags, printer: &Printer) -> anyhow::Result<()> {
    let name = project_name(&flags.name)?;
    let clone = clone_to_use(flags.path.as_deref(), BUILT_IN)?;
    let dependency = match &clone {
        None => toml_text(env!("CARGO_PKG_VERSION")),
        Some(clone) => format!("{{ path = {} }}", toml_text(text_of(clone)?)),
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
    create(&flags.name, flags.template, &values)?;
    let folder = flags.name.shown();
    if !has_libtorch {
        printer.report(&format!(
            "this libtorch has no headers; name the folder of one that has them in {folder}/.cargo/config.toml"
        ));
    }
    if let (None, Some(clone)) = (&flags.path, &clone) {
        let clone = clone.shown();
        printer.info(&format!(
            "the project depends on ddp-mp in {clone}, where this program was built; --path names another clone"
        ));
    }
    printer.line(&format!("{folder} has a program, its tests and run.toml."))?;
    printer.line("The first build takes about 5 minutes on two cores:")?;
    printer.line("")?;
    printer.line(&format!("    cd {}", path_in_shell(&flags.name)))?;
    Ok(printer.line("    cargo run --release")?)
}

/// Returns the last part of `folder`, if it can name the project.
fn project_name(folder: &Path) -> Result<&str> {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
    let problem = if name.is_empty() {
        "the path does not end with a name for the project; end it with one".to_owned()
    } else if TAKEN.split(' ').any(|taken| taken == name) {
        format!("cargo or a dependency already uses the name {name:?}; choose another")
    } else if let Some(other) = name.chars().find(|c| !is_known(*c)) {
        format!("the name {name:?} contains {other:?}; use lower-case letters, digits, - and _")
    } else if !name.starts_with(|c: char| c.is_ascii_lowercase()) {
        format!("the name {name:?} does not start with a letter; put one first")
    } else {
        return Ok(name);
    };
    let folder = folder.shown();
    Err(Error::usage(format!("{folder}: {problem}, such as my-run")))
}

/// Returns the absolute path of the clone of ddp-mp to depend on: `path`, or else the folder `built_in`. `None` if this
/// program was built from the released crate.
fn clone_to_use(path: Option<&Path>, built_in: &str) -> Result<Option<PathBuf>> {
    let found = match path {
        Some(path) => clone_folder(path).map_err(|problem| {
            format!("--path: {}: {problem}; name a clone of ddp-mp", path.shown())
        }),
        None if built_in.contains(RELEASED) => return Ok(None),
        None => clone_folder(built_in.as_ref()).map_err(|problem| {
            format!(
                "cannot use {built_in}, where this program was built: {problem}; name a clone of ddp-mp with --path"
            )
        }),
    };
    found.map(Some).map_err(Error::usage)
}

/// Returns the absolute path of `folder`, or why it is no clone of ddp-mp.
fn clone_folder(folder: &Path) -> Result<PathBuf, String> {
    let clone = folder.canonicalize().map_err(|error| error.to_string())?;
    let manifest = fs::read_to_string(clone.join("Cargo.toml"));
    let manifest = manifest.map_err(|error| format!("Cargo.toml: {error}"))?;
    let table: toml::Table = manifest.parse().map_err(|_| "Cargo.toml is not valid TOML")?;
    let name = table.get("package").and_then(|package| package.get("name")?.as_str());
    let is_ours = name == Some(env!("CARGO_PKG_NAME"));
    if is_ours { Ok(clone) } else { Err("its Cargo.toml describes another package".into()) }
}

/// Returns a path as text, as TOML needs it.
fn text_of(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| {
        Error::usage(format!(
            "{} is not UTF-8, which cargo's files need; move it to another folder",
            path.shown()
        ))
    })
}

/// Returns `text` between quotes.
fn toml_text(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// Creates `folder` with all files, with `values` in the place of their names. Removes what it has created if a file
/// cannot be written.
fn create(folder: &Path, template: Template, values: &[(&str, String)]) -> Result<()> {
    let failed = |path: &Path, error: &std::io::Error| unwritable(path.shown().into_owned(), error);
    fs::create_dir(folder).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => {
            let folder = folder.shown();
            Error::usage(format!("{folder} is there already; use another name, or remove it"))
        }
        _ => failed(folder, &error),
    })?;
    for &(name, text) in SHARED_FILES.iter().chain(template.files()) {
        let text =
            values.iter().fold(text.to_owned(), |text, (name, value)| text.replace(name, value));
        let path = folder.join(name);
        let written = match path.parent() {
            Some(folder) => fs::create_dir_all(folder),
            None => Ok(()),
        };
        if let Err(error) = written.and_then(|()| fs::write(&path, text)) {
            let _ = fs::remove_dir_all(folder); // it was created here
            return Err(failed(&path, &error));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any value of TOML can be written there, also one in quotes.
    #[test]
    fn defaults_in_templates_are_raw_texts() {
        for template in [Template::Spirals, Template::DigitsCnn, Template::Gpt] {
            let (_, main) =
                template.files().iter().find(|(name, _)| *name == "src/main.rs").unwrap();
            assert!(main.contains("const DEFAULTS: &str = r#\"\n"), "{template}");
        }
    }

    #[test]
    fn project_depends_on_a_clone_that_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["clone", "named", "else"] {
            fs::create_dir(at(name)).unwrap();
            let package = if name == "else" { "another" } else { "ddp-mp" };
            let manifest = format!("[package]\nname = \"{package}\"\n");
            fs::write(at(name).join("Cargo.toml"), manifest).unwrap();
        }
        let depends = |path: Option<&str>, built_in: &str| {
            clone_to_use(path.map(at).as_deref(), at(built_in).to_str().unwrap())
        };
        let found = |name: &str| Some(at(name).canonicalize().unwrap());
        assert_eq!(depends(None, "clone").unwrap(), found("clone"));
        assert_eq!(depends(Some("named"), "clone").unwrap(), found("named"));
        assert_eq!(depends(Some("named"), "gone").unwrap(), found("named"));
        assert_eq!(depends(None, "registry/src/index/ddp-mp-0.1.0").unwrap(), None);
        for built_in in ["gone", "else"] {
            let error = depends(None, built_in).unwrap_err().to_string();
            assert!(error.contains("where this program was built: "), "{error}");
            assert!(error.ends_with("; name a clone of ddp-mp with --path"), "{error}");
        }
    }
}
