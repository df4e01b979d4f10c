//! What people have by mistake in the place of a file: a Git LFS pointer, a web page, an archive, another format.

/// The first bytes of a gzip file.
pub const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The number of bytes by which a file is recognized.
pub const RECOGNIZED_BY: usize = 512;

/// A `.safetensors` file, as messages call it.
pub const SAFETENSORS: &str = "a .safetensors file";

/// The size limit of the header of such a file, in bytes.
const MOST_OF_A_HEADER: u64 = 100_000_000;

const UNPACK: &str = "unpack it, and name the file inside";
const UTF8: &str = "save it again as UTF-8";
const TORCH: &str = "a file of torch.save";
const PICKLE: &str = "a Python pickle, as of pickle.dump or an old torch.save";

/// Kinds of files: their first bytes, what they are, and what to do, which is empty if the file can only be written in
/// another format.
const KINDS: [(&[u8], &str, &str); 17] = [
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer, which only names the file",
        "get the file with `git lfs pull`",
    ),
    (b"PK\x03\x04", "a zip archive", UNPACK),
    (&GZIP, "a gzip file", UNPACK),
    (b"BZh91AY&SY", "a bzip2 file", UNPACK),
    (b"\xfd7zXZ\0", "an xz file", UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd file", UNPACK),
    (b"\x80\x02\x8a", TORCH, ""), // a pickle that begins with a long number
    (b"\x80\x02", PICKLE, ""),
    (b"\x80\x03", PICKLE, ""),
    (b"\x80\x04\x95", PICKLE, ""),
    (b"\x80\x05\x95", PICKLE, ""),
    (b"\x93NUMPY", "a .npy file", ""),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", ""),
    (b"GGUF\x03\0\0\0", "a GGUF file", ""),
    (b"PAR1\x15", "a Parquet file", ""),
    (b"\xff\xfe", "a text in UTF-16", UTF8),
    (b"\xfe\xff", "a text in UTF-16", UTF8),
];

/// Returns what a file that begins with `bytes` is, and what to do with it (empty if its contents must be written in
/// another format). `None` if its kind is not known.
pub fn kind_of(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    let begin = &bytes[..bytes.len().min(RECOGNIZED_BY)];
    let has = |part: &[u8]| begin.windows(part.len()).any(|window| window == part);
    if let Some((_, what, remedy)) = KINDS.into_iter().find(|(mark, ..)| begin.starts_with(mark)) {
        return Some(match what {
            "a zip archive" if has(b"/data.pkl") => (TORCH, ""),
            "a zip archive" if has(b".npy") => {
                ("an .npz file", "save each of its arrays with numpy.save")
            }
            "a zip archive" if has(b"[Content_Types].xml") => ("an Office document", ""),
            what => (what, remedy),
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
    let is_page = ["<!doctype html", "<html", "<head"].iter().any(|part| text.starts_with(part));
    is_page.then_some((HTML, "download the file itself, not the page that shows it"))
}

/// A web page, as messages call it. One may be meant as a text.
pub const HTML: &str = "an HTML page";

/// Returns the problem with a file that begins with `bytes` if it is of a known kind other than `expected`. It can be
/// written as `instead` says.
pub fn mistaken(bytes: &[u8], expected: &str, instead: &str) -> Option<String> {
    let (what, remedy) = kind_of(bytes).filter(|(what, _)| *what != expected)?;
    let remedy = if remedy.is_empty() { instead } else { remedy };
    Some(format!("this is {what}, not {expected}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_kinds_are_recognized() {
        let zip = |name: &str| [b"PK\x03\x04", &[0; 26][..], name.as_bytes()].concat();
        for (bytes, expected) in [
            (b"version https://git-lfs.github.com/spec/v1\noid".to_vec(), "a Git LFS pointer"),
            (zip("archive/data.pkl"), "a file of torch.save"),
            (zip("arr_0.npy"), "an .npz file"),
            (zip("train.csv"), "a zip archive"),
            (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02".to_vec(), "a file of torch.save"),
            (b"\x80\x04\x95\x10".to_vec(), "a Python pickle"),
            (b"BZh91AY&SY".to_vec(), "a bzip2 file"),
            (b"\x40\0\0\0\0\0\0\0{\"a\"".to_vec(), "a .safetensors file"),
            (b"\xef\xbb\xbf\n <!DOCTYPE HTML>".to_vec(), "an HTML page"),
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
        assert_eq!(mistaken(b"1,2", "a CSV file", ""), None);
        let problem = mistaken(b"\x1f\x8b", "a trace", "use a trace").unwrap();
        assert!(problem.ends_with("not a trace; unpack it, and name the file inside"), "{problem}");
    }
}
