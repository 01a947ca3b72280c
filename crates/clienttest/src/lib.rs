//! Nothing but a home for the test that drives a server with the `kube` crate: its dependencies take minutes
//! to compile, and here no other test waits for them. Read `tests/kube.rs`.
