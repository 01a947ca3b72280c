//! Checks the words in declared names. A name with a word that upstream Kubernetes, runc, etcd's client
//! and the crates this project builds on never use has to be translated by every reader, so the number
//! of such names may only decrease.
//!
//! `data/vocabulary.tsv` has the words of those sources and how often they occur in names there;
//! `data/vocabulary-extra.txt` has additional terms of the field; `data/unusual-names.tsv` has the
//! limits of each package.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// Words that occur less often than this in those sources are unusual.
const MIN_USES: u32 = 12;
/// Words that are not allowed: there is always a term of the field.
const FORBIDDEN_WORDS: &[&str] =
    &["anew", "whoever", "told", "tell", "untold", "unlent", "nobody", "somebody", "begun"];
const LIMITS: &str = "xtask/data/unusual-names.tsv";
const HEADER: &str =
    "# package\tnames\ttests\tvariables\tbanned (lowered by `cargo xtask tidy --lower`, never raised)";

/// The numbers of names with an unusual word and of lines with a forbidden word in one package.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Files, modules, types, functions and constants.
    pub names: usize,
    /// Functions of tests.
    pub tests: usize,
    /// Variables and fields.
    pub variables: usize,
    /// Lines with a forbidden word in names, strings or comments.
    pub forbidden_lines: usize,
}

impl Counts {
    fn columns(self) -> [(&'static str, usize); 4] {
        [
            ("names with unusual words", self.names),
            ("tests with unusual words", self.tests),
            ("variables and fields with unusual words", self.variables),
            ("lines with banned words", self.forbidden_lines),
        ]
    }
}

/// The known words.
pub struct Vocabulary(HashSet<String>);

impl Vocabulary {
    pub fn read(root: &Path) -> Result<Vocabulary> {
        let mut words = HashSet::new();
        for line in read(&root.join("xtask/data/vocabulary.tsv"))?.lines() {
            let (word, uses) = line.split_once('\t').with_context(|| format!("vocabulary.tsv: {line}"))?;
            let uses: u32 = uses.parse().with_context(|| format!("vocabulary.tsv: {line}"))?;
            if uses >= MIN_USES {
                words.insert(word.to_owned());
            }
        }
        for line in read(&root.join("xtask/data/vocabulary-extra.txt"))?.lines() {
            let word = line.split('#').next().unwrap_or_default().trim();
            if !word.is_empty() {
                words.insert(word.to_owned());
            }
        }
        Ok(Vocabulary(words))
    }

    fn is_unknown(&self, name: &str) -> bool {
        words(name).any(|word| word.len() > 2 && !self.0.contains(&word))
    }

