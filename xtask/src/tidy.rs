//! Repository rules that the compiler does not check: dependencies between crates, where versions are
//! declared, and the layout of files. Parses manifests and sources as text and reports each violation
//! with its file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::vocabulary::{self, Counts, Vocabulary};

/// The layers, lowest first. A crate may depend only on crates of lower layers.
const LAYERS: &[(&str, &[&str])] = &[
    ("pure", &["api", "schema", "patch", "cel", "nft"]),
    ("outside", &["store", "sys", "pki", "client", "stream"]),
    ("engines", &["apiserver", "reconcile", "image", "runtime", "podnet"]),
    (
        "roles",
        &[
            "scheduler",
            "controllers",
            "kubelet",
            "proxy",
            "dns",
            "ingress",
            "kubectl",
            "dashboard",
            "simulate",
        ],
    ),
    ("program", &["skiff"]),
];
/// Allowed dependencies within a layer: users of the schema, and the parts of the container runtime.
const SAME_LAYER_DEPENDENCIES: &[(&str, &str)] = &[
    ("api", "schema"),
    ("api", "cel"),
    ("patch", "schema"),
    ("cel", "schema"),
    ("runtime", "image"),
    ("runtime", "podnet"),
];
/// Crates that are not part of the binary. They may depend on anything; only tests may depend on
/// `testkit`.
const TOOL_CRATES: &[&str] = &["testkit", "clienttest", "xtask", "bench"];
/// Dependencies that pure crates may not have: async runtimes, sockets, files, clocks.
const IO_DEPENDENCIES: &[&str] =
    &["tokio", "async-trait", "hyper", "hyper-util", "rustls", "tokio-rustls", "rustix", "tempfile"];
/// Words that a `plan.rs` may not contain: a plan depends only on its arguments, including the time.
const FORBIDDEN_IN_PLAN: &[&str] =
    &["async", "await", "tokio", "SystemTime", "Instant::now", "Timestamp::now", "Zoned::now"];
const MAX_FILE_LINES: usize = 800;
/// Tables may be longer: they are not read from top to bottom.
const LONG_FILES: &[&str] = &["table.rs"];

/// Runs all checks. `lower` reduces the limits of unusual names to the current counts.
pub fn run(root: &Path, lower: bool) -> Result<()> {
    let mut errors = check_workspace(&read(&root.join("Cargo.toml"))?);
    let vocabulary = Vocabulary::read(root)?;
    let mut counted: BTreeMap<String, Counts> = BTreeMap::new();
    for dir in packages(root)? {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let manifest = dir.join("Cargo.toml");
        let found = check_manifest(&name, &read(&manifest)?);
        errors.extend(found.into_iter().map(|words| format!("{}: {words}", relative_path(root, &manifest))));
        let counts = counted.entry(name).or_default();
        for path in sources(&dir)? {
            let text = read(&path)?;
            vocabulary.count(&path, &text, counts);
            let found = check_source(&path, &text);
            errors.extend(found.into_iter().map(|words| format!("{}: {words}", relative_path(root, &path))));
        }
    }
    errors.extend(vocabulary::check(root, &counted, lower)?);
    errors.extend(vocabulary::check_code_map(root)?);
    if errors.is_empty() {
        return Ok(());
    }
    for error in &errors {
        eprintln!("{error}");
    }
    bail!("tidy: {} violation(s)", errors.len())
}

/// Checks the workspace's manifest.
fn check_workspace(manifest: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if !manifest.contains("unsafe_code = \"forbid\"") {
        errors.push("Cargo.toml: [workspace.lints.rust] must forbid unsafe_code".to_owned());
    }
    for (line, section) in lines_with_section(manifest) {
        let path_only = line.contains("path =");
        if section == "workspace.dependencies" && !path_only && line.contains('{') {
            // A crate that needs its default features is declared without any `features`.
            let has_features = line.contains("features = [") && !line.contains("default-features = false");
            if has_features {
                errors.push(format!("Cargo.toml: {} must not use default features", key(line)));
            }
        }
    }
    errors
}

