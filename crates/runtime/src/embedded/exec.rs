//! `ExecSync`: runs a command in a container and returns its output and exit code.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

use super::protocol::{StreamSet, SupervisorRequest, SupervisorResponse};
use super::supervisor_client::SupervisorClient;
use super::{Embedded, call_error};
use crate::cri::ExecSyncResponse;
use crate::{Error, ErrorCode, Result};

/// Limit of each output stream. Both streams together fit into the 16 MiB that CRI clients accept as a
/// message.
const MAX_OUTPUT_BYTES: u64 = (8 << 20) - (1 << 10);
/// Time to read the remaining output after a command has exited. A process that it left behind may hold
/// the pipes open forever.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
const CALL: &str = "ExecSync";

impl Embedded {
    pub(super) async fn run_command(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecSyncResponse> {
        let (pod, known) = self.inner.container(id, CALL)?;
        if !known.is_running() {
            return Err(call_error(CALL, format!("container {id:?} is not running")));
        }
        let failed = |error: io::Error| call_error(CALL, format!("failed to exec in container: {error}"));
        let (out_writer, out) = output_pipe().map_err(failed)?;
        let (err_writer, err) = output_pipe().map_err(failed)?;
        let request = SupervisorRequest::Exec {
            container: id.to_owned(),
            command: command.to_vec(),
            tty: false,
            streams: StreamSet { stdin: false, stdout: true, stderr: true },
        };
        let fds = [out_writer.as_fd(), err_writer.as_fd()];
        let mut caller =
            SupervisorClient::send_request(&pod.directory, &request, &fds).await.map_err(failed)?;
        drop((out_writer, err_writer));
        let run = async {
            caller.wait_done().await.map_err(|message| {
                call_error(
                    CALL,
                    format!("failed to exec in container: failed to start exec: {}", exec_failure(&message)),
                )
            })?;
            let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
            let reading =
                async { tokio::join!(read_limited(out, &mut stdout), read_limited(err, &mut stderr)) };
            let (over, is_over) = tokio::sync::oneshot::channel();
            let code = async {
                let code = wait_exit_code(&mut caller).await;
                let _ = over.send(());
                code
            };
            let drained = async {
                let _ = is_over.await;
                tokio::time::sleep(OUTPUT_DRAIN_TIMEOUT).await;
            };
            let reading = async {
                tokio::select! {
                    _ = reading => {}
                    () = drained => {}
                }
            };
            let (code, ()) = tokio::join!(code, reading);
            let exit_code = code.ok_or_else(|| call_error(CALL, "the pod supervisor exited"))?;
            Ok(ExecSyncResponse { stdout, stderr, exit_code })
        };
        if timeout.is_zero() {
            return run.await;
        }
        // Closing the connection makes the supervisor kill the command.
        tokio::time::timeout(timeout, run).await.unwrap_or_else(|_| {
            let message = format!("command {command:?} timed out: timeout {timeout:?} exceeded");
            Err(Error::Rejected { call: CALL, code: ErrorCode::Timeout, message })
        })
    }
}

/// Reads a stream to its end and keeps the first part of it. The rest is discarded, so that the command
/// never blocks on a full pipe.
async fn read_limited(mut stream: pipe::Receiver, into: &mut Vec<u8>) -> io::Result<u64> {
    (&mut stream).take(MAX_OUTPUT_BYTES).read_to_end(into).await?;
    tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
}

/// An exec error in runc's format.
pub fn exec_failure(message: &str) -> String {
    format!("OCI runtime exec failed: exec failed: unable to start container process: {message}: unknown")
}

/// Waits for the exit code of a command; `None` if the supervisor is gone.
pub async fn wait_exit_code(caller: &mut SupervisorClient) -> Option<i32> {
    while let Ok(Some(answer)) = caller.next().await {
        if let SupervisorResponse::Exited { code } = answer {
            return Some(code);
        }
    }
    None
}

/// An output pipe: the write end is for the command, the read end stays here.
pub fn output_pipe() -> io::Result<(io::PipeWriter, pipe::Receiver)> {
    let (reader, writer) = io::pipe()?;
    Ok((writer, pipe::Receiver::from_owned_fd(reader.into())?))
}
