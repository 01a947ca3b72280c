//! A real server for tests: the built `skiff` with its own directory and port, accessed by the real
//! kubectl or by plain HTTPS, killed and restarted as needed.
//!
//! It knows skiff only by its flags, its kubeconfig and its API, never by its crates. Waits have a
//! deadline and end when the child produces output or exits. Failures panic with the server's log,
//! because only tests call this crate. Start at [`Server`].

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
