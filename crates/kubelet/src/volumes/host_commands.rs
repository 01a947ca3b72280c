//! Runs commands of the host that volumes need. Their errors have upstream's texts.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

/// The server behind a command may not respond.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);

/// The result of a command.
#[derive(Debug)]
pub struct CommandOutput {
    /// -1 if it was terminated by a signal.
    pub code: i32,
    /// Its combined standard output and standard error.
    pub output: String,
}

/// Why a command has no result.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("exec: {0:?}: executable file not found in $PATH")]
    NotFound(String),
    #[error("cannot run {0}: {1}")]
    CannotRun(String, std::io::Error),
    #[error("{0} did not finish within {COMMAND_TIMEOUT:?}")]
    Timeout(String),
}

impl CommandOutput {
    /// The output if the command succeeded, or else an error with its output and exit status.
    pub fn success_output(self) -> Result<String, String> {
        match self.code {
            0 => Ok(self.output),
            code => Err(format!("{} (exit status {code})", self.output.trim())),
        }
    }
}

/// Runs a command until it exits.
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

/// Runs `mount` with a directory as the target, which is created if it is missing.
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
