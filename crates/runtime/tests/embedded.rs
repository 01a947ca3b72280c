//! The embedded runtime against the real kernel: the lifecycle of pods, and what remains of them.
//!
//! Needs root and busybox; without them the tests are skipped. Everything runs in a network namespace
//! of its own. The program has its own test harness, because it also is the supervisor of the pods,
//! unless `SKIFF_BIN` names a skiff binary.

#[path = "embedded/breakout.rs"]
mod breakout;
#[path = "embedded/churn.rs"]
mod churn;
#[path = "embedded/containerd.rs"]
mod containerd;
#[path = "embedded/hooks.rs"]
mod hooks;
#[path = "embedded/image.rs"]
mod image;
#[path = "embedded/image_volumes.rs"]
mod image_volumes;
#[path = "embedded/kit.rs"]
mod kit;
#[path = "embedded/life.rs"]
mod life;
#[path = "embedded/machines.rs"]
mod machines;
#[path = "embedded/network.rs"]
mod network;
#[path = "embedded/socket.rs"]
mod socket;
#[path = "embedded/users.rs"]
mod users;
#[path = "embedded/volumes.rs"]
mod volumes;

use std::path::Path;
use std::process::ExitCode;

use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, word, directory] = &arguments[..]
        && word == "supervise"
    {
        return runtime::embedded::supervise(Path::new(directory));
    }
    if let [_, word, directory, count, seed, parent] = &arguments[..]
        && word == "churn"
    {
        let executor = tokio::runtime::Runtime::new().expect("an executor");
        let (count, seed) = (count.parse().expect("a number"), seed.parse().expect("a number"));
        let group = format!("skiff-test-{parent}");
        executor.block_on(churn::run_worker(Path::new(directory), count, seed, &group));
        return ExitCode::SUCCESS;
    }
    // The arguments that test runners pass to every test program.
    if arguments.iter().any(|argument| argument == "--list") {
        if !arguments.iter().any(|argument| argument == "--ignored") {
            println!("embedded: test\nunified: test");
        }
        return ExitCode::SUCCESS;
    }
    let named = |name: &str| arguments.iter().any(|argument| argument == name);
    let unshare_flags = UnshareFlags::NEWNET | UnshareFlags::NEWNS;
    if !Path::new("/bin/busybox").exists() || sys::process::unshare(unshare_flags).is_err() {
        eprintln!("skipped: needs root and busybox-static");
        return ExitCode::SUCCESS;
    }
    // Mounts of other namespaces must not propagate here.
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).expect("mounts of its own");
    if named("unified") && !only_unified() {
        eprintln!("skipped: needs cgroup v2");
        return ExitCode::SUCCESS;
    }
    let mut own = sys::netlink::Netlink::open().expect("a network");
    podnet::loopback(&mut own).expect("a loopback");
    drop(own);
    let executor = tokio::runtime::Runtime::new().expect("an executor");
    let is_mode = |argument: &str| argument.starts_with('-') || ["embedded", "unified"].contains(&argument);
    let only = arguments.iter().skip(1).find(|argument| !is_mode(argument));
    executor.block_on(kit::run(only.map(String::as_str), named("unified")));
    ExitCode::SUCCESS
}

/// Unmounts the v1 hierarchies, so that only cgroup v2 is left. On a v1 host, cgroup2 is usually
/// mounted without controllers.
fn only_unified() -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for line in mounts.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        if words.get(2) == Some(&"cgroup") {
            rustix::mount::unmount(words[1], UnmountFlags::DETACH).expect("unmounted");
        }
    }
    sys::cgroup::Cgroups::of_host().is_ok_and(|groups| groups.is_v2())
}
