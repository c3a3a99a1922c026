//! Rust ends a program that runs out of memory with SIGABRT, a core and no word of ours. Neither unwinding out of an
//! allocator nor handing std::bad_alloc through Rust frames is allowed, and the hook for it (set_alloc_error_hook) is
//! unstable, so the process says what happened and ends here. Nothing is lost: results are staged and appear whole or
//! not at all, as if the process had been killed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Cursor, Write};

extern "C" {
    fn _exit(code: i32) -> !;
}

struct Ending;

#[global_allocator]
static ALLOCATOR: Ending = Ending;

#[cold]
fn out_of_memory(bytes: usize) -> ! {
    // On the stack, and written at once: nothing here may allocate.
    let mut line = Cursor::new([0u8; 192]);
    let _ = writeln!(
        line,
        "error: [memory] out of memory ({bytes} bytes asked for); close other programs, give smaller inputs or use a \
         machine with more memory"
    );
    let end = line.position() as usize;
    let _ = std::io::stderr().write_all(&line.get_ref()[..end]);
    // SAFETY: it does not return; destructors and atexit handlers might allocate.
    unsafe { _exit(1) }
}

fn checked(address: *mut u8, bytes: usize) -> *mut u8 {
    if address.is_null() {
        out_of_memory(bytes);
    }
    address
}

// SAFETY: all memory is the system's, by whose rules the callers go.
unsafe impl GlobalAlloc for Ending {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        checked(unsafe { System.realloc(address, layout, size) }, size)
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        unsafe { System.dealloc(address, layout) }
    }
}