/// Checks the manifest of one package.
fn check_manifest(name: &str, manifest: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if !manifest.lines().any(|line| line.trim() == format!("name = \"{name}\"")) {
        errors.push(format!("the package name is not {name}, the name of its directory"));
    }
    let has_workspace_lints =
        lines_with_section(manifest).any(|(line, section)| section == "lints" && line == "workspace = true");
    if !has_workspace_lints && name != "sys" {
        errors.push("must inherit the workspace's lints, which forbid unsafe code".to_owned());
    }
    if layer(name).is_none() && !TOOL_CRATES.contains(&name) {
        errors.push("is in no layer: add it to xtask/src/tidy.rs".to_owned());
    }
    for (line, section) in lines_with_section(manifest) {
        if section == "features" && key(line) != "test-util" {
            errors.push(format!("has the feature {}; the program is configured at run time", key(line)));
        }
        if section.contains("dependencies.") {
            errors.push(format!("[{section}]: write the dependency on one line"));
        } else if section.ends_with("dependencies") {
            if !line.contains("workspace = true") {
                errors.push(format!("{}: versions are stated in the workspace's Cargo.toml", key(line)));
            }
            errors.extend(check_dependency(name, key(line), section == "dev-dependencies"));
        }
    }
    errors
}

fn check_dependency(name: &str, dependency: &str, in_tests: bool) -> Option<String> {
    let own = layer(name)?;
    if own == 0 && !in_tests && IO_DEPENDENCIES.contains(&dependency) {
        return Some(format!("a pure crate may not depend on {dependency}"));
    }
    if TOOL_CRATES.contains(&dependency) {
        let allowed = in_tests && dependency == "testkit";
        return (!allowed).then(|| format!("may not depend on {dependency}"));
    }
    let other = layer(dependency)?;
    if other < own || SAME_LAYER_DEPENDENCIES.contains(&(name, dependency)) {
        return None;
    }
    let (own, other) = (LAYERS[own].0, LAYERS[other].0);
    Some(format!("depends on {dependency}: {own} may not depend on {other}"))
}

/// Checks one source file.
fn check_source(path: &Path, text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let lines = text.lines().count();
    if lines > MAX_FILE_LINES && !LONG_FILES.contains(&name.as_ref()) {
        errors.push(format!("has {lines} lines, more than {MAX_FILE_LINES}: split it"));
    }
    if name == "mod.rs" {
        errors.push("must be named after its module, next to its directory".to_owned());
    }
    let is_root =
        path.parent().is_some_and(|dir| dir.ends_with("src")) && (name == "lib.rs" || name == "main.rs");
    if is_root && !text.starts_with("//!") {
        errors.push("must start with //! and describe what the crate owns".to_owned());
    }
    if name == "plan.rs" {
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let found = FORBIDDEN_IN_PLAN.iter().filter(|word| has_word(code, word));
            errors.extend(found.map(|word| format!("line {}: no {word} in a plan", number + 1)));
        }
    }
    errors
}

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|(_, crates)| crates.contains(&name))
}

/// The lines that are neither empty nor comments, with their section.
fn lines_with_section(manifest: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut section = "";
    manifest.lines().map(str::trim).filter_map(move |line| {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name;
            return section.contains("dependencies.").then_some((line, section));
        }
        (!line.is_empty() && !line.starts_with('#')).then_some((line, section))
    })
}

/// The key of a line: `serde` in `serde.workspace = true` and in `serde = { workspace = true }`.
fn key(line: &str) -> &str {
    line.split(['=', '.']).next().unwrap_or_default().trim().trim_matches('"')
}

fn has_word(code: &str, word: &str) -> bool {
    let part_of_name = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        !code[..at].ends_with(part_of_name) && !code[at + word.len()..].starts_with(part_of_name)
    })
}

/// The directories of all packages in the workspace, sorted.
fn packages(root: &Path) -> Result<Vec<PathBuf>> {
    let mut dirs: Vec<PathBuf> = entries(&root.join("crates"))?;
    dirs.extend([root.join("xtask"), root.join("bench")]);
    dirs.retain(|dir| dir.join("Cargo.toml").exists());
    Ok(dirs)
}

