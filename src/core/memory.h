// How a process of ours uses the system's memory.
#pragma once

namespace tapetune {

// Whether this program has jemalloc, whose heap has few holes.
bool heap_is_compact();

// Keeps freed memory for what comes next: activations come and go layer by layer, and giving their pages back each time
// is work for the kernel (8% of a profile of a prefill, 5% of a training step), as is zeroing what comes back. And lets
// go of code and tables that only the start-up needed, over 30 MB, most of them LibTorch's; what is needed again is
// still in the page cache.
void set_up_memory();

// Gives back what is free.
void give_back_heap();

// The same, and code that nobody is running: what a long prompt needed and the tokens behind it do not.
void settle_memory();

// Gives back what is free, so that the largest resident size from here on is that of what comes next, as near as one
// process can tell.
void start_memory_peak();

}  // namespace tapetune
