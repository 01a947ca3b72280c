//! What containers leave to be read when they have ended: a file for it, or the end of their log.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;

use crate::config::{Settings, log_path};
use crate::observed::{Observed, State};
use crate::volumes;

const LONGEST: usize = 4096;
const LONGEST_FROM_LOG: usize = 2048;
const MOST_LINES: usize = 80;
/// What is read of a log to find its last lines.
const END: u64 = 64 << 10;

/// Adds to what is seen of containers what they said last.
pub fn add(pod: &Pod, seen: &mut Observed, settings: &Settings) {
    let containers = crate::pod::containers(pod);
    for run in &mut seen.containers {
        let State::Exited { code, .. } = run.state else { continue };
        let Some(container) = containers.iter().find(|container| container.name == run.name) else {
            continue;
        };
        let mut words =
            std::fs::read(volumes::last_words(pod, &run.name, run.attempt, settings)).unwrap_or_default();
        words.truncate(LONGEST);
        let policy = container.termination_message_policy.as_deref();
        if words.is_empty() && policy == Some("FallbackToLogsOnError") && code != 0 {
            let log = settings.log_dir(&pod.key(), pod.uid()).join(log_path(&run.name, run.attempt));
            words = last_lines(&log);
        }
        if words.is_empty() {
            continue;
        }
        if !run.message.is_empty() {
            run.message.push_str(": ");
        }
        run.message.push_str(&String::from_utf8_lossy(&words));
    }
}

fn last_lines(log: &Path) -> Vec<u8> {
    let Ok(mut file) = std::fs::File::open(log) else { return Vec::new() };
    let length = file.metadata().map_or(0, |found| found.len());
    let mut end = Vec::new();
    let read =
        file.seek(SeekFrom::Start(length.saturating_sub(END))).and_then(|_| file.read_to_end(&mut end));
    if read.is_err() {
        return Vec::new();
    }
    tail(&end, length > END)
}

/// The text of the last lines, where each is `time stream tag text`; `cut` where the first is not whole.
fn tail(log: &[u8], cut: bool) -> Vec<u8> {
    let lines: Vec<&[u8]> =
        log.split(|byte| *byte == b'\n').skip(usize::from(cut)).filter(|line| !line.is_empty()).collect();
    let mut text = Vec::new();
    for line in &lines[lines.len().saturating_sub(MOST_LINES)..] {
        let mut parts = line.splitn(4, |byte| *byte == b' ');
        let tag = parts.nth(2).unwrap_or_default();
        text.extend(parts.next().unwrap_or_default());
        if tag != b"P" {
            text.push(b'\n');
        }
    }
    text.split_off(text.len().saturating_sub(LONGEST_FROM_LOG))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(log: &str, cut: bool, expected: &str) {
        assert_eq!(String::from_utf8_lossy(&tail(log.as_bytes(), cut)), expected);
    }

    #[test]
    fn the_end_of_a_log() {
        check("t stdout F one\nt stderr P tw\nt stderr F o\n", false, "one\ntwo\n");
        check("out F one\nt stderr F two three\n", true, "two three\n");
        check("", false, "");
        let many: String = (0..100).map(|i| format!("t stdout F {i}\n")).collect();
        check(&many, false, &(20..100).map(|i| format!("{i}\n")).collect::<String>());
        let long = format!("t stdout F {}\n", "x".repeat(5000));
        check(&long, false, &format!("{}\n", "x".repeat(LONGEST_FROM_LOG - 1)));
    }
}
