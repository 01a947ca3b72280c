//! Decisions by roles and bindings: how long one takes, and what knowing them all costs.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use apiserver::measured::{Access, Somebody};
use serde_json::{Value, json};

use crate::report::{Report, Unit, quantile};

const ROLES: usize = 1_000;
const BINDINGS: usize = 5_000;
const NAMESPACES: usize = 100;
const GROUPS: usize = 200;
/// Every so many roles and bindings are for the whole cluster.
const CLUSTER: usize = 10;
const KINDS: [&str; 6] = ["pods", "services", "configmaps", "secrets", "endpoints", "events"];

pub fn run(report: &mut Report, decisions: usize) -> Result<()> {
    // A few first, so that the code and what is made once are there already.
    drop(Access::of((0..20).map(role).chain((0..20).map(binding))));
    let before = resident()?;
    let access = Access::of((0..ROLES).map(role).chain((0..BINDINGS).map(binding)));
    let after = resident()?;
    report.add("memory/rbac-1000-roles-5000-bindings", Unit::Megabytes, (after - before).max(0.001));

    let mut times = Vec::with_capacity(decisions);
    let mut allowed = [0; 4];
    for i in 0..decisions {
        let question = Question::number(i);
        let begun = Instant::now();
        let answer = black_box(question.ask(&access));
        times.push(begun.elapsed().as_nanos() as f64);
        ensure!(
            answer == question.may,
            "binding {} decides otherwise for question {}",
            question.binding,
            i % 4
        );
        allowed[i % 4] += usize::from(answer);
    }
    ensure!(allowed[3] == 0 && allowed[..3].iter().all(|count| *count > 0), "each way is taken: {allowed:?}");
    report.add("rbac/decide/p50", Unit::Nanos, quantile(&mut times, 0.5));
    report.add("rbac/decide/p99", Unit::Nanos, quantile(&mut times, 0.99));
    Ok(())
}

/// What the holder of one of the bindings asks.
struct Question {
    binding: usize,
    who: Somebody,
    verb: &'static str,
    resource: String,
    namespace: String,
    may: bool,
}

impl Question {
    /// In turn what one may by name, by a group, cluster-wide, and not at all.
    fn number(i: usize) -> Question {
        let way = i % 4;
        // A stride that visits every binding.
        let n = i.wrapping_mul(7_919) % BINDINGS;
        let binding = if way == 2 { n - n % CLUSTER } else { n - n % CLUSTER + 1 + n % (CLUSTER - 1) };
        let name = if way == 1 { "nobody".to_owned() } else { format!("user-{binding}") };
        let mut groups: Vec<String> = vec!["system:authenticated".into()];
        if way == 1 {
            groups.push(format!("group-{}", binding % GROUPS));
        }
        let role = role_of(binding);
        let resource = format!("{}-{role}", KINDS[i % 5]);
        let namespace = match way {
            2 => format!("ns-{}", i % NAMESPACES),
            _ => namespace(binding),
        };
        let verb = if way == 3 { "delete" } else { "get" };
        Question { binding, who: Somebody::new(name, groups), verb, resource, namespace, may: way != 3 }
    }

    fn ask(&self, access: &Access) -> bool {
        access.allows(&self.who, self.verb, &self.resource, (&self.namespace, "an-object"))
    }
}

fn is_cluster(i: usize) -> bool {
    i.is_multiple_of(CLUSTER)
}

fn namespace(i: usize) -> String {
    format!("ns-{}", i % NAMESPACES)
}

/// The role of a binding, which is of the same namespace, or of none as the binding is.
fn role_of(binding: usize) -> usize {
    binding % ROLES
}

fn role(i: usize) -> Value {
    let rule = |kind: &&str| {
        json!({"apiGroups": [""], "resources": [format!("{kind}-{i}"), format!("{kind}-{i}/status")],
        "verbs": ["get", "list", "watch", "create"]})
    };
    let rules: Vec<Value> = KINDS[..5].iter().map(rule).collect();
    let metadata = json!({"name": format!("role-{i}"), "namespace": if is_cluster(i) { String::new() } else { namespace(i) }});
    json!({"kind": if is_cluster(i) { "ClusterRole" } else { "Role" }, "metadata": metadata, "rules": rules})
}

fn binding(i: usize) -> Value {
    let cluster = is_cluster(i);
    let subject = |kind: &str, name: String| json!({"kind": kind, "name": name, "apiGroup": "rbac.authorization.k8s.io"});
    let mut subjects =
        vec![subject("User", format!("user-{i}")), subject("Group", format!("group-{}", i % GROUPS))];
    if i % 500 == 1 {
        subjects.push(subject("Group", "system:authenticated".into()));
    }
    json!({
        "kind": if cluster { "ClusterRoleBinding" } else { "RoleBinding" },
        "metadata": {"name": format!("binding-{i}"), "namespace": if cluster { String::new() } else { namespace(i) }},
        "subjects": subjects,
        "roleRef": {"kind": if cluster { "ClusterRole" } else { "Role" }, "name": format!("role-{}", role_of(i))},
    })
}

/// The memory of this process in MB.
fn resident() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    Ok(kib.context("no VmRSS in /proc")? * 1024.0 / 1e6)
}
