//! The memory allocator of a process.
//!
//! Servers use mimalloc (docs/adr/0005), which keeps a region for each object size: fast, but 300 kB
//! before the first object. The supervisor of a pod holds next to nothing and there is one for every
//! pod, so it uses the C library's allocator, which keeps all sizes together. A process selects its
//! allocator before the first allocation and never changes it, since memory must be freed by the
//! allocator it came from.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mimalloc::MiMalloc;

/// The environment variable that selects the C library's allocator, whatever its value.
pub const SMALL_ALLOCATOR_ENV: &CStr = c"SKIFF_SMALL";

/// The minimum interval between two collections of a thread.
const COLLECT_INTERVAL: Duration = Duration::from_secs(30);

/// To be used as the global allocator of a program.
pub struct Allocator;

const UNINITIALIZED: u8 = 0;
const MIMALLOC: u8 = 1;
const SYSTEM_MALLOC: u8 = 2;

static SELECTED: AtomicU8 = AtomicU8::new(UNINITIALIZED);

#[inline]
fn uses_mimalloc() -> bool {
    match SELECTED.load(Relaxed) {
        UNINITIALIZED => select_allocator(),
        selected => selected == MIMALLOC,
    }
}

#[cold]
fn select_allocator() -> bool {
    // SAFETY: the name is NUL-terminated. The first allocation happens before `main`, in the only
    // thread, so nothing changes the environment at the same time. Only the presence of the variable is
    // checked.
    let use_system_malloc = unsafe { !libc::getenv(SMALL_ALLOCATOR_ENV.as_ptr()).is_null() };
    SELECTED.store(if use_system_malloc { SYSTEM_MALLOC } else { MIMALLOC }, Relaxed);
    !use_system_malloc
}

unsafe extern "C" {
    /// Exported by mimalloc, but not by its crate.
    fn mi_collect(force: bool);
}

thread_local! {
    static LAST_COLLECT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Called by a thread that is about to sleep. Reclaims memory of this thread that other threads have
/// freed, and returns free memory to the kernel. mimalloc does both only during allocations, and an
/// idle thread makes none.
pub fn collect() {
    let now = Instant::now();
    let recently_collected =
        LAST_COLLECT.get().is_some_and(|then| now.saturating_duration_since(then) < COLLECT_INTERVAL);
    if recently_collected || !uses_mimalloc() {
        return;
    }
    LAST_COLLECT.set(Some(now));
    // SAFETY: it touches only memory that this thread keeps free and memory without an owner.
    unsafe { mi_collect(true) }
}

// SAFETY: both allocators uphold the contract of the trait. The selection never changes, so memory
// always returns to the allocator it came from.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract, for the selected allocator.
        unsafe { if uses_mimalloc() { MiMalloc.alloc(layout) } else { System.alloc(layout) } }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract, for the selected allocator.
        unsafe { if uses_mimalloc() { MiMalloc.alloc_zeroed(layout) } else { System.alloc_zeroed(layout) } }
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the memory is from the selected allocator, which never changes.
        unsafe {
            if uses_mimalloc() { MiMalloc.dealloc(memory, layout) } else { System.dealloc(memory, layout) }
        }
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the memory is from the selected allocator, which never changes.
        unsafe {
            if uses_mimalloc() {
                MiMalloc.realloc(memory, layout, size)
            } else {
                System.realloc(memory, layout, size)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// In kB.
    fn rss_kib() -> usize {
        let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).map(str::trim).unwrap_or_default();
        line.trim_end_matches(" kB").parse().unwrap_or_default()
    }

    unsafe extern "C" {
        fn mi_arena_min_alignment() -> usize;
    }

    /// Set in `.cargo/config.toml`, which an environment with its own CFLAGS overrides.
    #[test]
    fn mimalloc_slices_are_small() {
        if std::env::var("CFLAGS").is_ok_and(|flags| !flags.contains("MI_ARENA_SLICE_SHIFT")) {
            return eprintln!("skipped: CFLAGS is set");
        }
        // SAFETY: it returns a constant.
        assert_eq!(unsafe { mi_arena_min_alignment() }, 16 << 10);
    }

    #[test]
    fn collect_returns_memory_of_other_threads() {
        let layout = Layout::from_size_align(1 << 10, 8).expect("a layout");
        let (blocks, released) = (mpsc::channel(), mpsc::channel());
        let owner = std::thread::spawn(move || {
            for _ in 0..128 << 10 {
                // SAFETY: the size is not zero, and the block is as large as what is written to it.
                let block = unsafe {
                    let block = Allocator.alloc(layout);
                    block.write_bytes(1, layout.size());
                    block
                };
                blocks.0.send(block as usize).expect("the other thread frees it");
            }
            drop(blocks.0);
            let before: usize = released.1.recv().expect("all is freed");
            collect();
            (before, rss_kib())
        });
        let mut all: Vec<usize> = blocks.1.iter().collect();
        let before = rss_kib();
        for block in all.drain(..) {
            // SAFETY: the block is from this allocator, with the same layout, and is not used any more.
            unsafe { Allocator.dealloc(block as *mut u8, layout) };
        }
        released.0.send(before).expect("the owner waits");
        let (before, after) = owner.join().expect("the owner rests");
        assert!(before == 0 || after + (64 << 10) < before, "{before} {after}");
    }
}
