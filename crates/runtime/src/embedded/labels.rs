//! AppArmor profiles and SELinux labels of containers.
//!
//! A requested AppArmor profile that is not loaded is an error, as in other runtimes. A requested
//! SELinux label is ignored on hosts without SELinux, as in other runtimes, because many charts rely on
//! that.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use crate::cri::{ProfileType, SecurityProfile, SelinuxOption};

/// Profiles that can serve as `RuntimeDefault`; the first that is loaded is used.
const DEFAULT_PROFILES: [&str; 3] = ["skiff-default", "cri-containerd.apparmor.d", "docker-default"];
/// The source of the first one.
const DEFAULT_PROFILE_TEXT: &str = include_str!("labels/skiff-default");
/// The result of loading it into the kernel.
static PROFILE_LOAD_RESULT: OnceLock<Result<(), String>> = OnceLock::new();
const LOADED_PROFILES_PATH: &str = "/sys/kernel/security/apparmor/profiles";
/// Writing a profile's name to this file unloads the profile.
const REMOVE_PROFILE_PATH: &str = "/sys/kernel/security/apparmor/.remove";

/// The security modules of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecurityModules {
    /// The loaded AppArmor profiles, if AppArmor is enabled.
    pub apparmor: Option<Vec<String>>,
    pub selinux: bool,
}

impl SecurityModules {
    pub fn of_host() -> SecurityModules {
        let enabled = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled").unwrap_or_default();
        let is_mounted = Path::new("/sys/kernel/security/apparmor").exists();
        let apparmor = (enabled.starts_with('Y') && is_mounted).then(|| {
            // Skiff's profile is loaded once per process, since an older version may have loaded a
            // different one. Profiles of others are left alone.
            if default_profile(&loaded_profiles()).is_none_or(|name| name == DEFAULT_PROFILES[0]) {
                PROFILE_LOAD_RESULT.get_or_init(load_default);
            }
            loaded_profiles()
        });
        SecurityModules { apparmor, selinux: Path::new("/sys/fs/selinux/enforce").exists() }
    }

    /// The AppArmor profile that confines a container, if any.
    pub fn apparmor(
        &self,
        requested: Option<&SecurityProfile>,
        privileged: bool,
    ) -> Result<Option<String>, String> {
        let kind = requested.map(SecurityProfile::profile_type);
        let Some(loaded) = &self.apparmor else {
            return match kind {
                None | Some(ProfileType::Unconfined) => Ok(None),
                Some(_) => Err("apparmor is not supported".to_owned()),
            };
        };
        match (kind, requested) {
            (Some(ProfileType::Localhost), Some(requested)) => {
                let name = requested.localhost_ref.trim_start_matches("localhost/");
                match loaded.iter().any(|known| known == name) {
                    true => Ok(Some(name.to_owned())),
                    false => Err(format!("apparmor profile not found {name}")),
                }
            }
            (Some(ProfileType::Unconfined), _) => Ok(None),
            (None, _) if privileged => Ok(None),
            (None, _) => Ok(default_profile(loaded).map(str::to_owned)),
            (Some(ProfileType::RuntimeDefault), _) if privileged => Ok(None),
            (Some(_), _) => {
                let reason = || {
                    let names = DEFAULT_PROFILES.join(", ");
                    let reason = PROFILE_LOAD_RESULT
                        .get()
                        .and_then(|outcome| outcome.clone().err())
                        .unwrap_or_default();
                    format!("no default AppArmor profile is loaded (one of {names}): {reason}")
                };
                default_profile(loaded).map(|name| Some(name.to_owned())).ok_or_else(reason)
            }
        }
    }

    /// The SELinux label of a container's processes, if any.
    pub fn selinux(&self, requested: Option<&SelinuxOption>) -> Option<String> {
        let requested =
            requested.filter(|requested| self.selinux && **requested != SelinuxOption::default())?;
        let part =
            |own: &String, default: &str| if own.is_empty() { default.to_owned() } else { own.clone() };
        Some(format!(
            "{}:{}:{}:{}",
            part(&requested.user, "system_u"),
            part(&requested.role, "system_r"),
            part(&requested.type_, "container_t"),
            part(&requested.level, "s0")
        ))
    }
}

