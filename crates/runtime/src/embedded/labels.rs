//! What the kernel's security modules call a container: the profile of AppArmor it is confined by, its label of SELinux.
//!
//! AppArmor that is asked for and not there is an error, as everywhere. A label of SELinux is what a container would have
//! if the host had it: without, it is left off, as other runtimes do, and many charts count on that.

use std::path::Path;

use crate::cri::{ProfileType, SecurityProfile, SelinuxOption};

/// Profiles that stand for the runtime's own, the first that is loaded.
const DEFAULTS: [&str; 3] = ["skiff-default", "cri-containerd.apparmor.d", "docker-default"];

/// What this host has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Modules {
    /// The profiles of AppArmor that are loaded, where it is enabled.
    pub apparmor: Option<Vec<String>>,
    pub selinux: bool,
}

impl Modules {
    pub fn of_host() -> Modules {
        let enabled = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled").unwrap_or_default();
        let is_mounted = Path::new("/sys/kernel/security/apparmor").exists();
        let apparmor = (enabled.starts_with('Y') && is_mounted).then(|| {
            let loaded =
                std::fs::read_to_string("/sys/kernel/security/apparmor/profiles").unwrap_or_default();
            // As in `docker-default (enforce)`; names may have spaces.
            loaded.lines().filter_map(|line| Some(line.rsplit_once(" (")?.0.to_owned())).collect()
        });
        Modules { apparmor, selinux: Path::new("/sys/fs/selinux/enforce").exists() }
    }

    /// The profile that a container is confined by, if any.
    pub fn apparmor(
        &self,
        wanted: Option<&SecurityProfile>,
        privileged: bool,
    ) -> Result<Option<String>, String> {
        let kind = wanted.map(SecurityProfile::profile_type);
        let Some(loaded) = &self.apparmor else {
            return match kind {
                None | Some(ProfileType::Unconfined) => Ok(None),
                Some(_) => Err("apparmor is not supported".to_owned()),
            };
        };
        let default = || DEFAULTS.iter().find(|name| loaded.iter().any(|known| known == *name));
        match (kind, wanted) {
            (Some(ProfileType::Localhost), Some(wanted)) => {
                let name = wanted.localhost_ref.trim_start_matches("localhost/");
                match loaded.iter().any(|known| known == name) {
                    true => Ok(Some(name.to_owned())),
                    false => Err(format!("apparmor profile not found {name}")),
                }
            }
            (Some(ProfileType::Unconfined), _) => Ok(None),
            (None, _) if privileged => Ok(None),
            (None, _) => Ok(default().map(|name| (*name).to_owned())),
            (Some(ProfileType::RuntimeDefault), _) if privileged => Ok(None),
            (Some(_), _) => {
                let why =
                    || format!("no default profile of AppArmor is loaded (one of {})", DEFAULTS.join(", "));
                default().map(|name| Some((*name).to_owned())).ok_or_else(why)
            }
        }
    }

    /// The label of a container's processes, if any.
    pub fn selinux(&self, wanted: Option<&SelinuxOption>) -> Option<String> {
        let wanted = wanted.filter(|wanted| self.selinux && **wanted != SelinuxOption::default())?;
        let part =
            |own: &String, default: &str| if own.is_empty() { default.to_owned() } else { own.clone() };
        Some(format!(
            "{}:{}:{}:{}",
            part(&wanted.user, "system_u"),
            part(&wanted.role, "system_r"),
            part(&wanted.type_, "container_t"),
            part(&wanted.level, "s0")
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(loaded: Option<&[&str]>, wanted: &str, expected: Result<Option<&str>, &str>) {
        let apparmor = loaded.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        let profile = |kind: ProfileType, name: &str| SecurityProfile {
            profile_type: kind.into(),
            localhost_ref: name.to_owned(),
        };
        let wanted = match wanted {
            "" => None,
            "default" => Some(profile(ProfileType::RuntimeDefault, "")),
            "unconfined" => Some(profile(ProfileType::Unconfined, "")),
            name => Some(profile(ProfileType::Localhost, name)),
        };
        let found = Modules { apparmor, selinux: false }.apparmor(wanted.as_ref(), false);
        assert_eq!(found.as_ref().map(|found| found.as_deref()).map_err(String::as_str), expected);
    }

    #[test]
    fn profiles_are_applied_or_missed() {
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
        let why = "no default profile of AppArmor is loaded (one of skiff-default, cri-containerd.apparmor.d, docker-default)";
        check(Some(&[]), "default", Err(why));
        let loaded = Modules { apparmor: Some(vec!["docker-default".to_owned()]), selinux: false };
        assert_eq!(loaded.apparmor(None, true), Ok(None));
    }

    #[test]
    fn labels_are_filled_up() {
        let level = SelinuxOption { level: "s0:c1,c2".into(), ..SelinuxOption::default() };
        let on = Modules { selinux: true, ..Modules::default() };
        assert_eq!(on.selinux(Some(&level)).unwrap(), "system_u:system_r:container_t:s0:c1,c2");
        assert_eq!(on.selinux(Some(&SelinuxOption::default())), None);
        assert_eq!(on.selinux(None), None);
        assert_eq!(Modules::default().selinux(Some(&level)), None);
    }
}
