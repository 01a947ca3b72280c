//! What the processes behind pods use: those that were started here, and those that hold pods and belong to nobody.
//!
//! This process becomes the parent of whatever loses its own, so that the CPU time of those that have ended is added to
//! its children's.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};

/// The argument by which a pod's own program is told from what holds the pod.
pub const SLEEP_SECONDS: &str = "987654";

/// The processes of one runtime.
pub struct RuntimeProcesses {
    /// What each process that holds a pod has in its command line, besides the directory.
    command_marker: &'static str,
    dir: PathBuf,
    /// Those that serve all pods.
    roots: Vec<u32>,
}

/// In megabytes.
#[derive(Debug, Default)]
pub struct MemoryUsage {
    pub rss: f64,
    /// Shared pages divided by those who share them.
    pub pss: f64,
    pub private: f64,
}

impl RuntimeProcesses {
    pub fn of(command_marker: &'static str, dir: &Path, roots: Vec<u32>) -> RuntimeProcesses {
        // Where it is not allowed only the account of CPU time misses something.
        let _ = set_child_subreaper(Some(getpid()));
        RuntimeProcesses { command_marker, dir: dir.to_owned(), roots }
    }

    /// Seconds of CPU used so far: by what serves all pods, by what holds one, and by all that has ended.
    pub fn cpu(&self) -> Result<f64> {
        self.reap_children();
        let alive = self.roots.iter().copied().chain(self.supervisors());
        let mut ticks = 0.0;
        for pid in alive {
            // One that has just ended is with the dead, who are counted below.
            ticks += fields(pid).map_or(0.0, |fields| {
                number(&fields, 11) + number(&fields, 12) + number(&fields, 13) + number(&fields, 14)
            });
        }
        let own = fields(std::process::id()).context("no account of this process")?;
        ticks += number(&own, 13) + number(&own, 14);
        Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
    }

    /// What those use that hold pods, without the pods' own programs.
    pub fn memory(&self) -> Result<MemoryUsage> {
        let supervisors = self.supervisors();
        let mut memory = MemoryUsage::default();
        for pid in processes() {
            let is_member =
                supervisors.contains(&pid) || parent(pid).is_some_and(|parent| supervisors.contains(&parent));
            if is_member && !command(pid).contains(SLEEP_SECONDS) {
                memory.add(pid);
            }
        }
        Ok(memory)
    }

    /// What those use that serve all pods, in megabytes.
    pub fn roots_rss(&self) -> Result<f64> {
        let mut memory = MemoryUsage::default();
        self.roots.iter().for_each(|pid| memory.add(*pid));
        Ok(memory.rss)
    }

    /// Whether nobody holds a pod any more.
    pub fn have_exited(&self) -> bool {
        self.reap_children();
        self.supervisors().is_empty()
    }

    fn supervisors(&self) -> Vec<u32> {
        let dir = self.dir.display().to_string();
        let is_supervisor = |pid: &u32| {
            let command = command(*pid);
            command.contains(self.command_marker) && command.contains(&dir)
        };
        processes().filter(|pid| !self.roots.contains(pid)).filter(is_supervisor).collect()
    }

    /// Waits for those that have ended and whose parent this process has become.
    fn reap_children(&self) {
        let own = std::process::id();
        for pid in processes().filter(|pid| !self.roots.contains(pid) && parent(*pid) == Some(own)) {
            let is_dead = fields(pid).is_some_and(|fields| fields.first().is_some_and(|state| state == "Z"));
            if let Some(pid) = to_pid(pid).filter(|_| is_dead) {
                let _ = waitpid(Some(pid), WaitOptions::NOHANG);
            }
        }
    }
}

/// A measurement that failed must not leave pods behind.
impl Drop for RuntimeProcesses {
    fn drop(&mut self) {
        for pid in self.supervisors().into_iter().filter_map(to_pid) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

impl MemoryUsage {
    fn add(&mut self, pid: u32) {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let of = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
            kib.unwrap_or(0.0) * 1024.0 / 1e6
        };
        self.rss += of("Rss");
        self.pss += of("Pss");
        self.private += of("Private_Clean") + of("Private_Dirty");
    }
}

fn to_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn command(pid: u32) -> String {
    let command_line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&command_line).replace('\0', " ")
}

fn parent(pid: u32) -> Option<u32> {
    fields(pid)?.get(1)?.parse().ok()
}

/// The fields of `stat` behind the name, which may hold anything.
fn fields(pid: u32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(text.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

fn number(fields: &[String], at: usize) -> f64 {
    fields.get(at).and_then(|field| field.parse().ok()).unwrap_or(0.0)
}
