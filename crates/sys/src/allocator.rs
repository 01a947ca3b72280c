//! Where the memory of a process comes from.
//!
//! A server wants mimalloc (docs/adr/0005), which keeps a region for each size of object: fast, and 300 kB before anything
//! is in them. The supervisor of a pod holds next to nothing and there is one for every pod, so it takes the C library's
//! allocator, which keeps all sizes side by side. A process decides before its first allocation and never again: memory is
//! always given back to where it came from.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mimalloc::MiMalloc;

/// The variable that makes a process small, whatever its value.
pub const SMALL: &CStr = c"SKIFF_SMALL";

/// How often a thread gives back memory, at most.
const REST_EVERY: Duration = Duration::from_secs(30);

/// To be named as the global allocator of a program.
pub struct Allocator;

const UNDECIDED: u8 = 0;
const IS_FAST: u8 = 1;
const IS_SMALL: u8 = 2;

static CHOICE: AtomicU8 = AtomicU8::new(UNDECIDED);

#[inline]
fn is_fast() -> bool {
    match CHOICE.load(Relaxed) {
        UNDECIDED => decide(),
        choice => choice == IS_FAST,
    }
}

#[cold]
fn decide() -> bool {
    // SAFETY: the name is terminated. The first allocation is made before `main`, by the only thread there is, so nobody
    // can be changing the environment; whether it has the variable is all that is looked at.
    let is_small = unsafe { !libc::getenv(SMALL.as_ptr()).is_null() };
    CHOICE.store(if is_small { IS_SMALL } else { IS_FAST }, Relaxed);
    !is_small
}

unsafe extern "C" {
    /// mimalloc's own, which its crate does not pass on.
    fn mi_collect(force: bool);
}

thread_local! {
    static RESTED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// To be called by a thread that is about to sleep. Takes back what other threads have freed of its memory, and gives the
/// kernel what nobody needs. The allocator does both in passing when it is asked for more, which at rest nobody does.
pub fn rest() {
    let now = Instant::now();
    let rested = RESTED.get().is_some_and(|then| now.saturating_duration_since(then) < REST_EVERY);
    if rested || !is_fast() {
        return;
    }
    RESTED.set(Some(now));
    // SAFETY: it touches only what this thread keeps free and memory that nobody has.
    unsafe { mi_collect(true) }
}

// SAFETY: both allocators keep the promises of the trait, and since the choice never changes, what one of them has given
// out always comes back to the same one.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as promised by the caller, for the one that is chosen.
        unsafe { if is_fast() { MiMalloc.alloc(layout) } else { System.alloc(layout) } }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as promised by the caller, for the one that is chosen.
        unsafe { if is_fast() { MiMalloc.alloc_zeroed(layout) } else { System.alloc_zeroed(layout) } }
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the memory is from the one that is chosen, which never changes.
        unsafe { if is_fast() { MiMalloc.dealloc(memory, layout) } else { System.dealloc(memory, layout) } }
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the memory is from the one that is chosen, which never changes.
        unsafe {
            if is_fast() {
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

    /// kB.
    fn resident() -> usize {
        let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).map(str::trim).unwrap_or_default();
        line.trim_end_matches(" kB").parse().unwrap_or_default()
    }

    unsafe extern "C" {
        fn mi_arena_min_alignment() -> usize;
    }

    /// By `.cargo/config.toml`, which an environment with flags of its own for C hides.
    #[test]
    fn pages_are_small() {
        if std::env::var("CFLAGS").is_ok_and(|flags| !flags.contains("MI_ARENA_SLICE_SHIFT")) {
            return eprintln!("skipped: CFLAGS is set");
        }
        // SAFETY: it tells a constant.
        assert_eq!(unsafe { mi_arena_min_alignment() }, 16 << 10);
    }

    #[test]
    fn what_others_have_freed_is_given_back_at_rest() {
        let layout = Layout::from_size_align(1 << 10, 8).expect("a layout");
        let (blocks, freed) = (mpsc::channel(), mpsc::channel());
        let owner = std::thread::spawn(move || {
            for _ in 0..128 << 10 {
                // SAFETY: the size is not zero, and the block is as large as what is written to it.
                let block = unsafe {
                    let block = Allocator.alloc(layout);
                    block.write_bytes(1, layout.size());
                    block
                };
                blocks.0.send(block as usize).expect("somebody frees it");
            }
            drop(blocks.0);
            let before: usize = freed.1.recv().expect("all is freed");
            rest();
            (before, resident())
        });
        let mut all: Vec<usize> = blocks.1.iter().collect();
        let before = resident();
        for block in all.drain(..) {
            // SAFETY: it is from there, with the same layout, and nobody has it any more.
            unsafe { Allocator.dealloc(block as *mut u8, layout) };
        }
        freed.0.send(before).expect("the owner waits");
        let (before, after) = owner.join().expect("the owner rests");
        assert!(before == 0 || after + (64 << 10) < before, "{before} {after}");
    }
}
