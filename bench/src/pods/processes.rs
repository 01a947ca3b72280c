//! CPU and memory of a runtime: of its daemons and of the supervisor process of each pod.
//!
//! This process is a child subreaper. Orphaned processes become its children, so that the CPU time of
//! exited ones is included in its children's time.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};

/// The argument of the sleep command in pods. It distinguishes a pod's own processes from its
/// supervisor.
pub const SLEEP_SECONDS: &str = "987654";

/// The processes of one runtime.
pub struct RuntimeProcesses {
    /// A word on the command line of each supervisor, in addition to the directory.
    command_marker: &'static str,
    dir: PathBuf,
    /// Daemons that serve all pods.
    roots: Vec<u32>,
}

/// Memory in megabytes.
#[derive(Debug, Default)]
pub struct MemoryUsage {
    pub rss: f64,
    /// Proportional set size: shared pages are divided by the number of processes that map them.
    pub pss: f64,
    pub private: f64,
}

impl RuntimeProcesses {
    pub fn of(command_marker: &'static str, dir: &Path, roots: Vec<u32>) -> RuntimeProcesses {
        // If this fails, only the CPU time of exited orphans is missing.
        let _ = set_child_subreaper(Some(getpid()));
        RuntimeProcesses { command_marker, dir: dir.to_owned(), roots }
    }

    /// CPU seconds used so far: by daemons, by supervisors and by all processes that have exited.
    pub fn cpu(&self) -> Result<f64> {
        self.reap_children();
        let alive = self.roots.iter().copied().chain(self.supervisors());
        let mut ticks = 0.0;
        for pid in alive {
            // A process that has just exited is included in the children's time below.
            ticks += fields(pid).map_or(0.0, |fields| {
                number(&fields, 11) + number(&fields, 12) + number(&fields, 13) + number(&fields, 14)
            });
        }
        let own = fields(std::process::id()).context("cannot read the CPU time of this process")?;
        ticks += number(&own, 13) + number(&own, 14);
        Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
    }

    /// Memory of the supervisors and their children, without the pods' own processes.
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

    /// Memory of the daemons, in megabytes.
    pub fn roots_rss(&self) -> Result<f64> {
        let mut memory = MemoryUsage::default();
        self.roots.iter().for_each(|pid| memory.add(*pid));
        Ok(memory.rss)
    }

    /// Whether all supervisors have exited.
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

    /// Reaps exited children, so that their CPU time is added to this process.
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

/// A failed measurement must not leave pods running.
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

/// The fields of `stat` after the process name, which may contain any character.
fn fields(pid: u32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(text.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

fn number(fields: &[String], at: usize) -> f64 {
    fields.get(at).and_then(|field| field.parse().ok()).unwrap_or(0.0)
}
