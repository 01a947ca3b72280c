//! The embedded runtime against the real kernel: pods that live and die, and what is left of them.
//!
//! Needs root and busybox; says so and passes where these are missing. All of it is in a network of its own. A program
//! without the usual harness, since a pod is supervised by the program that runs it: this one.

#[path = "embedded/breakout.rs"]
mod breakout;
#[path = "embedded/kit.rs"]
mod kit;
#[path = "embedded/life.rs"]
mod life;

use std::path::Path;
use std::process::ExitCode;

use rustix::thread::UnshareFlags;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, word, directory] = &arguments[..]
        && word == "supervise"
    {
        return runtime::embedded::supervise(Path::new(directory));
    }
    // What a test runner asks of any test program.
    if arguments.iter().any(|argument| argument == "--list") {
        if !arguments.iter().any(|argument| argument == "--ignored") {
            println!("embedded: test");
        }
        return ExitCode::SUCCESS;
    }
    let apart = UnshareFlags::NEWNET | UnshareFlags::NEWNS;
    if !Path::new("/bin/busybox").exists() || sys::process::unshare(apart).is_err() {
        eprintln!("skipped: needs root and busybox-static");
        return ExitCode::SUCCESS;
    }
    let mut own = sys::netlink::Netlink::open().expect("a network");
    podnet::loopback(&mut own).expect("a loopback");
    drop(own);
    let executor = tokio::runtime::Runtime::new().expect("an executor");
    let only =
        arguments.iter().skip(1).find(|argument| !argument.starts_with('-') && *argument != "embedded");
    executor.block_on(kit::run(only.map(String::as_str)));
    ExitCode::SUCCESS
}
