//! The threads of a process that stays.

use std::time::Duration;

use tokio::runtime::Builder;

/// How long a thread for what takes a while waits for the next such thing. Shorter than between two looks at the disk, or
/// one of them would stay for ever, with all the memory that it had when it was busy.
const BLOCKING_THREAD_KEEP_ALIVE: Duration = Duration::from_secs(2);

/// As many as there are processors. When there is nothing to do they give back the memory that a busy time took.
pub fn runtime_builder() -> Builder {
    let mut threads = Builder::new_multi_thread();
    threads
        .enable_all()
        .on_thread_park(sys::allocator::collect)
        .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE);
    threads
}
