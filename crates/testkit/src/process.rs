//! A child process: its output is recorded, its exit is noticed, and it never outlives the test.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// Maximum time to wait for output before a condition is checked again.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A running child; killed on drop.
pub struct Process {
    child: Child,
    log: Arc<Mutex<Vec<u8>>>,
    /// Receives a message when the child writes, and disconnects when it has closed its output. The
    /// mutex is never locked; it only makes the type `Sync`.
    output_events: Mutex<Receiver<()>>,
}

impl Process {
    pub fn spawn(command: &mut Command) -> Result<Process> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let log = Arc::default();
        let (sender, output_events) = channel();
        read_output(child.stdout.take(), &log, sender.clone());
        read_output(child.stderr.take(), &log, sender);
        Ok(Process { child, log, output_events: Mutex::new(output_events) })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The output of the child so far.
    pub fn log(&self) -> String {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&log).into_owned()
    }

    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Repeats `check` until it returns a value. Fails if the child exits or the time is up.
    pub fn wait_until<T>(&mut self, timeout: Duration, mut check: impl FnMut() -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(result) = check() {
                return Ok(result);
            }
            if let Some(status) = self.child.try_wait()? {
                self.drain_output();
                bail!("the process exited with {status}\n{}", self.log());
            }
            if Instant::now() >= deadline {
                bail!("not ready within {timeout:?}\n{}", self.log());
            }
            self.wait_for_output(POLL_INTERVAL);
        }
    }

    /// The same with the output of the child so far.
    pub fn wait_until_log<T>(
        &mut self,
        timeout: Duration,
        mut read: impl FnMut(&str) -> Option<T>,
    ) -> Result<T> {
        let log = self.log.clone();
        let text =
            move || String::from_utf8_lossy(&log.lock().unwrap_or_else(PoisonError::into_inner)).into_owned();
        self.wait_until(timeout, || read(&text()))
    }

    /// SIGKILL: the child cannot clean up.
    pub fn kill(&mut self) {
        // Fails only if the child has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends SIGTERM and waits until the child has exited.
    pub fn terminate(&mut self, timeout: Duration) -> Result<ExitStatus> {
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.child),
            rustix::process::Signal::TERM,
        )
        .context("cannot signal the process")?;
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait()? {
                self.drain_output();
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("still running {timeout:?} after SIGTERM\n{}", self.log());
            }
            self.wait_for_output(POLL_INTERVAL);
        }
    }

    /// Reads the remaining output of an exited child. A grandchild may keep the pipes open, hence the
    /// time limit.
    fn drain_output(&mut self) {
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        let left = || deadline.saturating_duration_since(Instant::now());
        let output_events = self.output_events.get_mut().unwrap_or_else(PoisonError::into_inner);
        while output_events.recv_timeout(left()).is_ok() {}
    }

    fn wait_for_output(&mut self, at_most: Duration) {
        let output_events = self.output_events.get_mut().unwrap_or_else(PoisonError::into_inner);
        if output_events.recv_timeout(at_most) == Err(RecvTimeoutError::Disconnected) {
            // The child has closed its output and sends no more messages; without a pause the caller
            // would spin.
            std::thread::park_timeout(at_most);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads a pipe to its end on a thread of its own, so that the child never blocks on a full pipe.
fn read_output(
    pipe: Option<impl Read + Send + 'static>,
    log: &Arc<Mutex<Vec<u8>>>,
    output_events: Sender<()>,
) {
    let Some(mut pipe) = pipe else { return };
    let log = log.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = pipe.read(&mut buffer) {
            log.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&buffer[..length]);
            if output_events.send(()).is_err() {
                return;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Process {
        Process::spawn(Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn waits_until_check_returns_a_value() {
        let mut process = shell("echo up; exec sleep 1000");
        let log = process.log.clone();
        process.wait_until(TIMEOUT, || log.lock().unwrap().starts_with(b"up").then_some(())).unwrap();
        let id = process.id();
        drop(process);
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists(), "dropping kills the process");
    }

    #[test]
    fn wait_fails_with_log_when_process_exits() {
        let error = shell("echo no such thing >&2; exit 3").wait_until(TIMEOUT, || None::<()>).unwrap_err();
        assert_eq!(error.to_string(), "the process exited with exit status: 3\nno such thing\n");
    }

    #[test]
    fn wait_fails_after_timeout() {
        let mut process = shell("exec sleep 1000");
        let error = process.wait_until(Duration::from_millis(50), || None::<()>).unwrap_err();
        assert!(error.to_string().starts_with("not ready within 50ms"));
    }

    #[test]
    fn terminate_returns_exit_status() {
        let mut process = shell("sleep 1000 & trap 'kill $!; exit 7' TERM; echo set; wait");
        let log = process.log.clone();
        process.wait_until(TIMEOUT, || log.lock().unwrap().starts_with(b"set").then_some(())).unwrap();
        assert_eq!(process.terminate(TIMEOUT).unwrap().code(), Some(7));
        let error = Process::spawn(&mut Command::new("/nonexistent/x")).err().unwrap();
        assert_eq!(error.to_string(), "cannot start /nonexistent/x");
    }
}
