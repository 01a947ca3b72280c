//! Guesses from its command how long a container runs and how it exits.

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Container, Pod};
use reconcile::Object as _;

/// How long a program runs that is expected to exit, as in a Job or an init container, if its
/// command does not show that.
const DEFAULT_TASK_DURATION: SignedDuration = SignedDuration::from_secs(2);

/// One run of a container.
#[derive(Debug, PartialEq)]
pub struct Program {
    /// `None` means forever.
    pub runs_for: Option<SignedDuration>,
    pub exit_code: i32,
    pub ready_after: SignedDuration,
}

impl Program {
    pub fn of(container: &Container, pod: &Pod) -> Program {
        let words: Vec<&str> = container
            .command
            .iter()
            .flatten()
            .chain(container.args.iter().flatten())
            .map(String::as_str)
            .collect();
        let (runs_for, exit_code) = match words.as_slice() {
            [] => {
                let task = pod.controller().is_some_and(|owner| owner.kind == "Job");
                (task.then_some(DEFAULT_TASK_DURATION), 0)
            }
            [shell, "-c", script, ..] if matches!(shell.rsplit('/').next(), Some("sh" | "bash" | "ash")) => {
                self::script(script)
            }
            words => command(words),
        };
        let delay =
            container.readiness_probe.as_ref().and_then(|probe| probe.initial_delay_seconds).unwrap_or(0);
        Program { runs_for, exit_code, ready_after: SignedDuration::from_secs(delay.max(0).into()) }
    }

    /// The same program if it is expected to exit, as in an init container. If it would run
    /// forever, such as a loop that waits for a service, it is assumed to succeed.
    pub fn ending(self) -> Program {
        Program { runs_for: self.runs_for.or(Some(DEFAULT_TASK_DURATION)), ..self }
    }
}

/// A shell script of plain commands in sequence. Anything more complex is assumed to run forever.
fn script(text: &str) -> (Option<SignedDuration>, i32) {
    if ["while ", "until ", "for ", "exec "].iter().any(|word| text.contains(word)) {
        return (None, 0);
    }
    let mut total = SignedDuration::ZERO;
    let mut code = 0;
    for line in text.split([';', '\n']).flat_map(|line| line.split("&&")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let ["exit", rest @ ..] = words.as_slice() {
            code = rest.first().and_then(|code| code.parse().ok()).unwrap_or(code);
            return (Some(total), code & 255);
        }
        match command(&words) {
            (Some(time), ended) => (total, code) = (total.saturating_add(time), ended),
            (None, _) => return (None, 0),
        }
    }
    (Some(total), code)
}

/// One command. Those that are known to exit do so at once; servers and unknown commands run
/// forever.
fn command(words: &[&str]) -> (Option<SignedDuration>, i32) {
    match words {
        []
        | [
            "true" | "echo" | "date" | "cat" | "ls" | "touch" | "rm" | "mkdir" | "cp" | "env" | "printf"
            | ":",
            ..,
        ] => (Some(SignedDuration::ZERO), 0),
        ["false", ..] => (Some(SignedDuration::ZERO), 1),
        ["sleep", time, ..] => (time.parse().ok().map(SignedDuration::from_secs), 0),
        _ => (None, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(command: &[&str], expected: (Option<i64>, i32)) {
        let words = command.iter().map(|word| (*word).to_owned()).collect();
        let container = Container { command: Some(words), ..Container::default() };
        let program = Program::of(&container, &Pod::default());
        assert_eq!((program.runs_for.map(|time| time.as_secs()), program.exit_code), expected, "{command:?}");
    }

    #[test]
    fn duration_and_exit_code_of_commands() {
        check(&["sleep", "100"], (Some(100), 0));
        check(&["sleep", "infinity"], (None, 0));
        check(&["echo", "tick"], (Some(0), 0));
        check(&["sh", "-c", "echo oh no; exit 3"], (Some(0), 3));
        check(&["/bin/sh", "-c", "echo working; sleep 1"], (Some(1), 0));
        check(&["sh", "-c", "cat /prep/data; sleep 3600"], (Some(3600), 0));
        check(&["sh", "-c", "sleep 2 && false"], (Some(2), 1));
        check(&["sh", "-c", "while true; do date; sleep 1; done"], (None, 0));
        check(&["nginx", "-g", "daemon off;"], (None, 0));
    }
}
