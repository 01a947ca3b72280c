//! The skiff binary: parses flags, starts the components of a command, and runs until it receives
//! SIGTERM or SIGINT.

// Before the other modules, which use its macros.
#[macro_use]
mod output;

mod address;
mod agent;
mod apiserver_args;
mod bootstrap;
mod certificates;
mod check;
mod cluster_info;
mod config;
mod containerd;
mod dev;
mod flags;
mod host_state;
mod image;
mod init_system;
mod join;
mod join_server;
mod kubeconfig;
mod kubelet_command;
mod kubelet_config;
mod node;
mod node_dns;
mod pod_access;
mod reset;
mod roles;
mod running;
mod secure_serving;
mod server;
mod services;
mod stop;
mod threads;
mod tokens;
mod tunnel;
mod version;

use std::process::ExitCode;

use clap::Parser as _;
use tracing_subscriber::prelude::*;

use flags::{Command, Flags};

/// Objects are trees of small allocations. See docs/adr/0005 for the measurements.
#[global_allocator]
static ALLOCATOR: sys::allocator::Allocator = sys::allocator::Allocator;

fn main() -> ExitCode {
    // This comes first: each pod has one such process, and it must stay small.
    let mut words = std::env::args_os().skip(1);
    if let (Some(word), Some(directory), None) = (words.next(), words.next(), words.next())
        && word == "supervise"
    {
        return runtime::embedded::supervise(directory.as_ref());
    }
    if std::env::args_os().nth(1).is_some_and(|word| word == "inside") {
        return dev::run_in_namespace();
    }
    command()
}

/// All other commands. Not inlined, so that the stack frame of the supervisor does not include the
/// space for it.
#[inline(never)]
fn command() -> ExitCode {
    let arguments = match config::expand_config_file(std::env::args().collect()) {
        Ok(arguments) => arguments,
        Err(error) => return fail(&error),
    };
    let flags = Flags::parse_from(arguments);
    sys::process::raise_nofile_limit();
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    tracing_subscriber::registry().with(log.with_filter(flags.log)).init();
    let result = match flags.command {
        Command::Server(flags) => server::run(*flags),
        Command::Agent(flags) => agent::run(*flags),
        Command::Kubelet(flags) => kubelet_command::run(*flags),
        Command::ControllerManager(flags) => roles::controller_manager(&flags),
        Command::Scheduler(flags) => roles::scheduler(&flags),
        Command::Proxy(flags) => roles::proxy(&flags),
        Command::Runtime(flags) => node::run_runtime(&flags),
        Command::Simulate(flags) => roles::simulate(&flags),
        Command::Check => check::run(),
        Command::Image(flags) => image::run(&flags),
        Command::Dev(flags) => dev::run(flags),
        Command::Token(flags) => tokens::run(&flags),
        Command::Stop(flags) => stop::run(&flags),
        Command::Reset(flags) => reset::run(&flags),
        Command::Backup(flags) => server::backup(&flags),
        Command::Restore(flags) => server::restore(&flags),
        Command::Version(flags) => version::run(&flags),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("skiff: {error:#}");
    ExitCode::FAILURE
}
