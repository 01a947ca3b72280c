//! A pod whose users are others outside: root in there is nobody on the host.
//!
//! The supervisor itself stays the host's root. It holds the pod's user namespace, and each process moves into it once
//! everything that needs the host's root is done: files are mounted, groups are joined. What the pod shares (its network
//! and so on) belongs to the namespace from the beginning, so that root in there may change it.

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

/// A pod's users.
pub struct PodUsers {
    namespace: OwnedFd,
    map: UserMap,
}

impl PodUsers {
    /// Makes the namespace, others that belong to it, and moves this process into those others.
    pub fn create(map: &UserMap, unshare_flags: UnshareFlags) -> Result<PodUsers, Failure> {
        fn failed<E: Into<io::Error>>(error: E) -> Failure {
            Failure::during("make the pod's user namespace")(error)
        }
        if map.uid(0).is_none_or(|uid| uid == 0) || map.gid(0).is_none_or(|gid| gid == 0) {
            return Err(Failure("root of the pod must be mapped to somebody else outside".to_owned()));
        }
        let (local, remote) = UnixStream::pair().map_err(failed)?;
        let mut local = Some(local);
        let child = sys::process::fork(CloneOptions { user: true, ..CloneOptions::default() }, || {
            // The copy of the other end that came along would keep it waiting for itself.
            drop(local.take());
            let step = || -> io::Result<()> {
                let mut byte = [0];
                (&remote).read_exact(&mut byte)?;
                become_root()?;
                sys::process::unshare(unshare_flags)?;
                (&remote).write_all(&byte)
            };
            // Waits to be looked at, and then for the other end to go.
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
        let _ = child.signal(9);
        let _ = child.wait();
        Ok(PodUsers { namespace: namespace.map_err(failed)?, map: map.clone() })
    }

    /// Moves this process in, where it is root. There is no way back.
    pub fn enter(&self) -> Result<(), Failure> {
        fn failed<E: Into<io::Error>>(error: E) -> Failure {
            Failure::during("enter the pod's user namespace")(error)
        }
        rustix::thread::move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::User))
            .map_err(failed)?;
        become_root().map_err(failed)
    }

    /// Does something as root of the pod, in a process of its own.
    pub fn run_as_root(&self, body: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        spawn::run_in_child(|| self.enter().and_then(|()| body()))
    }

    /// Shows a tree that is not mounted yet with the owners it has inside.
    pub fn map(&self, tree: impl AsFd, source: &std::path::Path) -> Result<(), Failure> {
        // What is mounted below and cannot be shown so belongs to nobody then.
        let done = sys::mounts::map_owners(&tree, &self.namespace, true)
            .or_else(|_| sys::mounts::map_owners(&tree, &self.namespace, false));
        done.map_err(|error| {
            let source = source.display();
            let hint = "(maybe the filesystem used doesn't support idmap mounts on this kernel?)";
            Failure(format!("failed to set MOUNT_ATTR_IDMAP on {source}: {} {hint}", plain_message(&error)))
        })
    }

    /// Whom root of the pod is outside.
    pub fn root(&self) -> (Uid, Gid) {
        self.outside(0, 0)
    }

    /// Whom somebody of the pod is outside; root for those it does not know.
    pub fn outside(&self, uid: u32, gid: u32) -> (Uid, Gid) {
        let uid = self.map.uid(uid).or(self.map.uid(0)).expect("made with a root");
        let gid = self.map.gid(gid).or(self.map.gid(0)).expect("made with a root");
        (Uid::from_raw(uid), Gid::from_raw(gid))
    }

    /// Gives a stream to the pod's root, who may hand it on. Devices that all share stay as they are.
    pub fn set_owner(&self, stream: impl AsFd) {
        let is_device = rustix::fs::fstat(&stream).is_ok_and(|found| found.st_rdev != 0);
        if !is_device {
            let (uid, gid) = self.root();
            let _ = rustix::fs::fchown(stream, Some(uid), Some(gid));
        }
    }
}

/// Right after coming into a namespace one is nobody there.
fn become_root() -> io::Result<()> {
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    Ok(())
}

fn id_map_lines(ranges: &[IdRange]) -> String {
    ranges.iter().map(|range| format!("{} {} {}\n", range.inside, range.outside, range.length)).collect()
}
