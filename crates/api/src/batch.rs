//! The kinds of the `batch` group.

pub mod cron_job;
pub mod job;
pub mod schedule;

#[cfg(test)]
mod tests;
