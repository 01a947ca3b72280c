//! Termination messages of containers: from their message file, or from the end of their log.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;

use crate::config::{Settings, log_path};
use crate::observed::{ObservedPod, State};
use crate::volumes;

const MAX_MESSAGE_BYTES: usize = 4096;
const MAX_LOG_MESSAGE_BYTES: usize = 2048;
const MAX_LOG_LINES: usize = 80;
/// How much of a log is read to find its last lines.
const LOG_TAIL_BYTES: u64 = 64 << 10;

/// Sets the termination messages of exited containers.
pub fn add_messages(pod: &Pod, seen: &mut ObservedPod, settings: &Settings) {
    let containers = crate::pod::containers(pod);
    for run in &mut seen.containers {
        let State::Exited { code, .. } = run.state else { continue };
        let Some(container) = containers.iter().find(|container| container.name == run.name) else {
            continue;
        };
        let mut message =
            std::fs::read(volumes::termination_message_path(pod, &run.name, run.attempt, settings))
                .unwrap_or_default();
        message.truncate(MAX_MESSAGE_BYTES);
        let policy = container.termination_message_policy.as_deref();
        if message.is_empty() && policy == Some("FallbackToLogsOnError") && code != 0 {
            let log = settings.log_dir(&pod.key(), pod.uid()).join(log_path(&run.name, run.attempt));
            message = last_lines(&log);
        }
        if message.is_empty() {
            continue;
        }
        if !run.message.is_empty() {
            run.message.push_str(": ");
        }
        run.message.push_str(&String::from_utf8_lossy(&message));
    }
}

fn last_lines(log: &Path) -> Vec<u8> {
    let Ok(mut file) = std::fs::File::open(log) else { return Vec::new() };
    let length = file.metadata().map_or(0, |found| found.len());
    let mut end = Vec::new();
    let read = file
        .seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))
        .and_then(|_| file.read_to_end(&mut end));
    if read.is_err() {
        return Vec::new();
    }
    tail(&end, length > LOG_TAIL_BYTES)
}

/// The text of the last lines, each `time stream tag text`. With `is_truncated` the first line is
/// incomplete and skipped.
fn tail(log: &[u8], is_truncated: bool) -> Vec<u8> {
    let lines: Vec<&[u8]> = log
        .split(|byte| *byte == b'\n')
        .skip(usize::from(is_truncated))
        .filter(|line| !line.is_empty())
        .collect();
    let mut text = Vec::new();
    for line in &lines[lines.len().saturating_sub(MAX_LOG_LINES)..] {
        let mut parts = line.splitn(4, |byte| *byte == b' ');
        let tag = parts.nth(2).unwrap_or_default();
        text.extend(parts.next().unwrap_or_default());
        if tag != b"P" {
            text.push(b'\n');
        }
    }
    text.split_off(text.len().saturating_sub(MAX_LOG_MESSAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(log: &str, is_truncated: bool, expected: &str) {
        assert_eq!(String::from_utf8_lossy(&tail(log.as_bytes(), is_truncated)), expected);
    }

    #[test]
    fn message_from_log_has_the_last_lines() {
        check("t stdout F one\nt stderr P tw\nt stderr F o\n", false, "one\ntwo\n");
        check("out F one\nt stderr F two three\n", true, "two three\n");
        check("", false, "");
        let many: String = (0..100).map(|i| format!("t stdout F {i}\n")).collect();
        check(&many, false, &(20..100).map(|i| format!("{i}\n")).collect::<String>());
        let long = format!("t stdout F {}\n", "x".repeat(5000));
        check(&long, false, &format!("{}\n", "x".repeat(MAX_LOG_MESSAGE_BYTES - 1)));
    }
}
