//! The hosts file of a pod, which its containers share.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;

use crate::config::{Settings, fqdn, hostname};

/// The hosts file of the node, and the path of the pod's file in containers.
pub const HOSTS_PATH: &str = "/etc/hosts";
/// The name of the file in the pod's directory.
pub const HOSTS_FILE: &str = "etc-hosts";

/// Writes the hosts file of a pod with these addresses.
pub fn write(pod: &Pod, settings: &Settings, ips: &[String]) -> io::Result<()> {
    let text = hosts_content(pod, settings, ips, Path::new(HOSTS_PATH))?;
    let path = settings.pod_dir(pod).join(HOSTS_FILE);
    if fs::read(&path).is_ok_and(|known| known == text) {
        return Ok(());
    }
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644))
}

/// The content of the file. With host network, it starts with the content of the node's file
/// instead of the pod's own entries. The pod's host aliases follow.
fn hosts_content(pod: &Pod, settings: &Settings, ips: &[String], node_hosts: &Path) -> io::Result<Vec<u8>> {
    let is_on_host = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
    let mut text = match is_on_host {
        true => {
            let mut text = b"# Kubernetes-managed hosts file (host network).\n".to_vec();
            text.extend(super::ignore_not_found(fs::read(node_hosts))?.unwrap_or_default());
            text
        }
        false => managed_hosts(pod, settings, ips).into_bytes(),
    };
    text.extend(aliases(pod).into_bytes());
    Ok(text)
}

fn managed_hosts(pod: &Pod, settings: &Settings, ips: &[String]) -> String {
    let mut text =
        "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
        fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n"
            .to_owned();
    let (name, full) = (hostname(pod), fqdn(pod, settings));
    for ip in ips {
        match &full {
            Some(full) => text += &format!("{ip}\t{full}\t{name}\n"),
            None => text += &format!("{ip}\t{name}\n"),
        }
    }
    text
}

fn aliases(pod: &Pod) -> String {
    let aliases = pod.spec.iter().flat_map(|spec| spec.host_aliases.iter().flatten());
    let lines = aliases.map(|alias| {
        format!("{}\t{}\n", alias.ip, alias.hostnames.as_deref().unwrap_or_default().join("\t"))
    });
    let lines: String = lines.collect();
    if lines.is_empty() { lines } else { format!("\n# Entries added by HostAliases.\n{lines}") }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn check(more: Value, expected: Expect) {
        let dir = tempfile::tempdir().expect("a directory");
        let node_hosts = dir.path().join("hosts");
        fs::write(&node_hosts, "127.0.0.1 localhost\n192.0.2.1 here\n").expect("written");
        let mut spec = json!({"containers": []});
        spec.as_object_mut().expect("a spec").extend(more.as_object().expect("fields").clone());
        let pod = json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": spec});
        let pod = serde_json::from_value(pod).expect("a pod");
        let settings = Settings { cluster_domain: "c.l".to_owned(), ..Settings::for_tests(dir.path()) };
        let ips = ["10.0.0.1", "fd00::1"].map(str::to_owned);
        let text = hosts_content(&pod, &settings, &ips, &node_hosts).expect("a text");
        expected.assert_eq(&String::from_utf8(text).expect("a text"));
    }

    #[test]
    fn writes_managed_hosts_file() {
        check(
            json!({"subdomain": "db"}),
            expect![[r#"
                # Kubernetes-managed hosts file.
                127.0.0.1	localhost
                ::1	localhost ip6-localhost ip6-loopback
                fe00::0	ip6-localnet
                fe00::0	ip6-mcastprefix
                fe00::1	ip6-allnodes
                fe00::2	ip6-allrouters
                10.0.0.1	web.db.shop.svc.c.l	web
                fd00::1	web.db.shop.svc.c.l	web
            "#]],
        );
    }

    #[test]
    fn host_network_pod_gets_the_hosts_file_of_the_node() {
        let aliases =
            json!([{"ip": "192.0.2.7", "hostnames": ["a", "b.c"]}, {"ip": "192.0.2.8", "hostnames": ["d"]}]);
        check(
            json!({"hostNetwork": true, "hostAliases": aliases}),
            expect![[r#"
                # Kubernetes-managed hosts file (host network).
                127.0.0.1 localhost
                192.0.2.1 here

                # Entries added by HostAliases.
                192.0.2.7	a	b.c
                192.0.2.8	d
            "#]],
        );
    }
}
