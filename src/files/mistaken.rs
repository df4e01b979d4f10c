//! What people have by mistake in the place of a file: a Git LFS pointer, a web page, an archive, another format.

/// The first bytes of a gzip file.
pub(crate) const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The number of bytes by which a file is recognized.
pub(crate) const RECOGNIZED_BY: usize = 512;

/// A `.safetensors` file, as messages call it.
pub(crate) const SAFETENSORS: &str = "a .safetensors file";

/// The size limit of the header of such a file, in bytes.
const MOST_OF_A_HEADER: u64 = 100_000_000;

/// The formats that no text can be.
const BINARY: [&str; 2] = [SAFETENSORS, "a .npy file"];

/// A kind of file.
struct Kind {
    /// The bytes that it has, from this offset on.
    marks: (usize, &'static [u8]),
    what: &'static str,
    /// What to do. Empty if the file can only be written in another format.
    remedy: &'static str,
}

const UNPACK: &str = "unpack it, and name the file inside";
const UTF8: &str = "save it again as UTF-8";

const KINDS: &[Kind] = &[
    of(
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer, which only names the file",
        "get the file with `git lfs pull`",
    ),
    of(
        b"version https://hawser.github.com/spec/",
        "a Git LFS pointer, which only names the file",
        "get the file with `git lfs pull`",
    ),
    of(b"PK\x05\x06", "an empty zip archive", UNPACK),
    of(b"PK\x03\x04", "a zip archive", UNPACK),
    of(&GZIP, "a gzip file", UNPACK),
    Kind { marks: (4, b"1AY&SY"), what: "a bzip2 file", remedy: UNPACK },
    of(b"\xfd7zXZ\0", "an xz file", UNPACK),
    of(b"\x28\xb5\x2f\xfd", "a zstd file", UNPACK),
    of(b"\x04\x22\x4d\x18", "an lz4 file", UNPACK),
    of(b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    of(b"Rar!\x1a\x07", "a rar archive", UNPACK),
    Kind { marks: (257, b"ustar"), what: "a tar archive", remedy: UNPACK },
    of(b"\x80\x02\x8a", TORCH, ""), // a pickle that begins with a long number
    of(b"\x80\x02", PICKLE, ""),
    of(b"\x80\x03", PICKLE, ""),
    of(b"\x80\x04\x95", PICKLE, ""),
    of(b"\x80\x05\x95", PICKLE, ""),
    of(b"\x93NUMPY", "a .npy file", ""),
    of(b"\x89HDF\r\n\x1a\n", "an HDF5 file", ""),
    of(b"GGUF\x03\0\0\0", "a GGUF file", ""),
    of(b"PAR1\x15", "a Parquet file", ""),
    of(b"ARROW1\0\0", "an Arrow file", ""),
    of(b"MATLAB 5.0", "a MATLAB file", ""),
    of(b"SQLite format 3\0", "an SQLite data base", ""),
    of(b"\x89PNG\r\n", "a PNG image", ""),
    of(b"\xff\xd8\xff", "a JPEG image", ""),
    of(b"%PDF-", "a PDF document", ""),
    of(b"\x7fELF", "a program", ""),
    of(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document, such as Excel's .xls", ""),
    of(b"\xff\xfe", "a text in UTF-16", UTF8),
    of(b"\xfe\xff", "a text in UTF-16", UTF8),
];

const TORCH: &str = "a file of torch.save";
const PICKLE: &str = "a Python pickle, as of pickle.dump or an old torch.save";

const fn of(begins: &'static [u8], what: &'static str, remedy: &'static str) -> Kind {
    Kind { marks: (0, begins), what, remedy }
}

/// What servers write into a file that they do not give away.
const REFUSALS: [&str; 9] = [
    "403 forbidden",
    "404 not found",
    "404: not found",
    "access denied",
    "access to model",
    "entry not found",
    "invalid username or password",
    "repository not found",
    "{\"error\"",
];

/// Returns what a file that begins with `bytes` is, and what to do with it (empty if its contents must be written in
/// another format). `None` if its kind is not known.
pub(crate) fn kind_of(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    let begin = &bytes[..bytes.len().min(RECOGNIZED_BY)];
    let has = |part: &[u8]| begin.windows(part.len()).any(|window| window == part);
    let known = KINDS.iter().find(|kind| {
        let (offset, mark) = kind.marks;
        begin.get(offset..).is_some_and(|rest| rest.starts_with(mark))
    });
    if let Some(Kind { what, remedy, .. }) = known {
        return Some(match *what {
            "a zip archive" if has(b"/data.pkl") => (TORCH, ""),
            "a zip archive" if has(b".npy") => {
                ("an .npz file", "save each of its arrays with numpy.save")
            }
            "a zip archive" if has(b"[Content_Types].xml") => ("an Office document", ""),
            what => (what, *remedy),
        });
    }
    // The length of a header of JSON, as 8 bytes.
    if let [length @ .., b'{'] = &begin[..begin.len().min(9)]
        && let Ok(length) = <[u8; 8]>::try_from(length)
        && u64::from_le_bytes(length) < MOST_OF_A_HEADER
    {
        return Some((SAFETENSORS, ""));
    }
    let text = String::from_utf8_lossy(begin).to_lowercase();
    let text = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    let begins = |part: &&str| text.starts_with(*part);
    if ["<!doctype html", "<html", "<head"].iter().any(begins) {
        return Some((HTML, "download the file itself, not the page that shows it"));
    }
    let is_refusal = bytes.len() < RECOGNIZED_BY && REFUSALS.iter().any(begins);
    if is_refusal || (begins(&"<?xml") && text.contains("<error>")) {
        let remedy = "download the file again, and log in first if the server asks for it";
        return Some(("the refusal of a server", remedy));
    }
    let is_index = begins(&"{") && text.contains("\"weight_map\"");
    let remedy = "put the tensors of all those files into one, with safetensors.torch.save_file";
    is_index.then_some(("the index of a model in several files", remedy))
}

/// A web page, as messages call it. One may be meant as a text.
pub(crate) const HTML: &str = "an HTML page";

/// Returns the problem with a file that begins with `bytes` if it is of a known kind other than `expected`. It can be
/// written as `instead` says.
pub(crate) fn mistaken(bytes: &[u8], expected: &str, instead: &str) -> Option<String> {
    let text = || {
        let begin = &bytes[..bytes.len().min(RECOGNIZED_BY)];
        let is_text = begin.iter().all(|byte| *byte >= b' ' || byte.is_ascii_whitespace());
        let remedy = "read its first lines, which may say why it is not the file";
        (BINARY.contains(&expected) && is_text && !begin.is_empty()).then_some(("a text", remedy))
    };
    let found = kind_of(bytes).or_else(text);
    let (what, remedy) = found.filter(|(what, _)| *what != expected)?;
    let remedy = if remedy.is_empty() { instead } else { remedy };
    Some(format!("this is {what}, not {expected}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_kinds_are_recognized() {
        let mut tar = vec![b'a'; 300];
        tar[257..262].copy_from_slice(b"ustar");
        let zip = |name: &str| [b"PK\x03\x04", &[0; 26][..], name.as_bytes()].concat();
        for (bytes, expected) in [
            (b"version https://git-lfs.github.com/spec/v1\noid".to_vec(), "a Git LFS pointer"),
            (zip("archive/data.pkl"), "a file of torch.save"),
            (zip("arr_0.npy"), "an .npz file"),
            (zip("train.csv"), "a zip archive"),
            (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02".to_vec(), "a file of torch.save"),
            (b"\x80\x04\x95\x10".to_vec(), "a Python pickle"),
            (tar, "a tar archive"),
            (b"BZh91AY&SY".to_vec(), "a bzip2 file"),
            (b"\x40\0\0\0\0\0\0\0{\"a\"".to_vec(), "a .safetensors file"),
            (b"\xef\xbb\xbf\n <!DOCTYPE HTML>".to_vec(), "an HTML page"),
            (b"<?xml version=\"1.0\"?>\n<Error><Code>".to_vec(), "the refusal of a server"),
            (b"404: Not Found".to_vec(), "the refusal of a server"),
            (br#"{"metadata": {}, "weight_map": {"#.to_vec(), "the index of a model"),
            (b"\xff\xfea\0,\0".to_vec(), "a text in UTF-16"),
        ] {
            let (what, _) = kind_of(&bytes).unwrap();
            assert!(what.starts_with(expected), "{what}, not {expected}");
        }
        for text in ["1,2\n", "404,403\n", "Access", "lr = 0.1", "", "a,b", "Lorem"] {
            assert_eq!(kind_of(text.as_bytes()), None, "{text}");
        }
        let problem = mistaken(b"\x93NUMPY\x01", "a trace", "use a trace").unwrap();
        assert_eq!(problem, "this is a .npy file, not a trace; use a trace");
        assert_eq!(mistaken(b"\x93NUMPY\x01", "a .npy file", ""), None);
        let problem = mistaken(b"Access to this resource is denied!", SAFETENSORS, "").unwrap();
        assert!(problem.starts_with("this is a text, not a .safetensors file; read"), "{problem}");
        assert_eq!(mistaken(b"1,2", "a CSV file", ""), None);
        let problem = mistaken(b"\x1f\x8b", "a trace", "use a trace").unwrap();
        assert!(problem.ends_with("not a trace; unpack it, and name the file inside"), "{problem}");
    }
}
