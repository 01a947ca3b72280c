//! Lifecycle hooks: `postStart` and `preStop` handlers. Hooks have no timeout of their own: callers
//! with a deadline stop waiting. Upstream: `pkg/kubelet/lifecycle/handlers.go`.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, HTTPGetAction, LifecycleHandler, Pod};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use runtime::cri::ExecSyncResponse;

use crate::observed::ObservedPod;
use crate::pod::format_pod;
use crate::prober::{self, HttpGetRequest};
use crate::{Node, worker};

/// CRI requires a timeout for exec. Hooks have none, so use a year.
const HOOK_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The timeout for opening a TCP connection.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a running hook checks whether the pod is terminating.
const TERMINATION_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Runs a lifecycle hook of a container. The error may contain secrets, so it must not go into
/// events.
pub async fn run(
    node: &Node,
    pod: &Pod,
    container: &Container,
    id: &str,
    hook: &LifecycleHandler,
) -> Result<(), String> {
    let failed = |what: &str, why: String| {
        let (container, pod) = (&container.name, format_pod(pod));
        format!("{what} for Container {container:?} in Pod {pod:?} failed - error: {why}")
    };
    if let Some(exec) = &hook.exec {
        let command = exec.command.clone().unwrap_or_default();
        let output =
            node.runtime.exec_sync(id, &command, HOOK_TIMEOUT).await.map_err(|error| error.message());
        let what = format!("Exec lifecycle hook ([{}])", command.join(" "));
        return output
            .and_then(|output| check_exit_code(&command, &output))
            .map_err(|why| failed(&what, why));
    }
    if let Some(get) = &hook.http_get {
        let what = format!("HTTP lifecycle hook ({})", get.path.as_deref().unwrap_or_default());
        return call_http_hook(node, pod, container, get).await.map_err(|why| failed(&what, why));
    }
    if let Some(sleep) = &hook.sleep {
        tokio::time::sleep(Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0))).await;
        return Ok(());
    }
    // Upstream has the deprecated field but does not run it.
    if let Some(socket) = &hook.tcp_socket {
        let host = hook_host(node, pod, socket.host.as_ref()).await?;
        return prober::tcp(&host, resolve_port(container, &socket.port)?, DIAL_TIMEOUT).await;
    }
    Err("Cannot run handler: invalid handler".to_owned())
}

/// Runs a `postStart` hook until the pod terminates. Returns `None` if that came first.
pub async fn run_until_terminating<T>(
    is_terminating: impl Fn() -> bool,
    hook: impl Future<Output = T>,
) -> Option<T> {
    let over = async {
        while !is_terminating() {
            tokio::time::sleep(TERMINATION_CHECK_INTERVAL).await;
        }
    };
    tokio::select! {
        done = hook => Some(done),
        () = over => None,
    }
}

fn check_exit_code(command: &[String], output: &ExecSyncResponse) -> Result<(), String> {
    match output.exit_code {
        0 => Ok(()),
        code => Err(format!(
            "command '{}' exited with {code}: {}, message: {:?}",
            command.join(" "),
            combined_output(&output.stderr, &[]),
            combined_output(&output.stdout, &output.stderr)
        )),
    }
}

/// The host of an HTTP or TCP hook: the one in the hook, or the pod's address.
async fn hook_host(node: &Node, pod: &Pod, named: Option<&String>) -> Result<String, String> {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        return Ok(named.clone());
    }
    // The pod status may lag behind the sandbox.
    let seen = worker::observe(&*node.runtime, pod, &node.settings).await.unwrap_or_default();
    let found = pod_ip(pod, sandbox_ips(&seen), &node.settings.node_ips());
    found.ok_or_else(|| "failed to find networking container".to_owned())
}

async fn call_http_hook(
    node: &Node,
    pod: &Pod,
    container: &Container,
    get: &HTTPGetAction,
) -> Result<(), String> {
    let host = hook_host(node, pod, get.host.as_ref()).await?;
    let request = HttpGetRequest::new(container, &host, get, "lifecycle")?;
    if request.call().await? == prober::HttpHookResult::HttpFallback {
        let message = format!(
            "request to HTTPS lifecycle hook {} got HTTP response, retry with HTTP succeeded",
            request.authority()
        );
        node.ctx.events.warning(pod, "LifecycleHTTPFallback", message);
    }
    Ok(())
}

