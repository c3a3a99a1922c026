#include "core/memory.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>

// jemalloc's, where the program has it (core/heap.cpp).
extern "C" int mallctl(const char* name, void* old, std::size_t* old_size, void* next, std::size_t next_size)
    __attribute__((weak));

namespace tapetune {

namespace {

bool own_program = false;  // ours, in which all code may go; in another's, which may have changed its code, LibTorch's

// Whoever debugs has written into code that is then not what the file holds.
bool traced() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "TracerPid:") return status >> word && word != "0";
  }
  return false;
}

// Segments that nobody writes to hold what the file holds.
int release_read_only(dl_phdr_info* library, std::size_t, void*) {
  const std::string_view name = library->dlpi_name;
  const bool torch = name.find("libtorch") != std::string_view::npos,
             file = name.find("vdso") == std::string_view::npos;
  if (!torch && !(own_program && file)) return 0;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const auto& segment = library->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || (segment.p_flags & PF_W) != 0) continue;
    const std::uintptr_t begin = (library->dlpi_addr + segment.p_vaddr + page - 1) / page * page,
                         end = (library->dlpi_addr + segment.p_vaddr + segment.p_memsz) / page * page;
    if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }
  return 0;
}

void release_code() {
  if (!traced()) ::dl_iterate_phdr(release_read_only, nullptr);
}

}  // namespace

bool heap_is_compact() { return ::mallctl != nullptr; }

void set_up_memory() {
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
  own_program = true;
  release_code();
}

void give_back_heap() {
  if (heap_is_compact()) {
    ::mallctl("thread.tcache.flush", nullptr, nullptr, nullptr, 0);
    ::mallctl("arena.4096.purge", nullptr, nullptr, nullptr, 0);  // 4096 stands for all arenas
    return;
  }
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

void settle_memory() {
  give_back_heap();
  release_code();
}

void start_memory_peak() {
  give_back_heap();
  // 5 sets the kernel's high-water mark to what is resident now.
  if (std::FILE* file = std::fopen("/proc/self/clear_refs", "w")) {
    std::fputs("5", file);
    std::fclose(file);
  }
}

}  // namespace tapetune
