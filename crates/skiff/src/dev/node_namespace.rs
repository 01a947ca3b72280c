//! The first stage of each node process of `skiff dev`: creates a network namespace and sets the host
//! name, receives the node's address, configures the network, and then executes the actual skiff
//! command.

use std::ffi::OsStr;
use std::io::{BufRead as _, Write as _};
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use rustix::process::Signal;
use rustix::thread::UnshareFlags;
use sys::netlink::Netlink;

/// `skiff inside NAME ARGS`: runs `skiff ARGS` with this host name in a network namespace of its own.
/// Returns only on failure.
pub fn run_in_namespace() -> ExitCode {
    let name = std::env::args_os().nth(2).unwrap_or_default();
    match enter_namespace(&name) {
        Ok(()) => {
            let args = std::env::args_os().skip(3);
            let error = std::process::Command::new("/proc/self/exe").args(args).exec();
            eprintln!("skiff: cannot execute /proc/self/exe: {error}");
        }
        Err(error) => eprintln!("skiff: cannot set up the node namespace: {error}"),
    }
    ExitCode::FAILURE
}

fn enter_namespace(name: &OsStr) -> std::io::Result<()> {
    // The `skiff dev` process stops the nodes. If it dies, the nodes must not be left running.
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
    sys::process::unshare(UnshareFlags::NEWNET | UnshareFlags::NEWUTS)?;
    // Sets the host name of the node and of pods with `hostNetwork`.
    rustix::system::sethostname(name.as_bytes())?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "ready")?;
    stdout.flush()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let invalid = || std::io::Error::other("no valid node address on stdin");
    let mut fields = line.split_whitespace();
    let (Some(address), Some(prefix), Some(gateway)) = (fields.next(), fields.next(), fields.next()) else {
        return Err(invalid());
    };
    let address: IpAddr = address.parse().map_err(|_| invalid())?;
    let gateway: IpAddr = gateway.parse().map_err(|_| invalid())?;
    let prefix: u8 = prefix.parse().map_err(|_| invalid())?;
    let mut netlink = Netlink::open()?;
    for name in ["lo", super::network::NODE_LINK] {
        let link = netlink.link(name)?.ok_or_else(invalid)?;
        if name != "lo" {
            netlink.add_address(link.index, address, prefix)?;
        }
        netlink.set_up(link.index)?;
        if name != "lo" {
            netlink.add_default_route(link.index, gateway)?;
        }
    }
    Ok(())
}
