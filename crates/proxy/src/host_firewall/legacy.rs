//! Legacy iptables, whose rules are not visible in nftables. They are only inspected, with its own
//! program.

use std::path::Path;
use std::process::Command;

/// The files that list the tables in use. `iptables-legacy-save` must not be called without them,
/// because it loads the kernel modules of missing tables.
const TABLES: [(&str, &str); 2] = [
    ("/proc/net/ip_tables_names", "iptables-legacy-save"),
    ("/proc/net/ip6_tables_names", "ip6tables-legacy-save"),
];

/// The chains of legacy iptables that drop or may drop packets of pods.
pub fn blocking_chains() -> Vec<String> {
    TABLES.iter().flat_map(|(names, program)| table_blocking_chains(Path::new(names), program)).collect()
}

fn table_blocking_chains(names: &Path, program: &str) -> Vec<String> {
    let names = std::fs::read_to_string(names).unwrap_or_default();
    if !names.lines().any(|name| name == "filter") {
        return Vec::new();
    }
    match Command::new(program).args(["-t", "filter"]).output() {
        Ok(output) if output.status.success() => read(program, &String::from_utf8_lossy(&output.stdout)),
        _ => {
            vec![format!("legacy iptables, table filter: failed to list rules with {program}")]
        }
    }
}

/// The chains with policy DROP that have no rule which accepts a source network.
fn read(program: &str, saved: &str) -> Vec<String> {
    let tool = program.trim_end_matches("-save");
    let drops = |chain: &str| saved.lines().any(|line| line.starts_with(&format!(":{chain} DROP")));
    let accepts = |chain: &str| {
        saved.lines().any(|line| line.starts_with(&format!("-A {chain} -s ")) && line.ends_with("-j ACCEPT"))
    };
    let chains = ["FORWARD", "INPUT"].into_iter().filter(|chain| drops(chain) && !accepts(chain));
    chains
        .map(|chain| format!("{tool}, table filter, chain {chain}: the policy drops packets of pods"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_chains_that_drop() {
        let saved = "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\n:OUTPUT ACCEPT [0:0]\n";
        let found = read("iptables-legacy-save", saved);
        assert_eq!(found, ["iptables-legacy, table filter, chain FORWARD: the policy drops packets of pods"]);
        let accepted = format!("{saved}-A FORWARD -s 10.42.0.0/16 -j ACCEPT\nCOMMIT\n");
        assert_eq!(read("iptables-legacy-save", &accepted), [""; 0]);
        assert_eq!(read("iptables-legacy-save", ""), [""; 0]);
    }

    #[test]
    fn tables_that_are_not_in_use_are_not_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let names = dir.path().join("names");
        assert_eq!(table_blocking_chains(&names, "no-such-program"), [""; 0]);
        std::fs::write(&names, "nat\n").unwrap();
        assert_eq!(table_blocking_chains(&names, "no-such-program"), [""; 0]);
        std::fs::write(&names, "nat\nfilter\n").unwrap();
        let found = table_blocking_chains(&names, "no-such-program");
        assert!(found[0].ends_with("failed to list rules with no-such-program"), "{found:?}");
    }
}
