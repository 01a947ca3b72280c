//! Programs of the host that volumes need, and their words when they fail.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

/// For a server that may not be there.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);

/// How a program ended.
#[derive(Debug)]
pub struct CommandOutput {
    /// -1 when a signal ended it.
    pub code: i32,
    /// Everything it said.
    pub output: String,
}

/// Why a program did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("exec: {0:?}: executable file not found in $PATH")]
    NotFound(String),
    #[error("cannot run {0}: {1}")]
    CannotRun(String, std::io::Error),
    #[error("{0} has not ended within {COMMAND_TIMEOUT:?}")]
    Timeout(String),
}

impl CommandOutput {
    /// What it said if it was content, else how it ended and why, in upstream's words.
    pub fn success_output(self) -> Result<String, String> {
        match self.code {
            0 => Ok(self.output),
            code => Err(format!("{} (exit status {code})", self.output.trim())),
        }
    }
}

/// Runs a program to its end.
pub async fn run(
    program: impl AsRef<OsStr>,
    args: &[impl AsRef<OsStr>],
) -> Result<CommandOutput, CommandError> {
    let name = || Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut command = tokio::process::Command::new(&program);
    command.args(args).stdin(std::process::Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(COMMAND_TIMEOUT, command.output()).await {
        Err(_) => Err(CommandError::Timeout(name())),
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => Err(CommandError::NotFound(name())),
        Ok(Err(error)) => Err(CommandError::CannotRun(name(), error)),
        Ok(Ok(done)) => {
            let output = [done.stdout, done.stderr].concat();
            Ok(CommandOutput {
                code: done.status.code().unwrap_or(-1),
                output: String::from_utf8_lossy(&output).into_owned(),
            })
        }
    }
}

/// Has `mount` mount something at a directory, which is made where it is not there.
pub async fn mount(args: &[String], dir: &Path) -> Result<(), String> {
    std::fs::create_dir_all(dir).map_err(|error| error.to_string())?;
    let args: Vec<String> = args.iter().cloned().chain([dir.display().to_string()]).collect();
    let result = match run("mount", &args).await {
        Ok(done) if done.code == 0 => return Ok(()),
        Ok(done) => (format!("exit status {}", done.code), done.output),
        Err(failure) => (failure.to_string(), String::new()),
    };
    let (ended, output) = result;
    let args = args.join(" ");
    Err(format!(
        "mount failed: {ended}\nMounting command: mount\nMounting arguments: {args}\nOutput: {}",
        output.trim_end()
    ))
}

/// Whether something is mounted at a directory.
pub fn is_mounted(dir: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let device = |path: &Path| std::fs::metadata(path).ok().map(|known| known.dev());
    let (own, above) = (device(dir), dir.parent().and_then(device));
    own.is_some() && own != above
}
