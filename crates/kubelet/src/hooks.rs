//! What is run or asked around a container's life: hooks and the questions of probes.

use std::time::Duration;

use k8s_openapi::api::core::v1::{HTTPGetAction, LifecycleHandler, Pod};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::Node;

/// How long a hook may take that nobody else limits.
const LONGEST: Duration = Duration::from_secs(120);
/// What is read of an answer: enough to say what was wrong.
const MOST_READ: u64 = 10 << 10;

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
        return http_get(pod, &ip_of(pod), get, LONGEST).await.map(drop);
    }
    if let Some(sleep) = &hook.sleep {
        tokio::time::sleep(Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0))).await;
    }
    if let Some(socket) = &hook.tcp_socket {
        let host = socket.host.clone().unwrap_or_else(|| ip_of(pod));
        return tcp(&host, port(pod, &socket.port)?, LONGEST).await;
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

/// Connects and hangs up.
pub async fn tcp(host: &str, port: u16, timeout: Duration) -> Result<(), String> {
    let shown = format!("{host}:{port}");
    match tokio::time::timeout(timeout, TcpStream::connect((host, port))).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => Err(format!("dial tcp {shown}: connect: connection refused")),
        Err(_) => Err(format!("dial tcp {shown}: i/o timeout")),
    }
}

/// Asks for a page; any answer from 200 to 399 is a good one.
pub async fn http_get(pod: &Pod, ip: &str, get: &HTTPGetAction, timeout: Duration) -> Result<(), String> {
    let host = get.host.clone().filter(|host| !host.is_empty()).unwrap_or_else(|| ip.to_owned());
    let port = port(pod, &get.port)?;
    let path = get.path.as_deref().filter(|path| !path.is_empty()).unwrap_or("/");
    let url = format!("http://{host}:{port}{path}");
    if get.scheme.as_deref() == Some("HTTPS") {
        return tcp(&host, port, timeout).await;
    }
    let mut headers = String::new();
    let mut named = false;
    for header in get.http_headers.iter().flatten() {
        named |= header.name.eq_ignore_ascii_case("host");
        // A line break would begin another header.
        let value: String = header.value.chars().filter(|character| !character.is_control()).collect();
        headers += &format!("{}: {value}\r\n", header.name);
    }
    if !named {
        headers += &format!("Host: {host}:{port}\r\n");
    }
    let request = format!(
        "GET {path} HTTP/1.1\r\n{headers}User-Agent: kube-probe/1.36\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    let asked = async {
        let stream = TcpStream::connect((host.as_str(), port)).await;
        let mut stream = stream
            .map_err(|_| format!("Get {url:?}: dial tcp {host}:{port}: connect: connection refused"))?;
        let failed = |error: std::io::Error| format!("Get {url:?}: {error}");
        stream.write_all(request.as_bytes()).await.map_err(failed)?;
        let mut answer = Vec::new();
        stream.take(MOST_READ).read_to_end(&mut answer).await.map_err(failed)?;
        let line = String::from_utf8_lossy(answer.split(|byte| *byte == b'\n').next().unwrap_or_default())
            .into_owned();
        let code: u16 = line.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        match code {
            200..400 => Ok(()),
            0 => Err(format!("Get {url:?}: malformed HTTP response")),
            code => Err(format!("HTTP probe failed with statuscode: {code}")),
        }
    };
    match tokio::time::timeout(timeout, asked).await {
        Ok(result) => result,
        Err(_) => Err(format!(
            "Get {url:?}: context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
        )),
    }
}

/// What a command said, for people.
pub fn text(stdout: &[u8], stderr: &[u8]) -> String {
    let both = [stdout, stderr].concat();
    String::from_utf8_lossy(&both[..both.len().min(MOST_READ as usize)]).into_owned()
}