/// All Rust files below a directory.
fn sources(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in entries(dir)? {
        if path.is_dir() && !path.ends_with("target") {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(found)
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

fn relative_path(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn manifest(name: &str, rest: &str, expected: &[&str]) {
        let text = format!("[package]\nname = \"{name}\"\n\n[lints]\nworkspace = true\n\n{rest}");
        assert_eq!(check_manifest(name, &text), expected);
    }

    #[test]
    fn dependencies_point_downward() {
        manifest("api", "[dependencies]\nschema.workspace = true\njiff.workspace = true", &[]);
        manifest("apiserver", "[dependencies]\nstore.workspace = true\npki = { workspace = true }", &[]);
        manifest("store", "[dev-dependencies]\ntestkit.workspace = true", &[]);
        manifest(
            "kubelet",
            "[dependencies]\nscheduler.workspace = true",
            &["depends on scheduler: roles may not depend on roles"],
        );
        manifest(
            "schema",
            "[dependencies]\napi.workspace = true",
            &["depends on api: pure may not depend on pure"],
        );
        manifest(
            "store",
            "[dependencies]\napiserver.workspace = true",
            &["depends on apiserver: outside may not depend on engines"],
        );
        manifest("store", "[dependencies]\ntestkit.workspace = true", &["may not depend on testkit"]);
        manifest(
            "patch",
            "[dependencies]\ntokio.workspace = true",
            &["a pure crate may not depend on tokio"],
        );
        manifest("extra", "", &["is in no layer: add it to xtask/src/tidy.rs"]);
    }

    #[test]
    fn rejects_version_outside_workspace() {
        manifest(
            "store",
            "[dependencies]\n# why\nserde = \"1\"",
            &["serde: versions are stated in the workspace's Cargo.toml"],
        );
        manifest(
            "store",
            "[dependencies]\nserde = { version = \"1\", features = [\"derive\"] }",
            &["serde: versions are stated in the workspace's Cargo.toml"],
        );
        let long =
            check_manifest("xtask", "name = \"xtask\"\n[lints]\nworkspace = true\n[dependencies.serde]\n");
        assert_eq!(long, ["[dependencies.serde]: write the dependency on one line"]);
        manifest(
            "store",
            "[features]\nfast = []",
            &["has the feature fast; the program is configured at run time"],
        );
    }

    #[test]
    fn crate_name_matches_directory_and_unsafe_is_forbidden() {
        assert_eq!(
            check_manifest("store", "[package]\nname = \"shop\"\n"),
            [
                "the package name is not store, the name of its directory",
                "must inherit the workspace's lints, which forbid unsafe code",
            ]
        );
        assert_eq!(check_manifest("sys", "[package]\nname = \"sys\"\n"), Vec::<String>::new());
        assert_eq!(
            check_workspace("[workspace]"),
            ["Cargo.toml: [workspace.lints.rust] must forbid unsafe_code",]
        );
        let workspace_manifest = "[workspace.lints.rust]\nunsafe_code = \"forbid\"\n[workspace.dependencies]\n\
                     a = { version = \"1\", features = [\"x\"] }\nb = { version = \"1\", default-features = false }";
        assert_eq!(check_workspace(workspace_manifest), ["Cargo.toml: a must not use default features"]);
    }

    #[track_caller]
    fn source(path: &str, text: &str, expected: &[&str]) {
        assert_eq!(check_source(Path::new(path), text), expected);
    }

    #[test]
    fn source_files_follow_layout_rules() {
        let long = "x\n".repeat(801);
        source("crates/a/src/b.rs", &long, &["has 801 lines, more than 800: split it"]);
        source("crates/a/src/table.rs", &long, &[]);
        source("crates/a/src/b/mod.rs", "", &["must be named after its module, next to its directory"]);
        source("crates/a/src/lib.rs", "use x;", &["must start with //! and describe what the crate owns"]);
        source("crates/a/src/lib.rs", "//! Owns a.\n", &[]);
        source("crates/a/tests/main.rs", "use x;", &[]);
    }

    #[test]
    fn plan_files_have_no_io() {
        source(
            "crates/c/src/plan.rs",
            "fn plan(now: Timestamp) {} // no tokio here\nlet asynchronous = 1;",
            &[],
        );
        source(
            "crates/c/src/plan.rs",
            "\nasync fn plan() { Timestamp::now() }",
            &["line 2: no async in a plan", "line 2: no Timestamp::now in a plan"],
        );
    }
}
