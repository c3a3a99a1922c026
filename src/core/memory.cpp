#include "core/memory.h"

#include <cstddef>
#include <cstdio>
#ifdef __GLIBC__  // which a header of the C library defines
#include <malloc.h>
#endif

// jemalloc's, where the program has it (core/heap.cpp).
extern "C" int mallctl(const char* name, void* old, std::size_t* old_size, void* next, std::size_t next_size)
    __attribute__((weak));

namespace tapetune {

bool heap_is_compact() { return ::mallctl != nullptr; }

void set_up_memory() {
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}

void trim_memory() {
  if (heap_is_compact()) {
    ::mallctl("thread.tcache.flush", nullptr, nullptr, nullptr, 0);
    ::mallctl("arena.4096.purge", nullptr, nullptr, nullptr, 0);  // 4096 stands for all arenas
    return;
  }
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

void start_memory_peak() {
  trim_memory();
  // 5 sets the kernel's high-water mark to what is resident now.
  if (std::FILE* file = std::fopen("/proc/self/clear_refs", "w")) {
    std::fputs("5", file);
    std::fclose(file);
  }
}

}  // namespace tapetune
