//! A real server for tests: the built `skiff` in a directory and on a port of its own, spoken to by the real
//! kubectl or by plain HTTPS, killed and restarted at will.
//!
//! Knows the program by its flags, its kubeconfig and its API, never by its crates. Nothing here sleeps: each
//! wait ends when the child says something or exits, and has a deadline. What fails panics with the server's
//! log, since only tests call this. Read [`Server`] first.

mod containerd;
mod diff;
mod http;
pub mod kubeconfig;
mod left;
mod network;
mod pods;
mod process;
mod server;
mod terminal;
mod webhook;

pub use containerd::{Containerd, busybox_image};
pub use diff::{assert_same, differences};
pub use http::{Http, Lines, Reply};
pub use left::{cgroups_of_node, cgroups_of_pod, left, processes, remove_cgroup, sweep};
pub use network::Network;
pub use pods::{Background, can_have_pods};
pub use process::Process;
pub use server::{Output, ROOM, Server, binary, has_kubectl};
pub use terminal::Terminal;
pub use webhook::{Asked, Webhook};
