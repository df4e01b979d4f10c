//! The languages, and the texts that exist in each: a file for each language.

use std::fmt::Display;

use serde::de::DeserializeOwned;
use serde_with::SerializeDisplay;
use strum::{Display, EnumIter, EnumString, VariantNames};

/// A language in which the program explains and teaches: `--language`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumIter, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum Language {
    /// English.
    En,
    /// Chinese, in simplified characters.
    Zh,
}

impl Language {
    fn file(self) -> &'static str {
        match self {
            Language::En => include_str!("en.toml"),
            Language::Zh => include_str!("zh.toml"),
        }
    }

    /// Returns the texts of one part of the program: a table of the language's file.
    pub fn texts<T: DeserializeOwned>(self, part: &str) -> T {
        let parts: toml::Table = self.file().parse().expect("a test reads every file");
        parts[part].clone().try_into().expect("a test compares the keys of every file")
    }
}

/// Returns `text` with a value in place of each placeholder, such as `{ranks}`.
pub fn filled<V: Display>(text: &str, values: &[(&str, V)]) -> String {
    let fill = |text: String, (name, value): &(&str, V)| {
        text.replace(&format!("{{{name}}}"), &value.to_string())
    };
    values.iter().fold(text.to_owned(), fill)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use strum::IntoEnumIterator;

    use super::*;

    /// Adds the texts of `table` to `texts`, each by the keys that lead to it.
    fn collect(table: &toml::Table, path: &str, texts: &mut BTreeMap<String, String>) {
        for (key, value) in table {
            let path = format!("{path}.{key}");
            match value {
                toml::Value::Table(table) => collect(table, &path, texts),
                value => {
                    let text = value.as_str().unwrap_or_else(|| panic!("{path}: not a text"));
                    texts.insert(path, text.to_owned());
                }
            }
        }
    }

    fn texts(language: Language) -> BTreeMap<String, String> {
        let mut texts = BTreeMap::new();
        collect(&language.file().parse().unwrap(), "", &mut texts);
        texts
    }

    fn placeholders(text: &str) -> BTreeSet<&str> {
        let after_braces = text.split('{').skip(1);
        after_braces.map(|rest| rest.split_once('}').expect(text).0).collect()
    }

    #[test]
    fn languages_have_the_same_keys_and_placeholders() {
        let english = texts(Language::En);
        for language in Language::iter() {
            let other = texts(language);
            let [missing, unknown] =
                [(&english, &other), (&other, &english)].map(|(all, known)| {
                    all.keys().filter(|key| !known.contains_key(*key)).collect::<Vec<_>>()
                });
            assert!(missing.is_empty(), "{language}.toml lacks {missing:?}");
            assert!(unknown.is_empty(), "{language}.toml: {unknown:?} are not in en.toml");
            for ((key, english), other) in english.iter().zip(other.values()) {
                assert_eq!(placeholders(english), placeholders(other), "{language}.toml: {key}");
                assert!(!other.contains("  "), "{language}.toml: {key}: two spaces");
            }
        }
    }

    #[test]
    fn placeholders_get_their_values() {
        let values = [("rank", 1), ("ranks", 4)];
        assert_eq!(filled("rank {rank} of {ranks}; {rank}", &values), "rank 1 of 4; 1");
    }
}
