//! Admission of connections: exec, attach, portforward and proxy have an options object, built from
//! the query, which webhooks may reject.

use api::Status;
use serde_json::{Map, Value};

use crate::request::{Query, Target};
use crate::server::{Call, Server};

/// Runs admission for a connection before it is established.
pub async fn admit(server: &Server, call: &Call, target: &Target) -> Result<(), Status> {
    let subresources = target.resource.subresources;
    let Some(sub) = subresources.iter().find(|sub| sub.name == target.subresource) else { return Ok(()) };
    let mut options = options(sub.name, &call.query, &call.path);
    options.insert("kind".into(), sub.kind.into());
    options.insert("apiVersion".into(), "v1".into());
    server.admit_connection(call, target, options.into()).await
}

fn options(subresource: &str, query: &Query, path: &str) -> Map<String, Value> {
    let mut out = Map::new();
    match subresource {
        "portforward" => {
            let ports =
                query.all("ports").flat_map(|text| text.split(',')).filter_map(|port| port.parse().ok());
            let ports: Vec<i32> = ports.collect();
            if !ports.is_empty() {
                out.insert("ports".into(), ports.into());
            }
        }
        "proxy" => {
            let rest = path.split_once("/proxy").map_or("", |(_, rest)| rest);
            if !rest.is_empty() {
                out.insert("path".into(), rest.into());
            }
        }
        _ => {
            for name in ["stdin", "stdout", "stderr", "tty"] {
                if query.flag(name) == Some(true) {
                    out.insert(name.into(), true.into());
                }
            }
            if !query.get("container").is_empty() {
                out.insert("container".into(), query.get("container").into());
            }
            if subresource == "exec" {
                let command: Vec<&str> = query.all("command").collect();
                // Upstream encodes an empty command as null.
                out.insert("command".into(), if command.is_empty() { Value::Null } else { command.into() });
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(subresource: &str, query: &str, path: &str, expected: &str) {
        assert_eq!(Value::from(options(subresource, &Query::parse(query), path)).to_string(), expected);
    }

    #[test]
    fn creates_connect_options_from_query() {
        check(
            "exec",
            "command=sh&command=-c&stdin=true&stdout=1&tty=false&container=c",
            "",
            r#"{"command":["sh","-c"],"container":"c","stdin":true,"stdout":true}"#,
        );
        check("attach", "stdin=true&command=no", "", r#"{"stdin":true}"#);
        check("portforward", "ports=80,81&ports=82", "", r#"{"ports":[80,81,82]}"#);
        check("proxy", "", "/api/v1/nodes/n/proxy/logs/x", r#"{"path":"/logs/x"}"#);
        check("proxy", "", "/api/v1/nodes/n/proxy", "{}");
    }
}
