//! Exec and attach sessions: connect a client's streams to those of a process.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};

use super::StatusFormat;
use super::channels::{Channels, Input, Output};
use super::terminal::Terminal;
use crate::embedded::exec::{exec_failure, output_pipe, wait_exit_code};
use crate::embedded::protocol::{StreamSet, SupervisorRequest, SupervisorResponse};
use crate::embedded::supervisor_client::SupervisorClient;

/// Bytes read at once.
const READ_BUFFER_BYTES: usize = 32 << 10;
/// Time to read remaining output after the process has exited, since another process may hold the pipes
/// open forever.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the client to open all its streams.
const STREAM_OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// An exec or attach request.
pub struct Session {
    pub pod: PathBuf,
    pub container: String,
    /// `None` attaches to the container's first process.
    pub command: Option<Vec<String>>,
    pub tty: bool,
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
}

/// The local ends of the pipes.
#[derive(Default)]
pub(super) struct SessionStdio {
    pub stdin: Option<pipe::Sender>,
    pub stdout: Option<pipe::Receiver>,
    pub stderr: Option<pipe::Receiver>,
}

impl Session {
    pub async fn run(self, mut channels: Channels, status_format: StatusFormat) {
        let first_input = tokio::time::timeout(STREAM_OPEN_TIMEOUT, channels.input.recv()).await;
        if !matches!(first_input, Ok(Some(Input::Ready))) {
            return;
        }
        let output = channels.output.clone();
        let status = match &self.command {
            Some(command) => self.exec(command.clone(), channels).await,
            None => self.attach(channels).await,
        };
        let status = status.unwrap_or_else(Some);
        if let Some(text) = status.and_then(|status| format_status(&status, status_format)) {
            let _ = output.send(Output::Status(text)).await;
        }
    }

    /// Creates pipes. Returns the local ends, and the remote ends to send to the supervisor.
    fn open_stdio(&self) -> std::io::Result<(SessionStdio, Vec<OwnedFd>)> {
        let (mut stdio, mut remote_fds) = (SessionStdio::default(), Vec::new());
        if self.stdin {
            let (reader, writer) = std::io::pipe()?;
            stdio.stdin = Some(pipe::Sender::from_owned_fd(writer.into())?);
            remote_fds.push(OwnedFd::from(reader));
        }
        for (wanted, near) in [(self.stdout, &mut stdio.stdout), (self.stderr, &mut stdio.stderr)] {
            if wanted {
                let (writer, reader) = output_pipe()?;
                *near = Some(reader);
                remote_fds.push(writer.into());
            }
        }
        Ok((stdio, remote_fds))
    }

    fn build_request(&self, command: Option<Vec<String>>) -> SupervisorRequest {
        let streams = StreamSet { stdin: self.stdin, stdout: self.stdout, stderr: self.stderr };
        let container = self.container.clone();
        match command {
            Some(command) if self.tty => {
                SupervisorRequest::Exec { container, command, tty: true, streams: StreamSet::default() }
            }
            Some(command) => SupervisorRequest::Exec { container, command, tty: false, streams },
            None => SupervisorRequest::Attach { container, streams },
        }
    }

    /// Sends the request to the supervisor. The error is a `Status` object.
    async fn call_supervisor(
        &self,
        command: Option<Vec<String>>,
        remote_fds: Vec<OwnedFd>,
    ) -> Result<SupervisorClient, Value> {
        let is_exec = command.is_some();
        let fds: Vec<BorrowedFd<'_>> = remote_fds.iter().map(|fd| fd.as_fd()).collect();
        let mut caller = SupervisorClient::send_request(&self.pod, &self.build_request(command), &fds)
            .await
            .map_err(failed)?;
        if is_exec {
            caller.wait_done().await.map_err(|message| {
                internal(&format!(
                    "error executing command in container: failed to exec in container: failed to start exec: {}",
                    exec_failure(&message)
                ))
            })?;
        }
        Ok(caller)
    }

    /// Runs a command, with pipes or with a terminal whose descriptor the supervisor returns.
    async fn exec(&self, command: Vec<String>, channels: Channels) -> Result<Option<Value>, Value> {
        let (mut stdio, remote_fds) =
            if self.tty { Default::default() } else { self.open_stdio().map_err(failed)? };
        let mut caller = self.call_supervisor(Some(command), remote_fds).await?;
        let mut terminal = None;
        if self.tty {
            let terminal_fd =
                caller.take_fd().ok_or_else(|| internal("the supervisor returned no terminal"))?;
            let (ends, sized) = Terminal::new(terminal_fd).map_err(failed)?;
            (stdio, terminal) = (ends, Some(sized));
        }
        let resize = move |rows, columns| {
            if let Some(terminal) = &terminal {
                terminal.resize(rows, columns);
            }
        };
        let end = async { exited(wait_exit_code(&mut caller).await) };
        Ok(copy_streams(stdio, channels, resize, end).await)
    }

