//! Where the memory of a process comes from.
//!
//! A server wants mimalloc (docs/adr/0005), which keeps a region for each size of object: fast, and 300 kB before anything
//! is in them. The supervisor of a pod holds next to nothing and there is one for every pod, so it takes the C library's
//! allocator, which keeps all sizes side by side. A process decides before its first allocation and never again: memory is
//! always given back to where it came from.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use mimalloc::MiMalloc;

/// The variable that makes a process small, whatever its value.
pub const SMALL: &CStr = c"SKIFF_SMALL";

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
