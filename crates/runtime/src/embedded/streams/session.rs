//! Exec and attach: a client's streams tied to those of a process.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};

use super::Ending;
use super::channels::{Channels, Input, Output};
use super::terminal::Terminal;
use crate::embedded::caller::Caller;
use crate::embedded::exec::{ended, exec_failure, streams};
use crate::embedded::protocol::{Answer, Request, Streams};

/// What is read at once.
const PIECE: usize = 32 << 10;
/// For more to come out of pipes whose process is gone, since somebody else may hold them open for ever.
const DRAIN: Duration = Duration::from_secs(1);
/// For a client to open all its streams.
const OPENING: Duration = Duration::from_secs(30);

/// What a client is tied to.
pub struct Session {
    pub pod: PathBuf,
    pub container: String,
    /// None attaches to what runs already.
    pub command: Option<Vec<String>>,
    pub tty: bool,
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
}

/// Our ends of the pipes.
#[derive(Default)]
pub(super) struct Pipes {
    pub stdin: Option<pipe::Sender>,
    pub stdout: Option<pipe::Receiver>,
    pub stderr: Option<pipe::Receiver>,
}

impl Session {
    pub async fn run(self, mut channels: Channels, ending: Ending) {
        let opened = tokio::time::timeout(OPENING, channels.input.recv()).await;
        if !matches!(opened, Ok(Some(Input::Ready))) {
            return;
        }
        let output = channels.output.clone();
        let status = match &self.command {
            Some(command) => self.exec(command.clone(), channels).await,
            None => self.attach(channels).await,
        };
        let status = status.unwrap_or_else(Some);
        if let Some(told) = status.and_then(|status| told(&status, ending)) {
            let _ = output.send(Output::Status(told)).await;
        }
    }

    /// Pipes, and their far ends to send along.
    fn pipes(&self) -> std::io::Result<(Pipes, Vec<OwnedFd>)> {
        let (mut pipes, mut far) = (Pipes::default(), Vec::new());
        if self.stdin {
            let (reader, writer) = std::io::pipe()?;
            pipes.stdin = Some(pipe::Sender::from_owned_fd(writer.into())?);
            far.push(OwnedFd::from(reader));
        }
        for (wanted, near) in [(self.stdout, &mut pipes.stdout), (self.stderr, &mut pipes.stderr)] {
            if wanted {
                let (writer, reader) = streams()?;
                *near = Some(reader);
                far.push(writer.into());
            }
        }
        Ok((pipes, far))
    }

    fn asked(&self, command: Option<Vec<String>>) -> Request {
        let streams = Streams { stdin: self.stdin, stdout: self.stdout, stderr: self.stderr };
        let container = self.container.clone();
        match command {
            Some(command) if self.tty => {
                Request::Exec { container, command, tty: true, streams: Streams::default() }
            }
            Some(command) => Request::Exec { container, command, tty: false, streams },
            None => Request::Attach { container, streams },
        }
    }

    /// Asks the supervisor; what went wrong is a status.
    async fn ask(&self, command: Option<Vec<String>>, far: Vec<OwnedFd>) -> Result<Caller, Value> {
        let is_exec = command.is_some();
        let fds: Vec<BorrowedFd<'_>> = far.iter().map(|fd| fd.as_fd()).collect();
        let mut caller = Caller::ask(&self.pod, &self.asked(command), &fds).await.map_err(failed)?;
        if is_exec {
            caller.done().await.map_err(|message| {
                internal(&format!(
                    "error executing command in container: failed to exec in container: failed to start exec: {}",
                    exec_failure(&message)
                ))
            })?;
        }
        Ok(caller)
    }

    /// Runs a command, with pipes or with a terminal that comes back with the answer.
    async fn exec(&self, command: Vec<String>, channels: Channels) -> Result<Option<Value>, Value> {
        let (mut pipes, far) = if self.tty { Default::default() } else { self.pipes().map_err(failed)? };
        let mut caller = self.ask(Some(command), far).await?;
        let mut terminal = None;
        if self.tty {
            let near = caller.take_fd().ok_or_else(|| internal("no terminal"))?;
            let (ends, sized) = Terminal::new(near).map_err(failed)?;
            (pipes, terminal) = (ends, Some(sized));
        }
        let resize = move |rows, columns| {
            if let Some(terminal) = &terminal {
                terminal.resize(rows, columns);
            }
        };
        let end = async { exited(ended(&mut caller).await) };
        Ok(tie(pipes, channels, resize, end).await)
    }

