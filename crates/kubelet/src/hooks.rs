//! What is run or asked when a container begins and before it ends.

use std::time::Duration;

use k8s_openapi::api::core::v1::{LifecycleHandler, Pod};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::{Node, ask};

/// How long a hook may take that nobody else limits.
const LONGEST: Duration = Duration::from_secs(120);

/// Runs a hook; an error says what went wrong.
pub async fn run(node: &Node, pod: &Pod, id: &str, hook: &LifecycleHandler) -> Result<(), String> {
    if let Some(exec) = &hook.exec {
        let command = exec.command.clone().unwrap_or_default();
        let said = node.runtime.exec_sync(id, &command, LONGEST).await.map_err(|error| error.message())?;
        return match said.exit_code {
            0 => Ok(()),
            code => {
                Err(format!("command {command:?} exited with {code}: {}", text(&said.stdout, &said.stderr)))
            }
        };
    }
    if let Some(get) = &hook.http_get {
        return ask::http(pod, &ip_of(pod), get, LONGEST).await;
    }
    if let Some(sleep) = &hook.sleep {
        tokio::time::sleep(Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0))).await;
    }
    if let Some(socket) = &hook.tcp_socket {
        let host = socket.host.clone().unwrap_or_else(|| ip_of(pod));
        return ask::tcp(&host, port(pod, &socket.port)?, LONGEST).await;
    }
    Ok(())
}

/// The address the pod is known by.
pub fn ip_of(pod: &Pod) -> String {
    let status = pod.status.as_ref();
    status.and_then(|status| status.pod_ip.clone()).unwrap_or_else(|| "127.0.0.1".to_owned())
}

/// A port by its number or its name.
pub fn port(pod: &Pod, port: &IntOrString) -> Result<u16, String> {
    match port {
        IntOrString::Int(number) => {
            u16::try_from(*number).map_err(|_| format!("invalid port number: {number}"))
        }
        IntOrString::String(name) => {
            let containers = pod
                .spec
                .iter()
                .flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
            let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
            let found = ports.find(|port| port.name.as_ref() == Some(name));
            let number = found.map(|port| port.container_port).or_else(|| name.parse().ok());
            number
                .and_then(|number| u16::try_from(number).ok())
                .ok_or_else(|| format!("invalid port: {name}"))
        }
    }
}

/// What a command said, for people.
pub fn text(stdout: &[u8], stderr: &[u8]) -> String {
    let both = [stdout, stderr].concat();
    String::from_utf8_lossy(&both[..both.len().min(ask::MOST_READ)]).into_owned()
}
