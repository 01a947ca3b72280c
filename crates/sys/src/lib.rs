//! The kernel, as far as containers need it: processes in namespaces, mounts, cgroups, seccomp, network links.
//!
//! What `rustix` has is used from there directly; here is what it lacks, behind functions that cannot be misused,
//! and the kernel interfaces that are files or sockets rather than calls. The only crate with unsafe code. Knows
//! nothing of pods, images or configuration. Read [`process::fork`] and [`cgroup::Cgroups`].

pub mod allocator;
pub mod bpf;
pub mod cgroup;
pub mod fds;
pub mod memory;
pub mod mounts;
pub mod netlink;
pub mod process;
pub mod removal_watcher;
pub mod seccomp;
pub mod trees;

/// The lines of one of the kernel's files, one after the other: some are long, and who reads them may want to stay small.
fn lines(path: &str) -> std::io::Result<impl Iterator<Item = String>> {
    use std::io::BufRead as _;
    let file = std::io::BufReader::with_capacity(1 << 10, std::fs::File::open(path)?);
    Ok(file.lines().map_while(Result::ok))
}