    async fn attach(&self, channels: Channels) -> Result<Option<Value>, Value> {
        let (stdio, remote_fds) = self.open_stdio().map_err(failed)?;
        let mut caller = self.call_supervisor(None, remote_fds).await?;
        // Only the latest size matters.
        let (sizes, mut wanted) = watch::channel((0, 0));
        let resize = move |rows, columns| {
            sizes.send_replace((rows, columns));
        };
        let end = async {
            loop {
                tokio::select! {
                    answer = caller.next() => return match answer {
                        Ok(Some(SupervisorResponse::Failed { message })) => internal(&message),
                        _ => success(),
                    },
                    Ok(()) = wanted.changed() => {
                        let (rows, columns) = *wanted.borrow_and_update();
                        let container = self.container.clone();
                        let _ = caller.send(&SupervisorRequest::Resize { container, rows, columns }, &[]).await;
                    }
                }
            }
        };
        Ok(copy_streams(stdio, channels, resize, end).await)
    }
}

/// Copies data in both directions until the process has exited and its output is read. `None` if the
/// client disconnects first; closing the connection to the supervisor then kills the command.
async fn copy_streams(
    stdio: SessionStdio,
    channels: Channels,
    resize: impl FnMut(u16, u16),
    end: impl Future<Output = Value>,
) -> Option<Value> {
    let Channels { mut input, output } = channels;
    let (over, is_over) = watch::channel(false);
    let output_loop = read_output(stdio.stdout, stdio.stderr, output, is_over);
    let input_loop = write_input(stdio.stdin, &mut input, resize);
    tokio::pin!(end, output_loop, input_loop);
    let (mut status, mut is_read) = (None, false);
    while status.is_none() || !is_read {
        tokio::select! {
            ended = &mut end, if status.is_none() => {
                status = Some(ended);
                over.send_replace(true);
            }
            () = &mut output_loop, if !is_read => is_read = true,
            () = &mut input_loop => return None,
        }
    }
    status
}

/// Copies the output of a process until it ends.
async fn read_output(
    stdout: Option<pipe::Receiver>,
    stderr: Option<pipe::Receiver>,
    output: mpsc::Sender<Output>,
    is_over: watch::Receiver<bool>,
) {
    tokio::join!(
        read_stream(stdout, &output, Output::Stdout, &is_over),
        read_stream(stderr, &output, Output::Stderr, &is_over)
    );
}

async fn read_stream(
    source: Option<pipe::Receiver>,
    output: &mpsc::Sender<Output>,
    wrap: fn(Vec<u8>) -> Output,
    is_over: &watch::Receiver<bool>,
) {
    let Some(mut source) = source else { return };
    let mut buffer = vec![0; READ_BUFFER_BYTES];
    loop {
        let count = tokio::select! {
            count = source.read(&mut buffer) => count.unwrap_or(0),
            () = wait_drained(is_over) => 0,
        };
        if count == 0 || output.send(wrap(buffer[..count].to_vec())).await.is_err() {
            return;
        }
    }
}

/// Completes a while after the process has exited. Each read restarts the time, and sending to a slow
/// client does not count.
async fn wait_drained(is_over: &watch::Receiver<bool>) {
    // An error means that the session has ended and this read with it.
    let _ = is_over.clone().wait_for(|over| *over).await;
    tokio::time::sleep(OUTPUT_DRAIN_TIMEOUT).await;
}

/// Copies the input of a client until it disconnects.
async fn write_input(
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

/// The result in the client's format; `None` if there is nothing to report.
fn format_status(status: &Value, status_format: StatusFormat) -> Option<String> {
    match status_format {
        StatusFormat::Status => Some(status.to_string()),
        StatusFormat::Message if status["status"] == "Success" => None,
        StatusFormat::Message => status["message"].as_str().map(str::to_owned),
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
        None => internal("the pod supervisor exited"),
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
    fn old_protocols_report_only_failures() {
        assert_eq!(format_status(&exited(Some(0)), StatusFormat::Message), None);
        let failed = "command terminated with non-zero exit code: exit status 3";
        assert_eq!(format_status(&exited(Some(3)), StatusFormat::Message).as_deref(), Some(failed));
        let status = format_status(&exited(Some(0)), StatusFormat::Status);
        assert_eq!(status.as_deref(), Some(r#"{"metadata":{},"status":"Success"}"#));
    }
}
