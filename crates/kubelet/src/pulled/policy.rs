//! Of which images it is asked who may use them: `imagePullCredentialsVerificationPolicy` and
//! `preloadedImagesVerificationAllowlist` of a KubeletConfiguration.

use crate::reference;

/// As the administrator says; the default is upstream's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy {
    pub verify: Verify,
    /// For [`Verify::NotAllowed`]: images without a tag, or `registry/path/*`.
    pub allowed: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Verify {
    /// Of none.
    Never,
    /// Of all that were pulled by this node.
    #[default]
    NotPreloaded,
    /// Of all that are not listed.
    NotAllowed,
    Always,
}

/// As a KubeletConfiguration says it.
const NAMES: [(&str, Verify); 4] = [
    ("NeverVerify", Verify::Never),
    ("NeverVerifyPreloadedImages", Verify::NotPreloaded),
    ("NeverVerifyAllowlistedImages", Verify::NotAllowed),
    ("AlwaysVerify", Verify::Always),
];

impl Verify {
    pub fn named(name: &str) -> Result<Verify, String> {
        let found = NAMES.iter().find(|(known, _)| *known == name);
        let [a, b, c, d] = NAMES.map(|(known, _)| known);
        found.map(|(_, verify)| *verify).ok_or_else(|| {
            format!(
                "option {name:?} specified for imagePullCredentialsVerificationPolicy. Valid options are {a:?}, {b:?}, {c:?} or {d:?}"
            )
        })
    }
}

impl Policy {
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        if !self.allowed.is_empty() && self.verify != Verify::NotAllowed {
            return Err("can't set `preloadedImagesVerificationAllowlist` if `imagePullCredentialsVertificationPolicy` is not \"NeverVerifyAllowlistedImages\"".to_owned());
        }
        let wrong = |why| format!("invalid image pattern in `preloadedImagesVerificationAllowlist`: {why}");
        self.allowed.iter().try_for_each(|pattern| check(pattern).map_err(wrong))
    }

    /// Whether it is asked who may use an image, which this node has pulled or not.
    pub fn verifies(&self, image: &str, is_ours: bool) -> bool {
        match self.verify {
            Verify::Never => false,
            Verify::NotPreloaded => is_ours,
            Verify::Always => true,
            Verify::NotAllowed => {
                let name = reference::without_tag(image);
                let fits = |pattern: &String| match pattern.strip_suffix('*') {
                    Some(prefix) => name.starts_with(prefix),
                    None => name == pattern,
                };
                !self.allowed.iter().any(fits)
            }
        }
    }
}

fn check(pattern: &str) -> Result<(), String> {
    if pattern != pattern.trim() {
        return Err(format!("leading/trailing spaces are not allowed: {pattern}"));
    }
    let (name, is_prefix) = match pattern.strip_suffix("/*") {
        Some(_) => (&pattern[..pattern.len() - 1], true),
        None => (pattern, false),
    };
    if name.is_empty() {
        return Err(format!("the supplied pattern is too short: {pattern}"));
    }
    if name.contains('*') {
        return Err(format!(
            "not a valid wildcard pattern, only patterns ending with '/*' are allowed: {pattern}"
        ));
    }
    if is_prefix {
        return match name {
            "/" => Err("at least registry hostname is required".to_owned()),
            _ => Ok(()),
        };
    }
    reference::with_tag(name).map_err(|why| format!("failed to parse as an image name: {why}"))?;
    match reference::without_tag(name) == name {
        true => Ok(()),
        false => Err(format!("neither tag nor digest is accepted in an image reference: {pattern}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(allowed: &[&str]) -> Policy {
        let allowed = allowed.iter().map(ToString::to_string).collect();
        Policy { verify: Verify::NotAllowed, allowed }
    }

    #[test]
    fn who_is_asked_about() {
        let of = |name: &str| Policy { verify: Verify::named(name).unwrap(), allowed: Vec::new() };
        for (policy, ours, others) in [
            (of("NeverVerify"), false, false),
            (Policy::default(), true, false),
            (of("NeverVerifyPreloadedImages"), true, false),
            (of("AlwaysVerify"), true, true),
            (listed(&["a.example/b"]), false, false),
            (listed(&["a.example/*"]), false, false),
            (listed(&["a.example/b/*", "b"]), true, true),
        ] {
            let found = [true, false].map(|is_ours| policy.verifies("a.example/b:1", is_ours));
            assert_eq!(found, [ours, others], "{policy:?}");
        }
        assert!(Verify::named("Sometimes").unwrap_err().contains("option \"Sometimes\""));
    }

    #[test]
    fn lists_have_to_make_sense() {
        let check = |patterns: &[&str], expected: &str| {
            let found = listed(patterns).check().err().unwrap_or_default();
            assert!(found.ends_with(expected) && found.is_empty() == expected.is_empty(), "{found}");
        };
        check(&["a.example/b", "a.example/*", "busybox", "localhost:5000/x"], "");
        check(&[" a"], "leading/trailing spaces are not allowed:  a");
        check(&[""], "the supplied pattern is too short: ");
        check(&["/*"], "at least registry hostname is required");
        check(&["a/*/b"], "only patterns ending with '/*' are allowed: a/*/b");
        check(&["a*"], "only patterns ending with '/*' are allowed: a*");
        check(&["a:1"], "neither tag nor digest is accepted in an image reference: a:1");
        check(&["A b"], "failed to parse as an image name: invalid reference format");
        let unused = Policy { verify: Verify::Always, ..listed(&["a"]) };
        assert!(unused.check().unwrap_err().starts_with("can't set"));
    }
}
