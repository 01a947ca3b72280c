//! Client for the supervisor of a pod. The messages are in [`super::protocol`].

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::protocol::{SOCKET, SupervisorRequest, SupervisorResponse, decode_message, encode_message};

/// A supervisor that does not respond within this time counts as lost.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// A connection to a supervisor: one request and its responses.
pub struct SupervisorClient {
    stream: UnixStream,
    received: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl SupervisorClient {
    /// Connects to the supervisor of the pod in `directory` and sends a request.
    pub async fn send_request(
        directory: &Path,
        request: &SupervisorRequest,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<SupervisorClient> {
        // A socket path is limited to 108 bytes. The path through /proc/self/fd is short however long
        // the directory is.
        let directory_fd =
            rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let path = format!("/proc/self/fd/{}/{SOCKET}", directory_fd.as_raw_fd());
        let stream = UnixStream::connect(path).await?;
        let caller = SupervisorClient { stream, received: Vec::new(), fds: Vec::new() };
        caller.send(request, fds).await?;
        Ok(caller)
    }

    /// Sends another request on the same connection.
    pub async fn send(&self, request: &SupervisorRequest, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = encode_message(request);
        let mut sent = 0;
        while sent < bytes.len() {
            self.stream.writable().await?;
            let with = if sent == 0 { fds } else { &[] };
            let send = || sys::fds::send(self.stream.as_fd(), &bytes[sent..], with);
            match self.stream.try_io(Interest::WRITABLE, send) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The next response; `None` when the supervisor has closed the connection.
    pub async fn next(&mut self) -> io::Result<Option<SupervisorResponse>> {
        let mut buffer = vec![0; 8 << 10];
        loop {
            if let Some(answer) = decode_message(&mut self.received).map_err(io::Error::other)? {
                return Ok(Some(answer));
            }
            self.stream.readable().await?;
            let receive = || sys::fds::receive(self.stream.as_fd(), &mut buffer);
            match self.stream.try_io(Interest::READABLE, receive) {
                Ok((0, _)) => return Ok(None),
                Ok((count, fds)) => {
                    self.received.extend_from_slice(&buffer[..count]);
                    self.fds.extend(fds);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes the descriptor that was received with a response.
    pub fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fds.pop()
    }

    /// Waits until the request is done. The error is the supervisor's message or the reason why it did
    /// not respond.
    pub async fn wait_done(&mut self) -> Result<(), String> {
        match tokio::time::timeout(RESPONSE_TIMEOUT, self.next()).await {
            Ok(Ok(Some(SupervisorResponse::Done))) => Ok(()),
            Ok(Ok(Some(SupervisorResponse::Failed { message }))) => Err(message),
            Ok(Ok(_)) => Err("the pod supervisor exited".to_owned()),
            Ok(Err(error)) => Err(format!("cannot reach the pod supervisor: {error}")),
            Err(_) => Err("the pod supervisor does not respond".to_owned()),
        }
    }
}

/// The PID of a pod's supervisor.
pub async fn supervisor_pid(directory: &Path) -> io::Result<i32> {
    let caller = SupervisorClient::send_request(directory, &SupervisorRequest::Watch, &[]).await?;
    caller.stream.peer_cred()?.pid().ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Kills a pod's supervisor that does not respond. All processes it has started die with it.
pub async fn kill_supervisor(directory: &Path) -> io::Result<()> {
    let pid =
        rustix::process::Pid::from_raw(supervisor_pid(directory).await?).ok_or(io::ErrorKind::NotFound)?;
    Ok(rustix::process::kill_process(pid, rustix::process::Signal::KILL)?)
}

/// Whether the pod in this directory has a supervisor.
pub fn has_supervisor(directory: &Path) -> bool {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(directory, flags, Mode::empty()).is_ok_and(|directory_fd| {
        let path = format!("/proc/self/fd/{}/{SOCKET}", directory_fd.as_raw_fd());
        std::os::unix::net::UnixStream::connect(path).is_ok()
    })
}

/// Sends a request and waits until it is done.
pub async fn call(directory: &Path, request: &SupervisorRequest) -> Result<(), String> {
    match SupervisorClient::send_request(directory, request, &[]).await {
        Ok(mut caller) => caller.wait_done().await,
        Err(error) => Err(format!("cannot reach the pod supervisor: {error}")),
    }
}