    async fn attach(&self, channels: Channels) -> Result<Option<Value>, Value> {
        let (pipes, far) = self.pipes().map_err(failed)?;
        let mut caller = self.ask(None, far).await?;
        // Of several sizes the last one counts.
        let (sizes, mut wanted) = watch::channel((0, 0));
        let resize = move |rows, columns| {
            sizes.send_replace((rows, columns));
        };
        let end = async {
            loop {
                tokio::select! {
                    answer = caller.next() => return match answer {
                        Ok(Some(Answer::Failed { message })) => internal(&message),
                        _ => success(),
                    },
                    Ok(()) = wanted.changed() => {
                        let (rows, columns) = *wanted.borrow_and_update();
                        let container = self.container.clone();
                        let _ = caller.send(&Request::Resize { container, rows, columns }, &[]).await;
                    }
                }
            }
        };
        Ok(tie(pipes, channels, resize, end).await)
    }
}

/// Passes on what both sides say, until the process has ended and all it said is read. None when the client is gone
/// before: hanging up then ends a command.
async fn tie(
    pipes: Pipes,
    channels: Channels,
    resize: impl FnMut(u16, u16),
    end: impl Future<Output = Value>,
) -> Option<Value> {
    let Channels { mut input, output } = channels;
    let (over, is_over) = watch::channel(false);
    let reading = read_both(pipes.stdout, pipes.stderr, output, is_over);
    let typing = type_into(pipes.stdin, &mut input, resize);
    tokio::pin!(end, reading, typing);
    let (mut status, mut is_read) = (None, false);
    while status.is_none() || !is_read {
        tokio::select! {
            ended = &mut end, if status.is_none() => {
                status = Some(ended);
                over.send_replace(true);
            }
            () = &mut reading, if !is_read => is_read = true,
            () = &mut typing => return None,
        }
    }
    status
}

/// Passes on what a process says until it has said all.
async fn read_both(
    stdout: Option<pipe::Receiver>,
    stderr: Option<pipe::Receiver>,
    output: mpsc::Sender<Output>,
    is_over: watch::Receiver<bool>,
) {
    tokio::join!(
        read_one(stdout, &output, Output::Stdout, &is_over),
        read_one(stderr, &output, Output::Stderr, &is_over)
    );
}

async fn read_one(
    source: Option<pipe::Receiver>,
    output: &mpsc::Sender<Output>,
    wrap: fn(Vec<u8>) -> Output,
    is_over: &watch::Receiver<bool>,
) {
    let Some(mut source) = source else { return };
    let mut buffer = vec![0; PIECE];
    loop {
        let count = tokio::select! {
            count = source.read(&mut buffer) => count.unwrap_or(0),
            () = long_over(is_over) => 0,
        };
        if count == 0 || output.send(wrap(buffer[..count].to_vec())).await.is_err() {
            return;
        }
    }
}

/// When the process is gone and nothing has come for a while. A client that is slow to read is waited for.
async fn long_over(is_over: &watch::Receiver<bool>) {
    // An error is the end of the session, which ends the reading with it.
    let _ = is_over.clone().wait_for(|over| *over).await;
    tokio::time::sleep(DRAIN).await;
}

/// Passes on what a client types; ends when the client is gone.
async fn type_into(
    mut stdin: Option<pipe::Sender>,
    input: &mut mpsc::Receiver<Input>,
    mut resize: impl FnMut(u16, u16),
) {
    while let Some(one) = input.recv().await {
        match one {
            Input::Stdin(bytes) => {
                if let Some(pipe) = &mut stdin
                    && pipe.write_all(&bytes).await.is_err()
                {
                    stdin = None;
                }
            }
            Input::StdinEnd => stdin = None,
            Input::Resize { columns, rows } => resize(rows, columns),
            Input::Ready => {}
        }
    }
}

/// The end as a client of that version wants to hear it.
fn told(status: &Value, ending: Ending) -> Option<String> {
    match ending {
        Ending::Status => Some(status.to_string()),
        Ending::Words if status["status"] == "Success" => None,
        Ending::Words => status["message"].as_str().map(str::to_owned),
    }
}

fn success() -> Value {
    json!({"metadata": {}, "status": "Success"})
}

fn exited(code: Option<i32>) -> Value {
    match code {
        Some(0) => success(),
        Some(code) => json!({
            "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
            "message": format!("command terminated with non-zero exit code: exit status {code}"),
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
        None => internal("the container is gone"),
    }
}

fn failed(error: std::io::Error) -> Value {
    internal(&error.to_string())
}

fn internal(message: &str) -> Value {
    json!({
        "metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500,
        "message": format!("Internal error occurred: {message}"),
        "details": {"causes": [{"message": message}]},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_clients_hear_of_failures_only() {
        assert_eq!(told(&exited(Some(0)), Ending::Words), None);
        let failed = "command terminated with non-zero exit code: exit status 3";
        assert_eq!(told(&exited(Some(3)), Ending::Words).as_deref(), Some(failed));
        let status = told(&exited(Some(0)), Ending::Status);
        assert_eq!(status.as_deref(), Some(r#"{"metadata":{},"status":"Success"}"#));
    }
}
