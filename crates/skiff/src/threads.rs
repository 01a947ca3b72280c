//! The threads of a process that stays.

use tokio::runtime::Builder;

/// As many as there are processors. When there is nothing to do they give back the memory that a busy time took.
pub fn threads() -> Builder {
    let mut threads = Builder::new_multi_thread();
    threads.enable_all().on_thread_park(sys::allocator::rest);
    threads
}
