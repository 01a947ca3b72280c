//! Releases the pages of a process's own executable.
//!
//! A program that is set up needs few of its pages while it waits. File pages are shared by all
//! processes that run the program and stay in the page cache; only the mapping in this process is
//! released.

use std::ffi::c_void;
use std::io;

/// The unmodified read-only file mappings of this process.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FileMappings {
    /// Start address and length.
    mappings: Vec<(usize, usize)>,
}

impl FileMappings {
    /// Reads the mappings. To be called once the program is set up: they do not change after that, since
    /// they are not writable.
    pub fn of_process() -> io::Result<FileMappings> {
        Ok(FileMappings { mappings: parse(crate::lines("/proc/self/smaps")?) })
    }

    /// Releases their pages, and free heap memory. A page is mapped again when it is needed.
    pub fn release_pages(&self) {
        trim_heap();
        for (start, length) in &self.mappings {
            // SAFETY: the range is a file mapping that is not writable and has no modified pages, so a
            // released page is the same when the kernel maps it again. The list is private to this
            // module and comes from the kernel. Ranges that were unmapped since then are rejected with
            // an error.
            let _ = unsafe { libc::madvise(*start as *mut c_void, *length, libc::MADV_DONTNEED) };
        }
    }
}

/// Returns free memory to the kernel that the C library keeps for later allocations.
fn trim_heap() {
    // SAFETY: it touches only free memory.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Private file mappings that are readable, not writable and unmodified.
fn parse(smaps: impl Iterator<Item = String>) -> Vec<(usize, usize)> {
    let mut parts = Vec::new();
    let mut current = None;
    for line in smaps {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [range, access, _, _, inode, _, ..] if range.contains('-') => {
                current = None;
                let is_file = inode != "0" && access.starts_with('r') && !access.contains('w');
                if let (true, true, Some((start, end))) =
                    (is_file, access.ends_with('p'), range.split_once('-'))
                {
                    let number = |text: &str| usize::from_str_radix(text, 16).ok();
                    current = number(start).zip(number(end)).filter(|(start, end)| start < end);
                }
            }
            ["Anonymous:", "0", "kB"] => {
                parts.extend(current.take().map(|(start, end)| (start, end - start)));
            }
            ["Anonymous:", ..] => current = None,
            _ => {}
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_only_clean_file_mappings() {
        let smaps = "\
            1000-3000 r-xp 00000000 fe:00 77 /bin/program\nRss: 8 kB\nAnonymous:             0 kB\nVmFlags: rd ex\n\
            3000-4000 r--p 00002000 fe:00 77 /bin/program\nAnonymous:             4 kB\n\
            4000-5000 rw-p 00003000 fe:00 77 /bin/program\nAnonymous:             0 kB\n\
            5000-6000 r--s 00000000 fe:00 78 /tmp/shared file\nAnonymous:             0 kB\n\
            6000-7000 r--p 00000000 00:00 0\nAnonymous:             0 kB\n\
            7000-8000 r--p 00000000 00:00 0 [vvar]\nAnonymous:             0 kB\n\
            8000-9000 ---p 00000000 fe:00 77 /bin/program\nAnonymous:             0 kB\n\
            9000-b000 r--p 00000000 fe:00 77 /a file (deleted)\nAnonymous:             0 kB\n";
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>().into_iter();
        assert_eq!(parse(lines(smaps)), [(0x1000, 0x2000), (0x9000, 0x2000)]);
        assert_eq!(parse(lines("nonsense\n1-0 r-xp 0 0 1 x\nAnonymous: 0 kB\n")), []);
    }

    #[test]
    fn drops_pages_of_the_program_file() {
        let rss_kib = || {
            let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
            let line =
                text.lines().find_map(|line| line.strip_prefix("Rss:")).map(str::trim).unwrap_or_default();
            line.trim_end_matches(" kB").parse::<usize>().unwrap_or_default()
        };
        let program = FileMappings::of_process().expect("what the kernel says");
        let before = rss_kib();
        program.release_pages();
        let after = rss_kib();
        assert!(before == 0 || after < before, "{before} {after}");
        assert_eq!(
            FileMappings::of_process().expect("what the kernel says").mappings.len(),
            program.mappings.len()
        );
    }
}
