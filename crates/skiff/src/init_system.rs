//! Queries the init system of this host: whether it shuts down, and which service a process belongs to.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// systemd responds immediately, unless it is overloaded.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Whether the host is shutting down, not only this process.
pub async fn is_shutting_down() -> bool {
    let query = |program: &'static str, argument: Option<&'static str>| async move {
        let mut command = tokio::process::Command::new(program);
        command.args(argument).stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(ANSWER_TIMEOUT, command.output()).await;
        output.ok()?.ok().map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    match has_systemd() {
        // This state begins when the job of shutdown.target is queued, which is before services are
        // stopped.
        true => query("systemctl", Some("is-system-running")).await.is_some_and(|state| state == "stopping"),
        false => query("runlevel", None).await.is_some_and(|levels| is_shutdown_level(&levels)),
    }
}

/// Parses the output of `runlevel` (previous and current level): whether the host halts or reboots.
fn is_shutdown_level(levels: &str) -> bool {
    matches!(levels.split_whitespace().nth(1), Some("0" | "6" | "shutdown" | "reboot"))
}

fn has_systemd() -> bool {
    Path::new("/run/systemd/system").exists()
}

/// The systemd service whose main process this is.
pub fn service_of(pid: u32) -> Option<String> {
    if !has_systemd() {
        return None;
    }
    let unit = service_in(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)?;
    // A process that a service started, such as a shell in a CI runner, is not the service's main
    // process.
    let mut command = Command::new("systemctl");
    command.args(["show", "--property=MainPID", "--value", &unit]).stdin(Stdio::null());
    let output = command.output().ok()?;
    (String::from_utf8_lossy(&output.stdout).trim() == pid.to_string()).then_some(unit)
}

/// The system service in `/proc/PID/cgroup`, for cgroup v1 and v2.
fn service_in(cgroups: &str) -> Option<String> {
    let of_systemd = |line: &str| {
        let path =
            line.strip_prefix("0::").or_else(|| line.split_once(":name=systemd:").map(|(_, path)| path))?;
        let unit = path.strip_prefix("/system.slice/")?.split('/').find(|part| part.ends_with(".service"))?;
        Some(unit.to_owned())
    };
    cgroups.lines().find_map(of_systemd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_service_from_cgroup_v1_and_v2() {
        let check = |text: &str, expected: Option<&str>| {
            assert_eq!(service_in(text).as_deref(), expected, "{text}");
        };
        check("0::/system.slice/skiff.service\n", Some("skiff.service"));
        check("0::/system.slice/system-skiff.slice/skiff@a.service/sub\n", Some("skiff@a.service"));
        check("2:cpu:/x\n1:name=systemd:/system.slice/skiff.service\n", Some("skiff.service"));
        check("0::/user.slice/user-0.slice/session-1.scope\n", None);
        check("0::/user.slice/user-1000.slice/user@1000.service/app.slice/a.service\n", None);
        check("0::/\n", None);
    }

    #[test]
    fn detects_shutdown_level() {
        let levels = ["N 6", "3 0", "N 2", "unknown", ""];
        assert_eq!(levels.map(is_shutdown_level), [true, true, false, false, false]);
    }
}