    /// Adds the declarations of one source file.
    pub fn count(&self, path: &Path, text: &str, counts: &mut Counts) {
        let path_text = path.to_string_lossy();
        let is_test = path_text.contains("/tests/")
            || path_text.contains("/testkit/")
            || ["/tests.rs", "/test.rs", "_test.rs"].iter().any(|end| path_text.ends_with(end));
        let mut seen = HashSet::new();
        let module_name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        counts.names += usize::from(self.is_unknown(&module_name));
        for line in text.lines() {
            counts.forbidden_lines += usize::from(has_forbidden_word(line));
            if line.trim_start().starts_with("//") {
                continue;
            }
            for (kind, name) in declarations(line) {
                let kind = if is_test && kind == NameKind::Function { NameKind::Test } else { kind };
                if !seen.insert((kind, name.to_owned())) || !self.is_unknown(name) {
                    continue;
                }
                match kind {
                    NameKind::Item | NameKind::Function => counts.names += 1,
                    NameKind::Test => counts.tests += 1,
                    NameKind::Variable => counts.variables += 1,
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum NameKind {
    /// A type, constant or module.
    Item,
    Function,
    Test,
    /// A variable or field.
    Variable,
}

/// The names that a line declares.
fn declarations(line: &str) -> Vec<(NameKind, &str)> {
    let mut found = Vec::new();
    let tokens: Vec<&str> = code_tokens(line).collect();
    for pair in tokens.windows(2) {
        match pair[0] {
            "fn" => found.push((NameKind::Function, pair[1])),
            "struct" | "enum" | "trait" | "type" | "const" | "static" | "mod" => {
                found.push((NameKind::Item, pair[1]));
            }
            "let" if pair[1] != "mut" && pair[1].starts_with(|c: char| c.is_lowercase()) => {
                found.push((NameKind::Variable, pair[1]));
            }
            _ => {}
        }
    }
    for triple in tokens.windows(3) {
        if triple[0] == "let" && triple[1] == "mut" {
            found.push((NameKind::Variable, triple[2]));
        }
    }
    // `    pub name: Type,`
    let field = line.trim_start();
    let field = field
        .split_once("pub ")
        .map_or(field, |(before, after)| if before.is_empty() { after } else { field });
    if field.len() < line.len()
        && let Some((name, _)) = field.split_once(": ")
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(|c| c.is_alphanumeric() || c == '_')
    {
        found.push((NameKind::Variable, name));
    }
    found
}

fn code_tokens(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|token| !token.is_empty())
}

/// Splits a name: `PodIPAddress` and `pod_ip_address` consist of `pod`, `ip` and `address`.
fn words(name: &str) -> impl Iterator<Item = String> {
    let chars: Vec<char> = name.chars().collect();
    let mut split = String::new();
    for (at, &c) in chars.iter().enumerate() {
        let previous = at.checked_sub(1).map(|at| chars[at]);
        let next = chars.get(at + 1);
        let is_start = c.is_uppercase()
            && (previous.is_some_and(|c| c.is_lowercase() || c.is_ascii_digit())
                || previous.is_some_and(char::is_uppercase) && next.is_some_and(|c| c.is_lowercase()));
        if is_start || !c.is_alphabetic() {
            split.push(' ');
        }
        if c.is_alphabetic() {
            split.extend(c.to_lowercase());
        }
    }
    split.split_whitespace().map(str::to_owned).collect::<Vec<_>>().into_iter()
}

/// Whether a line has a forbidden word, alone or as part of a name.
pub fn has_forbidden_word(line: &str) -> bool {
    code_tokens(line).flat_map(words).any(|word| FORBIDDEN_WORDS.contains(&word.as_str()))
}

/// Compares the counts with the limits. With `lower`, limits are reduced to the counts; they are never
/// raised.
pub fn check(root: &Path, counted: &BTreeMap<String, Counts>, lower: bool) -> Result<Vec<String>> {
    let path = root.join(LIMITS);
    let limits = parse_limits(&read(&path)?)?;
    let mut errors = Vec::new();
    let mut new_limits = format!("{HEADER}\n");
    for (package, counts) in counted {
        let limit = limits.get(package).copied().unwrap_or_default();
        let mut row = package.clone();
        for ((what, count), (_, limit)) in counts.columns().into_iter().zip(limit.columns()) {
            if count > limit {
                errors.push(format!(
                    "{package}: {count} {what}, {limit} are allowed: use the field's terms (CONTRIBUTING.md), \
                     or add a term of the field to xtask/data/vocabulary-extra.txt"
                ));
            }
            let _ = write!(row, "\t{}", count.min(limit));
        }
        new_limits.push_str(&row);
        new_limits.push('\n');
    }
    if lower {
        fs::write(&path, new_limits).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(errors)
}

fn parse_limits(text: &str) -> Result<HashMap<String, Counts>> {
    let mut limits = HashMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (package, numbers) = line.split_once('\t').with_context(|| format!("{LIMITS}: {line}"))?;
        let numbers: Vec<usize> = numbers
            .split('\t')
            .map(|number| number.parse().with_context(|| format!("{LIMITS}: {line}")))
            .collect::<Result<_>>()?;
        let &[names, tests, variables, banned] = numbers.as_slice() else {
            anyhow::bail!("{LIMITS}: {line}: four numbers are expected")
        };
        limits.insert(package.to_owned(), Counts { names, tests, variables, forbidden_lines: banned });
    }
    Ok(limits)
}

/// Checks that every file in the code map exists. The map has questions of newcomers and the files that
/// answer them.
pub fn check_code_map(root: &Path) -> Result<Vec<String>> {
    let path = "xtask/data/code-map.tsv";
    let text = read(&root.join(path))?;
    let lines = text.lines().filter(|line| !line.starts_with('#')).enumerate();
    Ok(lines
        .filter_map(|(number, line)| {
            let file = line.split_once('\t').map_or("", |(_, file)| file);
            let exists = !file.is_empty() && root.join(file).is_file();
            (!exists).then(|| format!("{path}:{}: there is no file \"{file}\"", number + 1))
        })
        .collect())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_names_into_words() {
        let split = |name: &str| words(name).collect::<Vec<_>>().join(" ");
        assert_eq!(split("PodIPAddress"), "pod ip address");
        assert_eq!(split("pod_ip_address2"), "pod ip address");
        assert_eq!(split("MAX_PODS"), "max pods");
    }

    #[test]
    fn reads_declared_names() {
        assert_eq!(
            declarations("pub(crate) async fn sync_pod(pod: &Pod) {"),
            [(NameKind::Function, "sync_pod")]
        );
        assert_eq!(declarations("    let mut queue = Vec::new();"), [(NameKind::Variable, "queue")]);
        assert_eq!(declarations("    pub replicas: usize,"), [(NameKind::Variable, "replicas")]);
        assert_eq!(declarations("pub struct WatchCache;"), [(NameKind::Item, "WatchCache")]);
        assert_eq!(declarations("    queue.push(pod);"), []);
    }

    #[test]
    fn counts_unknown_names_by_kind() {
        let vocabulary = Vocabulary(["sync", "pod", "pods", "queue"].map(str::to_owned).into());
        let mut counts = Counts::default();
        let text = "fn sync_pods() {\n    let shelf = 1;\n}\nstruct Shelf;\n// nobody calls this\n";
        vocabulary.count(Path::new("crates/a/src/queue.rs"), text, &mut counts);
        assert_eq!(counts, Counts { names: 1, tests: 0, variables: 1, forbidden_lines: 1 });
        vocabulary.count(Path::new("crates/a/tests/queue.rs"), "fn the_shelf() {}", &mut counts);
        assert_eq!(counts.tests, 1);
    }

    #[test]
    fn update_of_limits_keeps_the_minimum() {
        let root = std::env::temp_dir().join(format!("xtask-vocabulary-{}", std::process::id()));
        fs::create_dir_all(root.join("xtask/data")).unwrap();
        fs::write(root.join(LIMITS), "# header\napi\t5\t0\t2\t0\n").unwrap();
        let count = |names, variables| {
            BTreeMap::from([("api".to_owned(), Counts { names, variables, ..Counts::default() })])
        };
        assert_eq!(check(&root, &count(4, 2), true).unwrap(), Vec::<String>::new());
        let errors = check(&root, &count(5, 1), true).unwrap();
        assert_eq!(errors.len(), 1);
        assert!(errors[0].starts_with("api: 5 names with unusual words, 4 are allowed"), "{errors:?}");
        assert_eq!(fs::read_to_string(root.join(LIMITS)).unwrap(), format!("{HEADER}\napi\t4\t0\t1\t0\n"));
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn detects_forbidden_words() {
        assert!(has_forbidden_word("fn tell_of_pauses() {"));
        assert!(has_forbidden_word("// Nobody reads this."));
        assert!(!has_forbidden_word("let retelling = storyteller;"));
    }
}
