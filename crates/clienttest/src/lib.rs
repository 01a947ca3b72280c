//! Contains no code. This crate exists for the tests that use the `kube` crate: its dependencies
//! take minutes to compile, and here no other test has to wait for them. See `tests/kube.rs`.
