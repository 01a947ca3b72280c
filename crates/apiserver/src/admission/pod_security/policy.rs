//! Pod Security policies: levels, versions, and the namespace labels that select them.

use std::fmt;

use api::{ErrorList, Path};

/// From least to most restrictive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    #[default]
    Privileged,
    Baseline,
    Restricted,
}

/// The minor version of Kubernetes whose checks apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    #[default]
    Latest,
    Minor(u32),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LevelVersion {
    pub level: Level,
    pub version: Version,
}

/// What is rejected, what goes to the audit log, and what the client is warned about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    pub enforce: LevelVersion,
    pub audit: LevelVersion,
    pub warn: LevelVersion,
}

/// The prefix of labels and audit annotations.
pub const PREFIX: &str = "pod-security.kubernetes.io/";
pub const MODES: [&str; 3] = ["enforce", "audit", "warn"];

impl Level {
    pub fn parse(text: &str) -> Result<Level, &'static str> {
        match text {
            "privileged" => Ok(Level::Privileged),
            "baseline" => Ok(Level::Baseline),
            "restricted" => Ok(Level::Restricted),
            _ => Err("must be one of privileged, baseline, restricted"),
        }
    }
}

impl Version {
    pub fn parse(text: &str) -> Result<Version, &'static str> {
        if text == "latest" {
            return Ok(Version::Latest);
        }
        let digits = text.strip_prefix("v1.").unwrap_or("");
        let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
        let padded = digits.len() > 1 && digits.starts_with('0');
        match digits.parse() {
            Ok(minor) if plain && !padded => Ok(Version::Minor(minor)),
            _ => Err("must be \"latest\" or \"v1.x\""),
        }
    }
}

impl Policy {
    /// In the order of `MODES`.
    pub fn modes(&self) -> [LevelVersion; 3] {
        [self.enforce, self.audit, self.warn]
    }

    pub fn is_privileged(&self) -> bool {
        self.modes().iter().all(|mode| mode.level == Level::Privileged)
    }

    /// Equal in effect: the version of the privileged level does not matter.
    pub fn same_as(&self, other: &Policy) -> bool {
        let is_privileged = |mode: &LevelVersion| mode.level == Level::Privileged;
        self.modes().iter().zip(&other.modes()).all(|(a, b)| a == b || is_privileged(a) && is_privileged(b))
    }

    /// Overrides the policy by the labels of a namespace. As upstream, an invalid level is
    /// `restricted` for enforce and `privileged` for audit and warn.
    pub fn with_namespace_labels<'a>(
        mut self,
        label: impl Fn(&str) -> Option<&'a str>,
        errors: &mut ErrorList,
    ) -> Policy {
        let mut read =
            |mode: &str, level_version: &mut LevelVersion, fallback: Level| -> (Option<bool>, bool) {
                let mut bad = |name: &str, value: &str, reason: &str| {
                    errors.invalid(&Path::new("metadata.labels").key(name), value, reason);
                };
                let name = format!("{PREFIX}{mode}");
                let level = label(&name).map(|text| {
                    let level = Level::parse(text);
                    if let Err(reason) = level {
                        bad(&name, text, reason);
                    }
                    level_version.level = level.unwrap_or(fallback);
                    level.is_ok()
                });
                let name = format!("{name}-version");
                let version = label(&name).map(|text| {
                    let version = Version::parse(text);
                    if let Err(reason) = version {
                        bad(&name, text, reason);
                    }
                    level_version.version = version.unwrap_or_default();
                });
                (level, version.is_some())
            };
        let (enforced, _) = read("enforce", &mut self.enforce, Level::Restricted);
        read("audit", &mut self.audit, Level::Privileged);
        let (warned, version) = read("warn", &mut self.warn, Level::Privileged);
        // As upstream: enforcing without an explicit warn label also warns, so that workloads get a
        // warning.
        if warned.is_none() && enforced == Some(true) && self.enforce.level > self.warn.level {
            self.warn.level = self.enforce.level;
            if !version {
                self.warn.version = self.enforce.version;
            }
        }
        self
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Privileged => "privileged",
            Level::Baseline => "baseline",
            Level::Restricted => "restricted",
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Version::Latest => f.write_str("latest"),
            Version::Minor(minor) => write!(f, "v1.{minor}"),
        }
    }
}

impl fmt::Display for LevelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.level, self.version)
    }
}
