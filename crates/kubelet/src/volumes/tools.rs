//! Programs of the host that volumes need, and their words when they fail.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

/// For a server that may not be there.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a program ended.
#[derive(Debug)]
pub struct Done {
    /// -1 when a signal ended it.
    pub code: i32,
    /// Everything it said.
    pub said: String,
}

/// Why a program did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("exec: {0:?}: executable file not found in $PATH")]
    Missing(String),
    #[error("cannot run {0}: {1}")]
    Unusable(String, std::io::Error),
    #[error("{0} has not ended within {PATIENCE:?}")]
    Late(String),
}

impl Done {
    /// What it said if it was content, else how it ended and why, in upstream's words.
    pub fn content(self) -> Result<String, String> {
        match self.code {
            0 => Ok(self.said),
            code => Err(format!("{} (exit status {code})", self.said.trim())),
        }
    }
}

/// Runs a program to its end.
pub async fn run(program: impl AsRef<OsStr>, words: &[impl AsRef<OsStr>]) -> Result<Done, Failure> {
    let name = || Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut command = tokio::process::Command::new(&program);
    command.args(words).stdin(std::process::Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(PATIENCE, command.output()).await {
        Err(_) => Err(Failure::Late(name())),
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => Err(Failure::Missing(name())),
        Ok(Err(error)) => Err(Failure::Unusable(name(), error)),
        Ok(Ok(done)) => {
            let said = [done.stdout, done.stderr].concat();
            Ok(Done {
                code: done.status.code().unwrap_or(-1),
                said: String::from_utf8_lossy(&said).into_owned(),
            })
        }
    }
}

/// Has `mount` mount something at a directory, which is made where it is not there.
pub async fn mount(words: &[String], dir: &Path) -> Result<(), String> {
    std::fs::create_dir_all(dir).map_err(|error| error.to_string())?;
    let words: Vec<String> = words.iter().cloned().chain([dir.display().to_string()]).collect();
    let why = match run("mount", &words).await {
        Ok(done) if done.code == 0 => return Ok(()),
        Ok(done) => (format!("exit status {}", done.code), done.said),
        Err(failure) => (failure.to_string(), String::new()),
    };
    let (ended, said) = why;
    let words = words.join(" ");
    Err(format!(
        "mount failed: {ended}\nMounting command: mount\nMounting arguments: {words}\nOutput: {}",
        said.trim_end()
    ))
}

/// Whether something is mounted at a directory.
pub fn is_mounted(dir: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let device = |path: &Path| std::fs::metadata(path).ok().map(|known| known.dev());
    let (own, above) = (device(dir), dir.parent().and_then(device));
    own.is_some() && own != above
}
