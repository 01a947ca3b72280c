//! Finds the skiff nodes that run in this network namespace.
//!
//! Each node listens on an abstract Unix socket that is named after its PID, and responds with its role
//! and data directory. The kernel keeps abstract names per network namespace and removes them with the
//! process: unlike a file, a name is never stale, and nodes in other namespaces (`skiff dev`) are not
//! found. Start at [`register`] and [`nodes`].

use std::collections::BTreeSet;
use std::io::{self, Read as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

const SOCKET_PREFIX: &str = "skiff-node-";
/// A busy node responds late, a stopped process never.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_ANSWER_BYTES: u64 = 16 << 10;

/// A skiff process that manages pods or Services of this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningNode {
    pub pid: u32,
    /// The command, such as `server`.
    pub role: String,
    /// `None` if the node has none or does not respond.
    pub data_dir: Option<PathBuf>,
}

impl std::fmt::Display for RunningNode {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let RunningNode { pid, role, data_dir } = self;
        match data_dir {
            Some(dir) => write!(out, "skiff {role} (pid {pid}, data directory {})", dir.display()),
            None => write!(out, "skiff {role} (pid {pid})"),
        }
    }
}

/// Makes this process discoverable while it runs. Requires an async runtime.
pub fn register(role: &'static str, data_dir: Option<&Path>) {
    let listen = || -> io::Result<tokio::net::UnixListener> {
        let name = format!("{SOCKET_PREFIX}{}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        listener.set_nonblocking(true)?;
        tokio::net::UnixListener::from_std(listener)
    };
    let listener = match listen() {
        Ok(listener) => listener,
        Err(error) => {
            return tracing::warn!(%error, "other skiff commands will not find this node");
        }
    };
    let data_dir = data_dir.map(|dir| std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned()));
    let answer = json!({"role": role, "dataDir": data_dir}).to_string();
    tokio::spawn(async move {
        loop {
            if let Ok((mut stream, _)) = listener.accept().await {
                let _ = tokio::time::timeout(ANSWER_TIMEOUT, stream.write_all(answer.as_bytes())).await;
            } else {
                tokio::time::sleep(ANSWER_TIMEOUT).await;
            }
        }
    });
}

/// The nodes that run in this network namespace, except this process.
pub fn nodes() -> anyhow::Result<Vec<RunningNode>> {
    const SOCKETS: &str = "/proc/self/net/unix";
    let sockets = std::fs::read_to_string(SOCKETS).with_context(|| format!("cannot read {SOCKETS}"))?;
    Ok(socket_names(&sockets)
        .into_iter()
        .filter_map(query_node)
        .filter(|node| node.pid != std::process::id())
        .collect())
}

/// Names of the nodes' sockets. An accepted connection has the same name as its listener, hence the
/// set.
fn socket_names(sockets: &str) -> BTreeSet<&str> {
    let last = sockets.lines().filter_map(|line| line.split_whitespace().last()?.strip_prefix('@'));
    last.filter(|name| name.starts_with(SOCKET_PREFIX)).collect()
}

fn query_node(name: &str) -> Option<RunningNode> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).ok()?).ok()?;
    let credentials = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    // Any user may bind such a name, so only sockets of root and of the current user count.
    if !credentials.uid.is_root() && credentials.uid != rustix::process::geteuid() {
        return None;
    }
    let pid = u32::try_from(credentials.pid.as_raw_nonzero().get()).ok()?;
    let mut text = String::new();
    let _ = stream.set_read_timeout(Some(ANSWER_TIMEOUT));
    let _ = (&mut stream).take(MAX_ANSWER_BYTES).read_to_string(&mut text);
    let answer: Value = serde_json::from_str(&text).unwrap_or_default();
    Some(RunningNode {
        pid,
        role: answer["role"].as_str().unwrap_or("node").to_owned(),
        data_dir: answer["dataDir"].as_str().map(PathBuf::from),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_only_node_sockets() {
        let sockets = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            000: 00000002 00000000 00010000 0001 01 11 @skiff-node-7\n\
            001: 00000003 00000000 00000000 0001 03 12 @skiff-node-7\n\
            002: 00000002 00000000 00010000 0001 01 13 /run/skiff-node-8\n\
            003: 00000002 00000000 00010000 0001 01 14 @other\n\
            004: 00000002 00000000 00010000 0001 01 15\n";
        assert_eq!(socket_names(sockets).into_iter().collect::<Vec<_>>(), ["skiff-node-7"]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn registered_node_reports_role_and_data_dir() {
        register("server", Some(Path::new("/data")));
        let name = format!("{SOCKET_PREFIX}{}", std::process::id());
        let found = tokio::task::spawn_blocking(move || query_node(&name)).await.unwrap();
        let (pid, data_dir) = (std::process::id(), Some(PathBuf::from("/data")));
        assert_eq!(found, Some(RunningNode { pid, role: "server".to_owned(), data_dir }));
        let text = found.unwrap().to_string();
        assert_eq!(text, format!("skiff server (pid {pid}, data directory /data)"));
    }
}
