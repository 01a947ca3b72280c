//! Which images require verified pull credentials: `imagePullCredentialsVerificationPolicy` and
//! `preloadedImagesVerificationAllowlist` of a KubeletConfiguration.

use crate::image_reference;

/// The configured policy; the default is upstream's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerificationPolicy {
    pub verify: CredentialVerification,
    /// For [`CredentialVerification::NotAllowed`]: images without a tag, or `registry/path/*`.
    pub allowed: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum CredentialVerification {
    /// For no image.
    Never,
    /// For images that this node has pulled.
    #[default]
    NotPreloaded,
    /// For images that are not on the allowlist.
    NotAllowed,
    Always,
}

/// The names in a KubeletConfiguration.
const POLICY_NAMES: [(&str, CredentialVerification); 4] = [
    ("NeverVerify", CredentialVerification::Never),
    ("NeverVerifyPreloadedImages", CredentialVerification::NotPreloaded),
    ("NeverVerifyAllowlistedImages", CredentialVerification::NotAllowed),
    ("AlwaysVerify", CredentialVerification::Always),
];

impl CredentialVerification {
    pub fn parse(name: &str) -> Result<CredentialVerification, String> {
        let found = POLICY_NAMES.iter().find(|(known, _)| *known == name);
        let [a, b, c, d] = POLICY_NAMES.map(|(known, _)| known);
        found.map(|(_, verify)| *verify).ok_or_else(|| {
            format!(
                "option {name:?} specified for imagePullCredentialsVerificationPolicy. Valid options are {a:?}, {b:?}, {c:?} or {d:?}"
            )
        })
    }
}

impl VerificationPolicy {
    /// Validates the configuration, with upstream's errors.
    pub fn validate(&self) -> Result<(), String> {
        if !self.allowed.is_empty() && self.verify != CredentialVerification::NotAllowed {
            return Err("can't set `preloadedImagesVerificationAllowlist` if `imagePullCredentialsVertificationPolicy` is not \"NeverVerifyAllowlistedImages\"".to_owned());
        }
        let invalid =
            |error| format!("invalid image pattern in `preloadedImagesVerificationAllowlist`: {error}");
        self.allowed.iter().try_for_each(|pattern| validate_pattern(pattern).map_err(invalid))
    }

    /// Whether a pod needs matching credentials to use a present image.
    pub fn requires_verification(&self, image: &str, pulled_by_node: bool) -> bool {
        match self.verify {
            CredentialVerification::Never => false,
            CredentialVerification::NotPreloaded => pulled_by_node,
            CredentialVerification::Always => true,
            CredentialVerification::NotAllowed => {
                let name = image_reference::without_tag(image);
                let fits = |pattern: &String| match pattern.strip_suffix('*') {
                    Some(prefix) => name.starts_with(prefix),
                    None => name == pattern,
                };
                !self.allowed.iter().any(fits)
            }
        }
    }
}

fn validate_pattern(pattern: &str) -> Result<(), String> {
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
    image_reference::with_tag(name).map_err(|error| format!("failed to parse as an image name: {error}"))?;
    match image_reference::without_tag(name) == name {
        true => Ok(()),
        false => Err(format!("neither tag nor digest is accepted in an image reference: {pattern}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowlist(allowed: &[&str]) -> VerificationPolicy {
        let allowed = allowed.iter().map(ToString::to_string).collect();
        VerificationPolicy { verify: CredentialVerification::NotAllowed, allowed }
    }

    #[test]
    fn images_are_verified_as_the_policy_requires() {
        let of = |name: &str| VerificationPolicy {
            verify: CredentialVerification::parse(name).unwrap(),
            allowed: Vec::new(),
        };
        for (policy, own_expected, others_expected) in [
            (of("NeverVerify"), false, false),
            (VerificationPolicy::default(), true, false),
            (of("NeverVerifyPreloadedImages"), true, false),
            (of("AlwaysVerify"), true, true),
            (allowlist(&["a.example/b"]), false, false),
            (allowlist(&["a.example/*"]), false, false),
            (allowlist(&["a.example/b/*", "b"]), true, true),
        ] {
            let found = [true, false]
                .map(|pulled_by_node| policy.requires_verification("a.example/b:1", pulled_by_node));
            assert_eq!(found, [own_expected, others_expected], "{policy:?}");
        }
        assert!(CredentialVerification::parse("Sometimes").unwrap_err().contains("option \"Sometimes\""));
    }

    #[test]
    fn rejects_invalid_allowlist_patterns() {
        let check = |patterns: &[&str], expected: &str| {
            let found = allowlist(patterns).validate().err().unwrap_or_default();
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
        let unused = VerificationPolicy { verify: CredentialVerification::Always, ..allowlist(&["a"]) };
        assert!(unused.validate().unwrap_err().starts_with("can't set"));
    }
}
