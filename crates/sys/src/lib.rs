//! Kernel interfaces that containers need: processes in namespaces, mounts, cgroups, seccomp, BPF and
//! network links.
//!
//! What `rustix` has is used from there directly. This crate adds what it lacks, behind functions that
//! cannot be misused, and the kernel interfaces that are files or sockets instead of syscalls. It is
//! the only crate with unsafe code, and must not know pods, images or configuration. Start reading at
//! [`process::fork`] and [`cgroup::Cgroups`].

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

/// The lines of a file in procfs, one at a time: some files are long, and callers may have to keep
/// their memory small.
fn lines(path: &str) -> std::io::Result<impl Iterator<Item = String>> {
    use std::io::BufRead as _;
    let file = std::io::BufReader::with_capacity(1 << 10, std::fs::File::open(path)?);
    Ok(file.lines().map_while(Result::ok))
}
