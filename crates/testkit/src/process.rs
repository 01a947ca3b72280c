//! A child process: its output is kept, its end is noticed, and it never outlives the test.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// How long to wait for a sign of life before asking again anyway.
const STEP: Duration = Duration::from_millis(20);
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A running child, killed on drop.
pub struct Process {
    child: Child,
    log: Arc<Mutex<Vec<u8>>>,
    /// Speaks when the child writes, and hangs up when it has closed its output.
    /// Locked by nobody, so that a process can be looked at by several threads.
    signs: Mutex<Receiver<()>>,
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
        let (sender, signs) = channel();
        keep(child.stdout.take(), &log, sender.clone());
        keep(child.stderr.take(), &log, sender);
        Ok(Process { child, log, signs: Mutex::new(signs) })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Everything the child has written so far.
    pub fn log(&self) -> String {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&log).into_owned()
    }

    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Asks until there is an answer; fails when the child exits or the time is up.
    pub fn wait_until<T>(&mut self, within: Duration, mut ask: impl FnMut() -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(answer) = ask() {
                return Ok(answer);
            }
            if let Some(status) = self.child.try_wait()? {
                self.hear_out();
                bail!("the process ended with {status}\n{}", self.log());
            }
            if Instant::now() >= deadline {
                bail!("not ready within {within:?}\n{}", self.log());
            }
            self.wait_for_sign(STEP);
        }
    }

    /// The same with what the child has written so far.
    pub fn wait_until_log<T>(
        &mut self,
        within: Duration,
        mut read: impl FnMut(&str) -> Option<T>,
    ) -> Result<T> {
        let log = self.log.clone();
        let text =
            move || String::from_utf8_lossy(&log.lock().unwrap_or_else(PoisonError::into_inner)).into_owned();
        self.wait_until(within, || read(&text()))
    }

    /// SIGKILL: the child gets no chance to tidy up.
    pub fn kill(&mut self) {
        // Fails only when the child has gone by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM, then waits for the child to end by itself.
    pub fn terminate(&mut self, within: Duration) -> Result<ExitStatus> {
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.child),
            rustix::process::Signal::TERM,
        )
        .context("cannot signal the process")?;
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait()? {
                self.hear_out();
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("still running {within:?} after SIGTERM\n{}", self.log());
            }
            self.wait_for_sign(STEP);
        }
    }

    /// Reads what a child that has ended said last. A grandchild may hold the pipes open, hence the limit.
    fn hear_out(&mut self) {
        let deadline = Instant::now() + LAST_WORDS;
        let left = || deadline.saturating_duration_since(Instant::now());
        let signs = self.signs.get_mut().unwrap_or_else(PoisonError::into_inner);
        while signs.recv_timeout(left()).is_ok() {}
    }

    fn wait_for_sign(&mut self, at_most: Duration) {
        let signs = self.signs.get_mut().unwrap_or_else(PoisonError::into_inner);
        if signs.recv_timeout(at_most) == Err(RecvTimeoutError::Disconnected) {
            // A child that has closed its output is about to end and gives no more signs.
            std::thread::park_timeout(at_most);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads a pipe to its end on a thread of its own, so that the child never blocks on a full one.
fn keep(pipe: Option<impl Read + Send + 'static>, log: &Arc<Mutex<Vec<u8>>>, signs: Sender<()>) {
    let Some(mut pipe) = pipe else { return };
    let log = log.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = pipe.read(&mut buffer) {
            log.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&buffer[..length]);
            if signs.send(()).is_err() {
                return;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Process {
        Process::spawn(Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn waits_for_an_answer() {
        let mut process = shell("echo up; exec sleep 1000");
        let log = process.log.clone();
        process.wait_until(LONG, || log.lock().unwrap().starts_with(b"up").then_some(())).unwrap();
        let id = process.id();
        drop(process);
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists(), "dropped, so gone");
    }

    #[test]
    fn notices_an_early_end_and_shows_the_log() {
        let error = shell("echo no such thing >&2; exit 3").wait_until(LONG, || None::<()>).unwrap_err();
        assert_eq!(error.to_string(), "the process ended with exit status: 3\nno such thing\n");
    }

    #[test]
    fn gives_up_after_a_while() {
        let mut process = shell("exec sleep 1000");
        let error = process.wait_until(Duration::from_millis(50), || None::<()>).unwrap_err();
        assert!(error.to_string().starts_with("not ready within 50ms"));
    }

    #[test]
    fn ends_by_itself_when_asked() {
        let mut process = shell("sleep 1000 & trap 'kill $!; exit 7' TERM; echo set; wait");
        let log = process.log.clone();
        process.wait_until(LONG, || log.lock().unwrap().starts_with(b"set").then_some(())).unwrap();
        assert_eq!(process.terminate(LONG).unwrap().code(), Some(7));
        let error = Process::spawn(&mut Command::new("/nonexistent/x")).err().unwrap();
        assert_eq!(error.to_string(), "cannot start /nonexistent/x");
    }
}
