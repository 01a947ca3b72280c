//! The command line as users see it: help, misspelled flags, closed standard output.

use std::process::{Command, Output, Stdio};

fn skiff(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_skiff")).args(arguments).output().expect("run skiff")
}

fn stdout(arguments: &[&str]) -> String {
    let output = skiff(arguments);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn help_groups_flags_by_category() {
    let help = stdout(&["server", "--help"]);
    for heading in ["Cluster:", "Networking:", "Storage:", "Node:", "Runtime:", "Security:", "Logging:"] {
        assert!(help.lines().any(|line| line == heading), "{heading} is missing:\n{help}");
    }
}

#[test]
fn every_argument_has_a_help_text() {
    let commands = [
        "server",
        "agent",
        "kubelet",
        "controller-manager",
        "scheduler",
        "proxy",
        "runtime",
        "simulate",
        "dev",
        "reset",
        "backup",
        "restore",
        "version",
    ];
    for command in commands.iter().map(|command| vec![*command]).chain([
        vec!["image", "import"],
        vec!["image", "export"],
        vec!["image", "gc"],
        vec!["image", "pull"],
        vec!["image", "rm"],
        vec!["token", "create"],
        vec!["token", "delete"],
    ]) {
        let help = stdout(&[&command[..], &["-h"]].concat());
        // The description follows the argument, or is on the next line if the argument is long.
        let lines: Vec<&str> = help.lines().map(str::trim).collect();
        let is_argument = |line: &str| line.starts_with(['-', '<', '[']);
        for pair in lines.windows(2).filter(|pair| is_argument(pair[0])) {
            let is_described = pair[0].contains("  ") || !(pair[1].is_empty() || is_argument(pair[1]));
            assert!(is_described, "{command:?}: {} is not described", pair[0]);
        }
    }
}

#[test]
fn unknown_flag_error_has_suggestion() {
    let output = skiff(&["server", "--data-dri", "/x"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("'--data-dir'"), "{error}");
}

#[test]
fn version_names_kubernetes_and_the_commit() {
    let text = stdout(&["version"]);
    assert!(text.contains("\nKubernetes v1."), "{text}");
    let json: serde_json::Value = serde_json::from_str(&stdout(&["version", "-o", "json"])).expect("JSON");
    for field in ["version", "kubernetesVersion", "gitCommit", "buildDate", "platform"] {
        assert!(json[field].as_str().is_some_and(|text| !text.is_empty()), "{field}: {json}");
    }
}

#[test]
fn closed_output_ends_a_command_without_a_panic() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_skiff"));
    let output = command.arg("check").stdout(writer).stderr(Stdio::piped()).output().expect("run skiff");
    assert_eq!(output.status.code(), Some(128 + 13), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
