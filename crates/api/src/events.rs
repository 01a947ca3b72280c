//! The kinds of the events group.

pub mod event;
