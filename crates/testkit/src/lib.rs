//! A real server for tests: the built `skiff` in a directory and on a port of its own, spoken to by the real
//! kubectl or by plain HTTPS, killed and restarted at will.
//!
//! Knows the program by its flags, its kubeconfig and its API, never by its crates. Nothing here sleeps: each
//! wait ends when the child says something or exits, and has a deadline. What fails panics with the server's
//! log, since only tests call this. Read [`Server`] first.

mod cleanup;
mod containerd;
mod diff;
mod http;
pub mod kubeconfig;
mod network;
mod pods;
mod process;
mod server;
mod terminal;
mod webhook;

pub use cleanup::{cgroups_of_node, cgroups_of_pod, cleanup_node, processes, remaining_state, remove_cgroup};
pub use containerd::{Containerd, busybox_image};
pub use diff::{assert_same, diff_values};
pub use http::{Http, Lines, Reply};
pub use network::Network;
pub use pods::{BackgroundCommand, can_run_pods};
pub use process::Process;
pub use server::{NO_EVICTION_FLAGS, Output, Server, binary, has_kubectl};
pub use terminal::Terminal;
pub use webhook::{Webhook, WebhookRequest};
