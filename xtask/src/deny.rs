//! Checks the dependencies against `deny.toml` if cargo-deny is not installed: licenses, denied crates
//! and sources. Advisories are not checked, because only cargo-deny has their database.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

/// The part of `deny.toml` that is checked here.
#[derive(Debug, Default, PartialEq)]
struct Policy {
    licenses: BTreeSet<String>,
    denied_crates: BTreeSet<String>,
}

pub fn run(root: &Path) -> Result<()> {
    let path = root.join("deny.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let policy = Policy::parse(&text);
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(root)
        .output()
        .context("cannot run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cannot parse cargo metadata")?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let violations: Vec<String> = packages.iter().flat_map(|package| policy.violations(package)).collect();
    for violation in &violations {
        eprintln!("{violation}");
    }
    if !violations.is_empty() {
        bail!("deny.toml: {} violation(s) in {} packages", violations.len(), packages.len());
    }
    Ok(())
}

impl Policy {
    /// Reads `licenses.allow` and `bans.deny`, lists with one entry per line.
    fn parse(text: &str) -> Policy {
        let mut policy = Policy::default();
        let mut list = None;
        for line in text.lines().map(str::trim) {
            match (list, line) {
                (_, "allow = [") => list = Some("allow"),
                (_, "deny = [") => list = Some("deny"),
                (_, "]") => list = None,
                (Some(name), entry) => {
                    // The first quoted string is the license or crate.
                    let Some(value) = entry.split('"').nth(1) else { continue };
                    let values =
                        if name == "allow" { &mut policy.licenses } else { &mut policy.denied_crates };
                    values.insert(value.to_owned());
                }
                _ => {}
            }
        }
        policy
    }

    fn violations(&self, package: &Value) -> Vec<String> {
        // Workspace members have no source.
        let Some(source) = package["source"].as_str() else { return Vec::new() };
        let name = package["name"].as_str().unwrap_or_default();
        let mut violations = Vec::new();
        if !source.starts_with("registry+https://github.com/rust-lang/crates.io-index") {
            violations.push(format!("{name}: comes from {source}, not from crates.io"));
        }
        if self.denied_crates.contains(name) {
            violations.push(format!("{name}: banned by deny.toml"));
        }
        match package["license"].as_str() {
            None => violations.push(format!("{name}: states no license")),
            Some(license) if !self.accepts(license) => {
                violations.push(format!("{name}: license {license} is not in licenses.allow of deny.toml"));
            }
            Some(_) => {}
        }
        violations
    }

    /// Whether the allowed licenses satisfy an SPDX expression. `/` is the deprecated form of OR.
    fn accepts(&self, expression: &str) -> bool {
        let padded = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
        let tokens: Vec<&str> = padded.split_whitespace().collect();
        let mut rest = tokens.as_slice();
        let accepted = self.any_of(&mut rest);
        accepted && rest.is_empty()
    }

    fn any_of(&self, tokens: &mut &[&str]) -> bool {
        let mut accepted = self.all_of(tokens);
        while tokens.first() == Some(&"OR") {
            *tokens = &tokens[1..];
            accepted |= self.all_of(tokens);
        }
        accepted
    }

    fn all_of(&self, tokens: &mut &[&str]) -> bool {
        let mut accepted = self.single(tokens);
        while tokens.first() == Some(&"AND") {
            *tokens = &tokens[1..];
            accepted &= self.single(tokens);
        }
        accepted
    }

    fn single(&self, tokens: &mut &[&str]) -> bool {
        let Some((first, rest)) = tokens.split_first() else { return false };
        *tokens = rest;
        if *first == "(" {
            let accepted = self.any_of(tokens);
            let closed = tokens.first() == Some(&")");
            *tokens = tokens.get(1..).unwrap_or_default();
            return accepted && closed;
        }
        if let [with @ "WITH", exception, rest @ ..] = tokens {
            let license = format!("{first} {with} {exception}");
            *tokens = rest;
            return self.licenses.contains(&license);
        }
        self.licenses.contains(*first)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DENY: &str = r#"
[licenses]
allow = [
    "MIT",
    "Apache-2.0 WITH LLVM-exception",
    "ISC",
]
[bans]
deny = [
    { crate = "openssl", reason = "TLS is rustls with ring" },
]
"#;

    #[track_caller]
    fn check(license: &str, accepted: bool) {
        assert_eq!(Policy::parse(DENY).accepts(license), accepted, "{license}");
    }

    #[test]
    fn accepts_license_expressions() {
        check("MIT", true);
        check("GPL-3.0-only", false);
        check("MIT OR GPL-3.0-only", true);
        check("GPL-2.0/MIT", true);
        check("MIT AND GPL-3.0-only", false);
        check("(GPL-2.0 OR MIT) AND ISC", true);
        check("(GPL-2.0 OR BSD-2-Clause) AND ISC", false);
        check("Apache-2.0 WITH LLVM-exception OR Zlib", true);
        check("Apache-2.0", false);
        check("(MIT", false);
        check("", false);
    }

    #[test]
    fn reports_denied_crates_licenses_and_sources() {
        let policy = Policy::parse(DENY);
        let violations = |package: Value| policy.violations(&package);
        let registry = "registry+https://github.com/rust-lang/crates.io-index";
        assert_eq!(violations(json!({"name": "kubelet", "source": null})), Vec::<String>::new());
        assert_eq!(
            violations(json!({"name": "a", "license": "MIT", "source": registry})),
            Vec::<String>::new()
        );
        assert_eq!(
            violations(json!({"name": "openssl", "license": "MIT", "source": registry})),
            ["openssl: banned by deny.toml"]
        );
        assert_eq!(
            violations(json!({"name": "b", "license": null, "source": "git+https://example.com/b"})),
            ["b: comes from git+https://example.com/b, not from crates.io", "b: states no license"]
        );
    }
}
