//! Reloads configuration files when they change, without a restart.
//!
//! inotify watches the file's directory rather than the file. This detects files written in place,
//! replaced by rename, or reached through a symlink that moves (as in ConfigMap volumes), without
//! polling. An invalid file is logged and counted, and the previous configuration stays active.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::pipe::PipeFlags;
use tokio::sync::{mpsc, watch};

use crate::cache::wait_for_shutdown;
use crate::server::Server;

/// Applies the new content of a file, or returns the reason for rejecting it.
pub type ApplyConfig = Box<dyn Fn(String) -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

/// Counts of reloads by configuration name. The metric names are upstream's.
#[derive(Default)]
pub struct ReloadMetrics(Mutex<BTreeMap<&'static str, ReloadCount>>);

#[derive(Default)]
struct ReloadCount {
    succeeded: u64,
    failed: u64,
    last: [Option<i64>; 2],
}

impl ReloadMetrics {
    fn record(&self, config_name: &'static str, success: bool) {
        let mut counts = self.0.lock();
        let count = counts.entry(config_name).or_default();
        match success {
            true => count.succeeded += 1,
            false => count.failed += 1,
        }
        count.last[usize::from(success)] = Some(Timestamp::now().as_second());
    }

    pub fn print(&self, out: &mut String) {
        for (config_name, count) in self.0.lock().iter() {
            let name = format!("apiserver_{config_name}_config_controller_automatic_reload");
            let _ = writeln!(
                out,
                "# HELP {name}s_total Total number of automatic reloads of the configuration split by status.\n# TYPE {name}s_total counter"
            );
            for (status, number) in [("failure", count.failed), ("success", count.succeeded)] {
                let _ = writeln!(out, "{name}s_total{{status=\"{status}\"}} {number}");
            }
            let last = format!("{name}_last_timestamp_seconds");
            let _ = writeln!(
                out,
                "# HELP {last} Timestamp of the last automatic reload of the configuration split by status.\n# TYPE {last} gauge"
            );
            for (status, time) in [("failure", count.last[0]), ("success", count.last[1])] {
                if let Some(time) = time {
                    let _ = writeln!(out, "{last}{{status=\"{status}\"}} {time}");
                }
            }
        }
    }
}

/// A watched configuration file.
pub struct ConfigFile {
    path: PathBuf,
    directory: std::io::Result<DirectoryWatcher>,
    last_content: Option<String>,
}

impl ConfigFile {
    /// Starts the watch. Later changes are detected, even before `watch_file` runs.
    pub fn watch(path: PathBuf) -> ConfigFile {
        ConfigFile {
            directory: DirectoryWatcher::of(&path),
            last_content: std::fs::read_to_string(&path).ok(),
            path,
        }
    }
}

/// Applies the file whenever its content changes, until shutdown. `config_name` is its name in
/// metrics.
pub async fn watch_file(
    server: Arc<Server>,
    config_name: &'static str,
    ConfigFile { path, directory: folder, mut last_content }: ConfigFile,
    apply: ApplyConfig,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut directory = match folder {
        Ok(directory) => directory,
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "failed to watch config file, changes require a restart");
            return;
        }
    };
    loop {
        tokio::select! {
            is_open = directory.changed() => if !is_open {
                tracing::warn!(path = %path.display(), "config file watch ended, changes require a restart");
                return;
            },
            () = wait_for_shutdown(&mut shutdown) => return,
        }
        // The file may be missing between two renames.
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        if last_content.as_ref() == Some(&text) {
            continue;
        }
        last_content = Some(text.clone());
        let result = apply(text).await;
        server.reload_metrics.record(config_name, result.is_ok());
        match result {
            Ok(()) => tracing::info!(path = %path.display(), "reloaded config file"),
            Err(reason) => {
                tracing::error!(path = %path.display(), reason, "failed to reload config file, keeping the previous configuration")
            }
        }
    }
}

/// inotify events of a directory, forwarded by a thread that blocks in poll(2).
struct DirectoryWatcher {
    events: mpsc::Receiver<()>,
    /// Closing this end of the pipe ends the thread.
    _end: OwnedFd,
}

impl DirectoryWatcher {
    fn of(path: &Path) -> std::io::Result<DirectoryWatcher> {
        let watch_flags =
            WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::CREATE | WatchFlags::DELETE;
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let directory =
            path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
        inotify::add_watch(&fd, directory, watch_flags)?;
        let (stop, end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (sender, events) = mpsc::channel(1);
        std::thread::Builder::new()
            .name("configuration".into())
            .spawn(move || forward_events(&fd, &stop, &sender))?;
        Ok(DirectoryWatcher { events, _end: end })
    }

    /// Waits for an event; false once the watch has ended.
    async fn changed(&mut self) -> bool {
        self.events.recv().await.is_some()
    }
}

fn forward_events(fd: &OwnedFd, stop: &OwnedFd, sender: &mpsc::Sender<()>) {
    loop {
        let mut fds = [PollFd::new(fd, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match rustix::event::poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
            Ok(_) if !fds[1].revents().is_empty() => return,
            Ok(_) => {}
        }
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(fd, &mut buffer);
        loop {
            match reader.next() {
                Ok(_) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(_) => return,
            }
        }
        // The channel holds one event: several pending changes need only one reload.
        if let Err(mpsc::error::TrySendError::Closed(())) = sender.try_send(()) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tests::TestServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn changed_files_are_applied_after_write_or_rename() {
        let test_server = TestServer::start().await;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "0").unwrap();
        let (sender, mut applied) = mpsc::unbounded_channel();
        let apply: ApplyConfig = Box::new(move |text| {
            let success = if text == "bad" { Err("it is bad".to_owned()) } else { Ok(()) };
            sender.send(text).unwrap();
            Box::pin(std::future::ready(success))
        });
        let file = ConfigFile::watch(path.clone());
        tokio::spawn(watch_file(
            test_server.server.clone(),
            "authorization",
            file,
            apply,
            test_server.stop.subscribe(),
        ));
        let mut next =
            async || tokio::time::timeout(Duration::from_secs(20), applied.recv()).await.unwrap().unwrap();
        std::fs::write(&path, "in place").unwrap();
        while next().await != "in place" {}
        let other = dir.path().join("other");
        std::fs::write(&other, "renamed").unwrap();
        std::fs::rename(&other, &path).unwrap();
        while next().await != "renamed" {}
        let link = dir.path().join("link");
        std::fs::write(&other, "bad").unwrap();
        std::os::unix::fs::symlink(&other, &link).unwrap();
        std::fs::rename(&link, &path).unwrap();
        while next().await != "bad" {}
        std::fs::write(dir.path().join("another"), "x").unwrap();
        std::fs::rename(dir.path().join("another"), &path).unwrap();
        while next().await != "x" {}
        let mut out = String::new();
        test_server.server.reload_metrics.print(&mut out);
        let line = "apiserver_authorization_config_controller_automatic_reloads_total{status=\"failure\"} 1";
        assert!(out.contains(line), "{out}");
    }
}
