//! The kernel, as far as containers need it: processes in namespaces, mounts, cgroups, seccomp, network links.
//!
//! What `rustix` has is used from there directly; here is what it lacks, behind functions that cannot be misused,
//! and the kernel interfaces that are files or sockets rather than calls. The only crate with unsafe code. Knows
//! nothing of pods, images or configuration. Read [`process::fork`] and [`cgroup::Cgroups`].

pub mod bpf;
pub mod cgroup;
pub mod fds;
pub mod memory;
pub mod mounts;
pub mod netlink;
pub mod process;
pub mod seccomp;
