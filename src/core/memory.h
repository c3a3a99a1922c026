// How a process of ours uses the system's memory.
#pragma once

namespace tapetune {

// Keeps freed memory for what comes next: activations come and go layer by layer, and giving their pages back each time
// is work for the kernel (8% of a profile of a prefill, 5% of a training step), as is zeroing what comes back. And lets
// go of the code and tables of LibTorch that only its start-up needed, over 30 MB; what is needed again is still in the
// page cache.
void set_up_memory();

}  // namespace tapetune
