//! A program in a terminal whose size changes, as with `kubectl exec --tty`.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

const TIMEOUT: Duration = Duration::from_secs(60);
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// A child with a terminal as its input and output; killed on drop.
pub struct Terminal {
    child: Child,
    master: File,
    output: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts a program in a terminal with this number of rows and columns.
    pub fn start(command: &mut Command, size: (u16, u16)) -> Result<Terminal> {
        let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        rustix::pty::grantpt(&master)?;
        rustix::pty::unlockpt(&master)?;
        let name = rustix::pty::ptsname(&master, Vec::new())?;
        let slave = File::options().read(true).write(true).open(name.to_str()?).context("a terminal")?;
        let master = File::from(master);
        resize(&master, size)?;
        command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
        let child = command.spawn().context("cannot start the program")?;
        let output: Arc<Mutex<Vec<u8>>> = Arc::default();
        let (reader_output, mut reader) = (output.clone(), master.try_clone()?);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                reader_output
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .extend_from_slice(&buffer[..length]);
            }
        });
        Ok(Terminal { child, master, output })
    }

    /// Resizes the terminal and sends SIGWINCH to the program.
    pub fn resize(&self, size: (u16, u16)) -> Result<()> {
        resize(&self.master, size)?;
        Ok(rustix::process::kill_process(Pid::from_child(&self.child), Signal::WINCH)?)
    }

    /// Types a line repeatedly until the output contains `expected`. A resize reaches the remote end
    /// asynchronously.
    pub fn type_until(&mut self, line: &str, expected: &str) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < TIMEOUT {
            self.type_line(line)?;
            let typed_at = Instant::now();
            while typed_at.elapsed() < RETRY_INTERVAL {
                if self.output().contains(expected) {
                    return Ok(());
                }
                std::thread::park_timeout(RETRY_INTERVAL / 20);
            }
        }
        bail!("timed out waiting for output: {expected}\n{}", self.output())
    }

    pub fn type_line(&mut self, line: &str) -> Result<()> {
        Ok(self.master.write_all(format!("{line}\r").as_bytes())?)
    }

    /// Waits until the program exits.
    pub fn end(&mut self) -> Result<ExitStatus> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if started.elapsed() > TIMEOUT {
                bail!("the program is still running\n{}", self.output());
            }
            std::thread::park_timeout(RETRY_INTERVAL / 20);
        }
    }

    /// The output so far.
    pub fn output(&self) -> String {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&output).into_owned()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Fails only if the program has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn resize(master: &File, (rows, columns): (u16, u16)) -> Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(master, size)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_size_changes_are_visible() {
        let mut terminal = Terminal::start(&mut Command::new("sh"), (33, 111)).unwrap();
        terminal.type_until("stty size", "33 111").unwrap();
        terminal.resize((44, 122)).unwrap();
        terminal.type_until("stty size", "44 122").unwrap();
        terminal.type_line("exit 5").unwrap();
        assert_eq!(terminal.end().unwrap().code(), Some(5));
    }
}