/// The profiles that the kernel has loaded.
fn loaded_profiles() -> Vec<String> {
    let text = std::fs::read_to_string(LOADED_PROFILES_PATH).unwrap_or_default();
    // A line is `docker-default (enforce)`; names may contain spaces.
    text.lines().filter_map(|line| Some(line.rsplit_once(" (")?.0.to_owned())).collect()
}

fn default_profile(loaded: &[String]) -> Option<&'static str> {
    DEFAULT_PROFILES.into_iter().find(|name| loaded.iter().any(|known| known == name))
}

/// Loads skiff's profile. Only `apparmor_parser` can compile profiles; hosts with AppArmor have it.
fn load_default() -> Result<(), String> {
    let load = || -> io::Result<Output> {
        let mut parser = Command::new("apparmor_parser")
            .args(["--replace", "--skip-cache"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        // If this fails, the parser's exit status and output below have the reason.
        let _ = parser.stdin.take().map(|mut input| input.write_all(DEFAULT_PROFILE_TEXT.as_bytes()));
        parser.wait_with_output()
    };
    match load() {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => Err(format!("apparmor_parser: {}", String::from_utf8_lossy(&done.stderr).trim())),
        Err(error) => Err(format!("cannot run apparmor_parser, install the apparmor package: {error}")),
    }
}

/// Unloads the profile that [`SecurityModules::of_host`] has loaded, if it is loaded.
pub fn remove_default_profile() -> io::Result<()> {
    if !loaded_profiles().iter().any(|name| name == DEFAULT_PROFILES[0]) {
        return Ok(());
    }
    std::fs::File::options().write(true).open(REMOVE_PROFILE_PATH)?.write_all(DEFAULT_PROFILES[0].as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(loaded: Option<&[&str]>, requested: &str, expected: Result<Option<&str>, &str>) {
        let apparmor = loaded.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        let profile = |kind: ProfileType, name: &str| SecurityProfile {
            profile_type: kind.into(),
            localhost_ref: name.to_owned(),
        };
        let requested = match requested {
            "" => None,
            "default" => Some(profile(ProfileType::RuntimeDefault, "")),
            "unconfined" => Some(profile(ProfileType::Unconfined, "")),
            name => Some(profile(ProfileType::Localhost, name)),
        };
        let found = SecurityModules { apparmor, selinux: false }.apparmor(requested.as_ref(), false);
        assert_eq!(found.as_ref().map(|found| found.as_deref()).map_err(String::as_str), expected);
    }

    #[test]
    fn select_apparmor_profiles() {
        let some: &[&str] = &["mine", "docker-default"];
        check(None, "", Ok(None));
        check(None, "unconfined", Ok(None));
        check(None, "default", Err("apparmor is not supported"));
        check(None, "mine", Err("apparmor is not supported"));
        check(Some(some), "", Ok(Some("docker-default")));
        check(Some(some), "default", Ok(Some("docker-default")));
        check(Some(some), "unconfined", Ok(None));
        check(Some(some), "localhost/mine", Ok(Some("mine")));
        check(Some(some), "yours", Err("apparmor profile not found yours"));
        check(Some(&[]), "", Ok(None));
        let reason = "no default AppArmor profile is loaded (one of skiff-default, cri-containerd.apparmor.d, docker-default): ";
        check(Some(&[]), "default", Err(reason));
        let loaded = SecurityModules { apparmor: Some(vec!["docker-default".to_owned()]), selinux: false };
        assert_eq!(loaded.apparmor(None, true), Ok(None));
    }

    #[test]
    fn completes_selinux_labels() {
        let level = SelinuxOption { level: "s0:c1,c2".into(), ..SelinuxOption::default() };
        let on = SecurityModules { selinux: true, ..SecurityModules::default() };
        assert_eq!(on.selinux(Some(&level)).unwrap(), "system_u:system_r:container_t:s0:c1,c2");
        assert_eq!(on.selinux(Some(&SelinuxOption::default())), None);
        assert_eq!(on.selinux(None), None);
        assert_eq!(SecurityModules::default().selinux(Some(&level)), None);
    }
}