/// The IP addresses of the pod's sandbox.
pub fn sandbox_ips(seen: &ObservedPod) -> &[String] {
    seen.sandbox().map_or(&[], |sandbox| &sandbox.ips)
}

/// The address of the pod: that of the node for host network, that of the sandbox, or else that of
/// the status.
pub fn pod_ip(pod: &Pod, sandbox: &[String], node: &[String]) -> Option<String> {
    let is_on_host = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
    let found = if is_on_host { node } else { sandbox };
    found.first().cloned().or_else(|| pod.status.as_ref()?.pod_ip.clone())
}

/// Resolves a port number or a port name of this container.
pub fn resolve_port(container: &Container, port: &IntOrString) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            match ports.find(|port| port.name.as_ref() == Some(name)) {
                Some(found) => found.container_port,
                // A number may be written as a string.
                None => {
                    name.parse().map_err(|_| format!("strconv.Atoi: parsing {name:?}: invalid syntax"))?
                }
            }
        }
    };
    let valid = u16::try_from(number).ok().filter(|number| *number > 0);
    valid.ok_or_else(|| format!("invalid port number: {number}"))
}

/// The combined output, truncated for messages.
pub fn combined_output(stdout: &[u8], stderr: &[u8]) -> String {
    let both = [stdout, stderr].concat();
    String::from_utf8_lossy(&both[..both.len().min(prober::MAX_RESPONSE_BYTES)]).into_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn named_ports_are_resolved_in_their_container() {
        let container: Container = serde_json::from_value(
            json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}, {"containerPort": 1}]}),
        )
        .expect("a container");
        let check = |wanted: IntOrString, expected: Result<u16, &str>| {
            assert_eq!(resolve_port(&container, &wanted), expected.map_err(str::to_owned), "{wanted:?}");
        };
        let named = |name: &str| IntOrString::String(name.to_owned());
        check(IntOrString::Int(80), Ok(80));
        check(named("web"), Ok(8080));
        check(named("81"), Ok(81));
        // Only ports of the same container count.
        check(named("metrics"), Err("strconv.Atoi: parsing \"metrics\": invalid syntax"));
        for number in [-1, 0, 65536] {
            let expected = format!("invalid port number: {number}");
            check(IntOrString::Int(number), Err(&expected));
            check(named(&number.to_string()), Err(&expected));
        }
    }

    #[test]
    fn sandbox_ip_overrides_pod_status() {
        let check = |host: bool, status_ip: Option<&str>, sandbox: &[&str], expected: Option<&str>| {
            let pod =
                json!({"spec": {"containers": [], "hostNetwork": host}, "status": {"podIP": status_ip}});
            let pod: Pod = serde_json::from_value(pod).expect("a pod");
            let own = |ips: &[&str]| ips.iter().map(|ip| (*ip).to_owned()).collect::<Vec<_>>();
            let found = pod_ip(&pod, &own(sandbox), &own(&["192.0.2.1", "2001:db8::1"]));
            assert_eq!(found.as_deref(), expected, "{host} {status_ip:?} {sandbox:?}");
        };
        check(false, None, &["10.0.0.1", "fd00::1"], Some("10.0.0.1"));
        check(false, Some("10.0.0.9"), &["10.0.0.1"], Some("10.0.0.1"));
        check(false, Some("10.0.0.9"), &[], Some("10.0.0.9"));
        check(false, None, &[], None);
        check(true, None, &[], Some("192.0.2.1"));
    }

    #[tokio::test(start_paused = true)]
    async fn hook_is_cancelled_when_pod_is_terminating() {
        let long = || tokio::time::sleep(Duration::from_secs(60 * 60));
        assert_eq!(run_until_terminating(|| false, long()).await, Some(()));
        let started = tokio::time::Instant::now();
        assert_eq!(run_until_terminating(|| started.elapsed().as_secs() >= 10, long()).await, None);
        assert_eq!(started.elapsed().as_secs(), 10);
    }

    #[test]
    fn exec_hook_fails_on_nonzero_exit_code() {
        let check = |exit_code, expected: Result<(), &str>| {
            let output = ExecSyncResponse { stdout: b"out".to_vec(), stderr: b"err".to_vec(), exit_code };
            let found = check_exit_code(&["sh".to_owned(), "x".to_owned()], &output);
            assert_eq!(found, expected.map_err(str::to_owned));
        };
        check(0, Ok(()));
        check(3, Err("command 'sh x' exited with 3: err, message: \"outerr\""));
    }
}
