// What jemalloc reads before main(), in programs that have it.

// One arena, for tensors of all sizes, that never gives pages back by itself: whatever is freed serves whoever comes
// next, and nobody waits for the kernel. core/memory.h says when pages do go back.
extern "C" const char* const malloc_conf;
const char* const malloc_conf = "narenas:1,oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1";
