//! The kinds of the batch group.

pub mod cron_job;
pub mod job;
