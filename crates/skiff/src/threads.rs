//! The async runtime of long-running processes.

use std::time::Duration;

use tokio::runtime::Builder;

/// How long an idle blocking thread is kept. It is shorter than the interval of the disk checks:
/// otherwise a thread would stay forever, with all memory of its last burst.
const BLOCKING_THREAD_KEEP_ALIVE: Duration = Duration::from_secs(2);

/// A multi-threaded runtime with one worker per CPU. Idle workers return unused memory to the system.
pub fn runtime_builder() -> Builder {
    let mut threads = Builder::new_multi_thread();
    threads
        .enable_all()
        .on_thread_park(sys::allocator::collect)
        .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE);
    threads
}
