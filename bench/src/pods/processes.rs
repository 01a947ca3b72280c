//! What the processes behind pods use: those that were started here, and those that hold pods and belong to nobody.
//!
//! This process becomes the parent of whatever loses its own, so that the CPU time of those that have ended is added to
//! its children's.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};

/// The argument by which a pod's own program is told from what holds the pod.
pub const WORK: &str = "987654";

/// The processes of one runtime.
pub struct Processes {
    /// What each process that holds a pod has in its command line, besides the directory.
    word: &'static str,
    dir: PathBuf,
    /// Those that serve all pods.
    roots: Vec<u32>,
}

/// In megabytes.
#[derive(Debug, Default)]
pub struct Memory {
    pub resident: f64,
    /// Shared pages divided by those who share them.
    pub proportional: f64,
    pub private: f64,
}

impl Processes {
    pub fn of(word: &'static str, dir: &Path, roots: Vec<u32>) -> Processes {
        // Where it is not allowed only the account of CPU time misses something.
        let _ = set_child_subreaper(Some(getpid()));
        Processes { word, dir: dir.to_owned(), roots }
    }

    /// Seconds of CPU used so far: by what serves all pods, by what holds one, and by all that has ended.
    pub fn cpu(&self) -> Result<f64> {
        self.bury();
        let living = self.roots.iter().copied().chain(self.holders());
        let mut ticks = 0.0;
        for pid in living {
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
    pub fn memory(&self) -> Result<Memory> {
        let holders = self.holders();
        let mut memory = Memory::default();
        for pid in processes() {
            let belongs =
                holders.contains(&pid) || parent(pid).is_some_and(|parent| holders.contains(&parent));
            if belongs && !command(pid).contains(WORK) {
                memory.add(pid);
            }
        }
        Ok(memory)
    }

    /// What those use that serve all pods, in megabytes.
    pub fn roots_resident(&self) -> Result<f64> {
        let mut memory = Memory::default();
        self.roots.iter().for_each(|pid| memory.add(*pid));
        Ok(memory.resident)
    }

    /// Whether nobody holds a pod any more.
    pub fn are_gone(&self) -> bool {
        self.bury();
        self.holders().is_empty()
    }

    fn holders(&self) -> Vec<u32> {
        let dir = self.dir.display().to_string();
        let holds = |pid: &u32| {
            let command = command(*pid);
            command.contains(self.word) && command.contains(&dir)
        };
        processes().filter(|pid| !self.roots.contains(pid)).filter(holds).collect()
    }

    /// Waits for those that have ended and whose parent this process has become.
    fn bury(&self) {
        let own = std::process::id();
        for pid in processes().filter(|pid| !self.roots.contains(pid) && parent(*pid) == Some(own)) {
            let is_dead = fields(pid).is_some_and(|fields| fields.first().is_some_and(|state| state == "Z"));
            if let Some(pid) = id(pid).filter(|_| is_dead) {
                let _ = waitpid(Some(pid), WaitOptions::NOHANG);
            }
        }
    }
}

/// A measurement that failed must not leave pods behind.
impl Drop for Processes {
    fn drop(&mut self) {
        for pid in self.holders().into_iter().filter_map(id) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

impl Memory {
    fn add(&mut self, pid: u32) {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let of = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
            kib.unwrap_or(0.0) * 1024.0 / 1e6
        };
        self.resident += of("Rss");
        self.proportional += of("Pss");
        self.private += of("Private_Clean") + of("Private_Dirty");
    }
}

fn id(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn command(pid: u32) -> String {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&words).replace('\0', " ")
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
