//! Resolves the user of a container with the passwd and group files of its image.

use serde::{Deserialize, Serialize};

use crate::embedded::protocol;
use crate::embedded::spec::User;

/// The kernel's `NGROUPS_MAX`.
const MAX_GROUPS: usize = 1 << 16;
/// The limit of other runtimes. `u32::MAX` would mean "unchanged" to the kernel's setuid calls, so that
/// the process stayed root.
const MAX_ID: u32 = i32::MAX as u32;

/// Numeric user and groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: String,
}

impl Identity {
    /// The form that clients get in a status.
    pub fn user(&self) -> protocol::User {
        protocol::User { uid: self.uid, gid: self.gid, groups: self.groups.clone() }
    }
}

/// Resolves a user. The texts are the contents of `/etc/passwd` and `/etc/group`, empty for a missing
/// file.
pub fn resolve(user: &User, passwd: &str, group: &str) -> Result<Identity, String> {
    let (name, group_name) = match user.name.split_once(':') {
        Some((name, group)) => (name, Some(group).filter(|group| !group.is_empty())),
        None => (user.name.as_str(), None),
    };
    let name = if name.is_empty() { "0" } else { name };
    let number = number(name)?;
    // A number is never taken for a name: `runAsNonRoot` accepts 1000, and an entry named "1000" with
    // UID 0 must not defeat that.
    let entry = passwd.lines().map(fields).find(|entry| match number {
        Some(_) => parse_field(entry, 2) == number,
        None => entry.first() == Some(&name),
    });
    let (uid, own_group, known_name, home) = match (&entry, number) {
        (Some(entry), _) => {
            let uid = parse_field(entry, 2)
                .ok_or_else(|| format!("the entry of {name} in /etc/passwd has no valid UID"))?;
            (uid, parse_field(entry, 3).unwrap_or(0), entry.first().copied(), entry.get(5).copied())
        }
        (None, Some(uid)) => (uid, 0, None, None),
        (None, None) => {
            return Err(format!("unable to find user {name}: no matching entries in passwd file"));
        }
    };
    let gid = match (user.group, group_name) {
        (Some(gid), _) => gid,
        (None, Some(named)) => group_number(named, group)?,
        (None, None) => own_group,
    };
    let mut groups = user.more_groups.clone();
    if let (false, Some(known)) = (user.strict_groups, known_name) {
        let member =
            |entry: &Vec<&str>| entry.get(3).is_some_and(|names| names.split(',').any(|one| one == known));
        groups.extend(group.lines().map(fields).filter(member).filter_map(|entry| parse_field(&entry, 2)));
    }
    // The kernel checks the primary group separately, but programs expect it in the list, too.
    groups.push(gid);
    groups.sort_unstable();
    groups.dedup();
    if groups.len() > MAX_GROUPS {
        return Err(format!("user {name} is in {} groups; {MAX_GROUPS} is the limit", groups.len()));
    }
    let home = home.filter(|home| !home.is_empty()).unwrap_or("/").to_owned();
    Ok(Identity { uid, gid, groups, home })
}

fn group_number(name: &str, group: &str) -> Result<u32, String> {
    let named = || group.lines().map(fields).find(|entry| entry.first() == Some(&name));
    let known = number(name)?.or_else(|| parse_field(&named()?, 2));
    known.ok_or_else(|| format!("unable to find group {name}: no matching entries in group file"))
}

/// Parses a number; `None` for a name. A number out of range is an error.
fn number(text: &str) -> Result<Option<u32>, String> {
    match parse_id(text) {
        Some(number) => Ok(Some(number)),
        None if text.trim_start_matches(['+', '-']).bytes().all(|byte| byte.is_ascii_digit()) => {
            Err(format!("{text} is not a valid UID or GID: must be between 0 and {MAX_ID}"))
        }
        None => Ok(None),
    }
}

/// Parses a UID or GID.
pub fn parse_id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number| *number <= MAX_ID)
}

fn fields(line: &str) -> Vec<&str> {
    line.trim().split(':').collect()
}

fn parse_field(entry: &[&str], at: usize) -> Option<u32> {
    parse_id(entry.get(at)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001:App:/srv/app:/bin/sh\n4711:x:0:0::/:/bin/sh\n4294967296:x:0:0::/:/bin/sh\n-1:x:0:0::/:/bin/sh\nbroken\n";
    const GROUP: &str = "root:x:0:\nstaff:x:50:app,other\nwheel:x:10:root\napp:x:1001:\n12:x:0:\n";

    #[track_caller]
    fn check(name: &str, expected: &str) {
        let user = User { name: name.to_owned(), more_groups: vec![7], ..User::default() };
        let found = resolve(&user, PASSWD, GROUP);
        let formatted = found.map(|identity| {
            format!("{}:{} {:?} {}", identity.uid, identity.gid, identity.groups, identity.home)
        });
        assert_eq!(formatted.unwrap_or_else(|error| error), expected);
    }

    #[test]
    fn resolves_user_names_and_ids() {
        check("", "0:0 [0, 7, 10] /root");
        check("app", "1000:1001 [7, 50, 1001] /srv/app");
        check("1000", "1000:1001 [7, 50, 1001] /srv/app");
        check("1000:50", "1000:50 [7, 50] /srv/app");
        check("app:staff", "1000:50 [7, 50] /srv/app");
        check("4711", "4711:0 [0, 7] /");
        check("4711:12", "4711:12 [7, 12] /");
        for number in ["2147483648", "4294967295", "4294967296", "-1", "99999999999999999999"] {
            let error = format!("{number} is not a valid UID or GID: must be between 0 and 2147483647");
            check(number, &error);
            check(&format!("app:{number}"), &error);
        }
        check("missing", "unable to find user missing: no matching entries in passwd file");
        check("app:nogroup", "unable to find group nogroup: no matching entries in group file");
    }

    #[test]
    fn rejects_too_many_groups() {
        let many: String = (0..=MAX_GROUPS).map(|id| format!("g{id}:x:{id}:app\n")).collect();
        let user = User { name: "app".into(), ..User::default() };
        let error = resolve(&user, PASSWD, &many).expect_err("too many");
        assert_eq!(error, "user app is in 65537 groups; 65536 is the limit");
    }

    #[test]
    fn strict_policy_ignores_groups_of_the_image() {
        let user = User { name: "app".into(), group: Some(5), more_groups: vec![9], strict_groups: true };
        assert_eq!(resolve(&user, PASSWD, GROUP).unwrap().groups, [5, 9]);
    }
}
