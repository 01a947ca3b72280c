//! User namespaces of pods: root in the pod is an unprivileged user on the host.
//!
//! The supervisor itself stays root on the host. It holds the pod's user namespace, and each process
//! enters it once everything that needs root on the host is done: mounts and cgroups. The namespaces
//! that the pod shares (network and so on) belong to the user namespace from the start, so that root in
//! the pod may configure them.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::thread::{LinkNameSpaceType, ThreadNameSpaceType, UnshareFlags};
use sys::process::CloneOptions;

use super::Failure;
use super::launch::plain_message;
use super::spawn;
use crate::embedded::spec::{IdRange, UserMap};

/// The user namespace of a pod.
pub struct PodUsers {
    namespace: OwnedFd,
    map: UserMap,
}

impl PodUsers {
    /// Creates the user namespace and the other namespaces that belong to it, and moves this process
    /// into those others.
    pub fn create(map: &UserMap, unshare_flags: UnshareFlags) -> Result<PodUsers, Failure> {
        fn failed<E: Into<io::Error>>(error: E) -> Failure {
            Failure::during("create the pod's user namespace")(error)
        }
        if map.uid(0).is_none_or(|uid| uid == 0) || map.gid(0).is_none_or(|gid| gid == 0) {
            return Err(Failure("root of the pod must not be mapped to root of the host".to_owned()));
        }
        let (local, remote) = UnixStream::pair().map_err(failed)?;
        let mut local = Some(local);
        let child = sys::process::fork(CloneOptions { user: true, ..CloneOptions::default() }, || {
            // Its copy of the other end would keep it from noticing the supervisor's exit.
            drop(local.take());
            let step = || -> io::Result<()> {
                let mut byte = [0];
                (&remote).read_exact(&mut byte)?;
                become_root()?;
                sys::process::unshare(unshare_flags)?;
                (&remote).write_all(&byte)
            };
            // Waits until the namespaces are opened and the other end is closed.
            let _ = step().and_then(|()| (&remote).read(&mut [0]));
            1
        })
        .map_err(failed)?;
        drop(remote);
        let setup = || -> io::Result<OwnedFd> {
            let proc_dir = format!("/proc/{}", child.pid());
            std::fs::write(format!("{proc_dir}/uid_map"), id_map_lines(&map.uids))?;
            std::fs::write(format!("{proc_dir}/gid_map"), id_map_lines(&map.gids))?;
            let mut local = local.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
            local.write_all(b"x")?;
            local.read_exact(&mut [0])?;
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let namespace = rustix::fs::open(format!("{proc_dir}/ns/user"), flags, Mode::empty())?;
            let mut into = ThreadNameSpaceType::empty();
            into.set(ThreadNameSpaceType::NETWORK, unshare_flags.contains(UnshareFlags::NEWNET));
            into.set(
                ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION,
                unshare_flags.contains(UnshareFlags::NEWIPC),
            );
            into.set(
                ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME,
                unshare_flags.contains(UnshareFlags::NEWUTS),
            );
            if !into.is_empty() {
                rustix::thread::move_into_thread_name_spaces(child.as_fd(), into)?;
            }
            Ok(namespace)
        };
        let namespace = setup();
        // The user namespace is kept by its descriptor, the others by this process.
        let _ = child.signal(9);
        let _ = child.wait();
        Ok(PodUsers { namespace: namespace.map_err(failed)?, map: map.clone() })
    }

    /// Moves this process into the user namespace, as root. It cannot return.
    pub fn enter(&self) -> Result<(), Failure> {
        fn failed<E: Into<io::Error>>(error: E) -> Failure {
            Failure::during("enter the pod's user namespace")(error)
        }
        rustix::thread::move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::User))
            .map_err(failed)?;
        become_root().map_err(failed)
    }

    /// Runs `body` as root of the pod, in a child process.
    pub fn run_as_root(&self, body: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        spawn::run_in_child(|| self.enter().and_then(|()| body()))
    }

    /// Applies the ID mappings to a detached mount tree.
    pub fn map(&self, tree: impl AsFd, source: &std::path::Path) -> Result<(), Failure> {
        // If a nested mount does not support that, map only the outermost. The files of the nested ones
        // then have the overflow owner.
        let done = sys::mounts::map_owners(&tree, &self.namespace, true)
            .or_else(|_| sys::mounts::map_owners(&tree, &self.namespace, false));
        done.map_err(|error| {
            let source = source.display();
            let hint = "(maybe the filesystem used doesn't support idmap mounts on this kernel?)";
            Failure(format!("failed to set MOUNT_ATTR_IDMAP on {source}: {} {hint}", plain_message(&error)))
        })
    }

    /// The host IDs of the pod's root.
    pub fn root(&self) -> (Uid, Gid) {
        self.outside(0, 0)
    }

    /// The host IDs of a user of the pod; those of root for IDs without a mapping.
    pub fn outside(&self, uid: u32, gid: u32) -> (Uid, Gid) {
        let uid = self.map.uid(uid).or(self.map.uid(0)).expect("the mapping includes root");
        let gid = self.map.gid(gid).or(self.map.gid(0)).expect("the mapping includes root");
        (Uid::from_raw(uid), Gid::from_raw(gid))
    }

    /// Changes the owner of a stream to the pod's root, which may pass it on. Device nodes are shared
    /// and keep their owner.
    pub fn set_owner(&self, stream: impl AsFd) {
        let is_device = rustix::fs::fstat(&stream).is_ok_and(|found| found.st_rdev != 0);
        if !is_device {
            let (uid, gid) = self.root();
            let _ = rustix::fs::fchown(stream, Some(uid), Some(gid));
        }
    }
}

/// A process that has just entered a user namespace has the overflow IDs.
fn become_root() -> io::Result<()> {
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    Ok(())
}

fn id_map_lines(ranges: &[IdRange]) -> String {
    ranges.iter().map(|range| format!("{} {} {}\n", range.inside, range.outside, range.length)).collect()
}
