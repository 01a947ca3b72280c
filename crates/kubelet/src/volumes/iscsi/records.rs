//! Writes CHAP secrets to the records that `iscsiadm` keeps of portals and targets.
//!
//! `iscsiadm` only accepts them as arguments, which all processes of the host could read. So they
//! are written directly to its files, which only root can read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::read_dir_paths;

/// The keys of CHAP credentials, for discovery and sessions.
const CHAP_KEYS: [&str; 4] = ["username", "password", "username_in", "password_in"];
const END_MARKER: &str = "# END RECORD";

/// The discovery records of a portal.
pub fn discovery_records(roots: &[PathBuf], portal: &str) -> Vec<PathBuf> {
    let (address, port) = split_portal(portal);
    let record_path =
        |root: &PathBuf| root.join("send_targets").join(format!("{address},{port}")).join("st_config");
    roots.iter().map(record_path).filter(|path| path.is_file()).collect()
}

/// The node records of a target at a portal.
pub fn node_records(roots: &[PathBuf], iqn: &str, portal: &str, interface: &str) -> Vec<PathBuf> {
    let (address, port) = split_portal(portal);
    // Only the tool resolves the host name of a portal, so the address is not compared.
    let is_name = address.parse::<std::net::IpAddr>().is_err();
    let is_match = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let mut parts = name.split(',');
        let (of, at) = (parts.next(), parts.next());
        (is_name || of == Some(address)) && at == Some(port)
    };
    let portals =
        roots.iter().flat_map(|root| read_dir_paths(&root.join("nodes").join(iqn))).filter(is_match);
    let records = portals.map(|path| if path.is_dir() { path.join(interface) } else { path });
    records.filter(|path| path.is_file()).collect()
}

/// Writes secrets to records.
pub fn write_secrets(
    records: &[PathBuf],
    prefix: &str,
    secrets: &BTreeMap<String, String>,
) -> Result<(), String> {
    let mut settings = BTreeMap::new();
    for key in CHAP_KEYS.map(|key| format!("{prefix}{key}")) {
        let Some(value) = secrets.get(&key).filter(|value| !value.is_empty()) else { continue };
        if value.contains(char::is_control) {
            return Err(format!("key {key:?} of the secret must be one line of text"));
        }
        settings.insert(key, value.as_str());
    }
    if settings.is_empty() {
        return Ok(());
    }
    if records.is_empty() {
        return Err("no record of iscsiadm in the known directories".to_owned());
    }
    records.iter().try_for_each(|path| {
        // Written in place, because the tool takes each additional file for another record.
        let text = std::fs::read_to_string(path);
        let written = text.and_then(|text| std::fs::write(path, with_settings(&text, &settings)));
        written.map_err(|error| format!("{}: {error}", path.display()))
    })
}

fn with_settings(text: &str, settings: &BTreeMap<String, &str>) -> String {
    let is_other =
        |line: &&str| !line.split_once('=').is_some_and(|(name, _)| settings.contains_key(name.trim()));
    let mut lines: Vec<String> = text.lines().filter(is_other).map(str::to_owned).collect();
    let end = lines.iter().rposition(|line| line.trim() == END_MARKER).unwrap_or(lines.len());
    lines.splice(end..end, settings.iter().map(|(name, value)| format!("{name} = {value}")));
    lines.join("\n") + "\n"
}

/// Address and port, without brackets.
fn split_portal(portal: &str) -> (&str, &str) {
    let (address, port) = portal.rsplit_once(':').unwrap_or((portal, super::DEFAULT_PORT));
    (address.trim_matches(['[', ']']), port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_secrets_into_the_record() {
        let settings = |pairs: &[(&str, &'static str)]| {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect::<BTreeMap<_, _>>()
        };
        let before =
            "# BEGIN RECORD 2.1.8\nnode.name = iqn\nnode.session.auth.password = old\n# END RECORD\n";
        let pairs = [("node.session.auth.username", "joe"), ("node.session.auth.password", "a = b")];
        let after = "# BEGIN RECORD 2.1.8\nnode.name = iqn\nnode.session.auth.password = a = b\n\
            node.session.auth.username = joe\n# END RECORD\n";
        assert_eq!(with_settings(before, &settings(&pairs)), after);
        assert_eq!(with_settings(after, &settings(&pairs)), after);
        assert_eq!(with_settings("a = b\n", &settings(&[("c", "d")])), "a = b\nc = d\n");
    }

    #[test]
    fn rejects_secrets_with_line_breaks() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record");
        std::fs::write(&record, "# END RECORD\n").unwrap();
        let name = "node.session.auth.password".to_owned();
        let secrets = BTreeMap::from([(name, "x\nnode.startup = automatic".to_owned())]);
        let error = write_secrets(std::slice::from_ref(&record), "node.session.auth.", &secrets).unwrap_err();
        assert_eq!(error, "key \"node.session.auth.password\" of the secret must be one line of text");
        assert_eq!(std::fs::read_to_string(&record).unwrap(), "# END RECORD\n");
    }

    #[test]
    fn record_files_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let roots = [dir.path().to_owned()];
        let make = |path: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        };
        make("nodes/iqn/192.0.2.1,3260,1/default");
        make("nodes/iqn/192.0.2.1,3261,1/default");
        make("nodes/iqn/fd00::1,3260,1/default");
        make("send_targets/fd00::1,3260/st_config");
        let check = |portal: &str, expected: &[&str]| {
            let mut found: Vec<PathBuf> = node_records(&roots, "iqn", portal, "default");
            found.extend(discovery_records(&roots, portal));
            found.sort();
            let expected: Vec<PathBuf> = expected.iter().map(|path| dir.path().join(path)).collect();
            assert_eq!(found, expected, "{portal}");
        };
        check("192.0.2.1:3260", &["nodes/iqn/192.0.2.1,3260,1/default"]);
        check("[fd00::1]:3260", &["nodes/iqn/fd00::1,3260,1/default", "send_targets/fd00::1,3260/st_config"]);
        check("disks.example:3261", &["nodes/iqn/192.0.2.1,3261,1/default"]);
        check("192.0.2.9:3260", &[]);
    }
}
