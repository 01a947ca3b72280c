//! Runs CNI plugins.

use std::io::{Read, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::{Map, Value};

use super::{CniError, CniPlugins, Network, RuntimeConf};

/// How long a plugin may run.
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(120);
/// Output beyond this is ignored.
const MAX_OUTPUT_BYTES: u64 = 4 << 20;

/// Runs a plugin and returns its result. Only `ADD` has one.
pub fn invoke(
    cni_plugins: &CniPlugins,
    network: &Network,
    plugin: &Value,
    command: &str,
    runtime_conf: &RuntimeConf<'_>,
    previous: &Value,
) -> Result<Value, CniError> {
    let name = plugin["type"].as_str().unwrap_or_default().to_owned();
    let found = cni_plugins.dirs.iter().map(|dir| dir.join(&name)).find(|path| path.is_file());
    let path =
        found.ok_or_else(|| CniError::NoPlugin { name: name.clone(), dirs: cni_plugins.dirs.clone() })?;
    let failed =
        |reason: String| CniError::Failed { name: name.clone(), command: command.to_lowercase(), reason };
    let input = input(network, plugin, runtime_conf, previous);
    let args: Vec<String> = runtime_conf.args.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let namespace = runtime_conf.namespace.clone().unwrap_or_default();
    let mut child = Command::new(&path)
        .env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", runtime_conf.id)
        .env("CNI_NETNS", &namespace)
        .env("CNI_IFNAME", crate::POD_INTERFACE)
        .env("CNI_ARGS", args.join(";"))
        .env("CNI_PATH", list(&cni_plugins.dirs))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(format!("cannot run {}: {error}", path.display())))?;
    let (sender, receiver) = mpsc::channel();
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    // Input and output are handled on separate threads, so that a plugin that neither reads nor writes
    // cannot block the timeout.
    std::thread::spawn(move || {
        if let Some(mut stdin) = stdin {
            // A plugin that needs no input may have exited already, which makes the write fail.
            let _ = stdin.write_all(input.to_string().as_bytes());
        }
        let error_output = std::thread::spawn(move || text(stderr));
        let answer = text(stdout);
        let _ = sender.send((answer, error_output.join().unwrap_or_default()));
    });
    let received = receiver.recv_timeout(PLUGIN_TIMEOUT);
    if received.is_err() {
        let _ = child.kill();
    }
    let ended = child.wait().map_err(|error| failed(error.to_string()))?;
    let Ok((answer, error_output)) = received else {
        let seconds = PLUGIN_TIMEOUT.as_secs();
        return Err(CniError::Late { name, command: command.to_lowercase(), seconds });
    };
    let value: Option<Value> = serde_json::from_str(&answer).ok();
    if !ended.success() {
        return Err(failed(error_message(value.as_ref(), &answer, &error_output)));
    }
    match (command, value) {
        ("ADD", Some(result)) if result.is_object() => Ok(result),
        ("ADD", _) => Err(failed(format!("invalid result, expected a JSON object: {:?}", answer.trim()))),
        _ => Ok(Value::Null),
    }
}

/// The plugin's input: its configuration with the previous result and the capability arguments it
/// declares.
fn input(network: &Network, plugin: &Value, runtime_conf: &RuntimeConf<'_>, previous: &Value) -> Value {
    let mut config = plugin.as_object().cloned().unwrap_or_default();
    config.insert("name".to_owned(), network.name.as_str().into());
    config.insert("cniVersion".to_owned(), network.version.as_str().into());
    if !previous.is_null() {
        config.insert("prevResult".to_owned(), previous.clone());
    }
    let supported = config.remove("capabilities").unwrap_or_default();
    let requested = runtime_conf.capabilities.iter().filter(|(name, _)| supported[name.as_str()] == true);
    let requested: Map<String, Value> =
        requested.map(|(name, value)| (name.clone(), value.clone())).collect();
    if !requested.is_empty() {
        config.insert("runtimeConfig".to_owned(), requested.into());
    }
    config.into()
}

/// The error message of a failed plugin.
fn error_message(answer: Option<&Value>, text: &str, error_output: &str) -> String {
    let word = |name: &str| answer.and_then(|answer| answer[name].as_str()).unwrap_or_default();
    match (word("msg"), word("details")) {
        ("", _) => format!("netplugin failed: {:?}", [text.trim(), error_output.trim()].join(" ").trim()),
        (message, "") => message.to_owned(),
        (message, details) => format!("{message}; {details}"),
    }
}

fn text(stream: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        let _ = stream.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn list(dirs: &[PathBuf]) -> String {
    dirs.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(":")
}
