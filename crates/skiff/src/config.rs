//! The configuration file (`--config`). Its options are those of the command line and are converted to
//! flags.

use std::path::Path;

use anyhow::{Context as _, bail};
use serde_json::Value;

/// Inserts the options of the `--config` file before the flags of the command line, which take
/// precedence.
///
/// `skiff scheduler` is skipped: its `--config` is a KubeSchedulerConfiguration.
pub fn expand_config_file(arguments: Vec<String>) -> anyhow::Result<Vec<String>> {
    if arguments.get(1).is_some_and(|command| command == "scheduler") {
        return Ok(arguments);
    }
    let Some(path) = config_path(&arguments) else { return Ok(arguments) };
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let from_file = options(&text, Path::new(&path))?;
    let flag_names: Vec<&str> =
        arguments.iter().filter_map(|a| a.strip_prefix("--")?.split('=').next()).collect();
    let mut expanded: Vec<String> = arguments.iter().take(2).cloned().collect();
    expanded.extend(
        from_file.into_iter().filter(|(name, _)| !flag_names.contains(&name.as_str())).map(|(_, flag)| flag),
    );
    expanded.extend(arguments.iter().skip(2).cloned());
    Ok(expanded)
}

fn config_path(arguments: &[String]) -> Option<String> {
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.strip_prefix("--config") {
            Some("") => return rest.next().cloned(),
            Some(value) if value.starts_with('=') => return Some(value[1..].to_owned()),
            _ => {}
        }
    }
    std::env::var("SKIFF_CONFIG_FILE").ok()
}

/// Pairs of option name and complete flag.
fn options(text: &str, path: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let value: Value =
        schema::yaml::parse(text).with_context(|| format!("{} is not YAML", path.display()))?;
    let Value::Object(entries) = value else { bail!("{} must map options to values", path.display()) };
    let mut flags = Vec::new();
    for (name, value) in entries {
        let values = match value {
            Value::Array(values) => values,
            value => vec![value],
        };
        for value in values {
            let flag = match value {
                Value::Bool(true) => format!("--{name}"),
                Value::Bool(false) | Value::Null => continue,
                Value::String(text) => format!("--{name}={text}"),
                Value::Number(number) => format!("--{name}={number}"),
                _ => {
                    bail!("{}: {name} must be a string, number, boolean or a list of these", path.display())
                }
            };
            flags.push((name.clone(), flag));
        }
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_override_config_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        std::fs::write(
            &path,
            "data-dir: /x\nhttps-listen-port: 7000\ntls-san: [a, b]\ndisable-agent: true\n",
        )
        .unwrap();
        let arguments = ["skiff", "server", "--data-dir=/y", "--config", path.to_str().unwrap()];
        let expanded = expand_config_file(arguments.map(str::to_owned).to_vec()).unwrap();
        assert_eq!(
            expanded[2..6],
            ["--disable-agent", "--https-listen-port=7000", "--tls-san=a", "--tls-san=b"].map(str::to_owned)
        );
        assert!(
            expanded.contains(&"--data-dir=/y".to_owned()) && !expanded.contains(&"--data-dir=/x".to_owned())
        );
    }

    #[test]
    fn invalid_file_error_has_its_path() {
        let error = options("- a\n- b\n", Path::new("/etc/skiff.yaml")).unwrap_err();
        assert_eq!(error.to_string(), "/etc/skiff.yaml must map options to values");
    }
}
