#include "core/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>

#include "core/error.h"
#include "core/escape.h"
#include "core/file.h"
#include "core/moment.h"

namespace tapetune {
namespace fs = std::filesystem;

// A map as the signal handler finds it: in a list that only grows, whose entries are used again. The texts are written
// before `end`, and read only for a map that somebody touches and so keeps.
struct MappedFile::Entry {
  std::atomic<std::uintptr_t> begin = 0, end = 0;  // end 0: no map
  std::atomic<bool> used = true;
  std::string path, shrank, unreadable;
  Entry* next = nullptr;

  static std::atomic<Entry*> first;

  static Entry* add(const fs::path& path, std::span<const std::byte> bytes) {
    Entry* entry = first;
    for (bool unused = false; entry != nullptr; entry = entry->next, unused = false) {
      if (entry->used.compare_exchange_strong(unused, true)) break;
    }
    if (entry == nullptr) {
      entry = new Entry;  // stays for good: the handler may be looking at it
      entry->next = first;
      while (!first.compare_exchange_weak(entry->next, entry)) {
      }
    }
    entry->path = path.string();
    const std::string shown = printable(entry->path);
    entry->shrank = fmt::format("[file] {}: shrank while it was in use; restore it and rerun the same command.", shown);
    entry->unreadable = fmt::format(
        "[file] {}: could not be read while it was in use; check the disk and rerun the same command.", shown);
    entry->begin = reinterpret_cast<std::uintptr_t>(bytes.data());
    entry->end = entry->begin + bytes.size();
    return entry;
  }

  void remove() {
    end = 0;
    used = false;
  }

  static const Entry* find(const void* address) {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    for (const Entry* entry = first; entry != nullptr; entry = entry->next) {
      const std::uintptr_t last = entry->end;
      if (at < last && at >= entry->begin) return entry;
    }
    return nullptr;
  }

  // What to say of a part that cannot be read.
  const std::string& text() const {
    struct stat now{};
    const bool smaller =
        ::stat(path.c_str(), &now) == 0 && static_cast<std::uintptr_t>(now.st_size) < end.load() - begin.load();
    return smaller ? shrank : unreadable;
  }
};

std::atomic<MappedFile::Entry*> MappedFile::Entry::first = nullptr;

MappedFile::MappedFile(fs::path path, std::span<const std::byte> bytes)
    : path_(std::move(path)), bytes_(bytes), entry_(Entry::add(path_, bytes)) {}

std::shared_ptr<const MappedFile> MappedFile::open(const fs::path& path) {
  const int descriptor = open_regular(path);
  struct stat info{};
  void* address = nullptr;
  if (::fstat(descriptor, &info) == 0 && info.st_size > 0) {
    address = ::mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ, MAP_SHARED, descriptor, 0);
  }
  const int error = errno;
  ::close(descriptor);
  if (info.st_size == 0) fail("file", "{}: is empty; download or copy it again.", path.string());
  if (address == MAP_FAILED) fail_system(path.string(), "mapping", error);
  const auto* first = static_cast<const std::byte*>(address);
  std::shared_ptr<const MappedFile> file(new MappedFile(path, {first, static_cast<std::size_t>(info.st_size)}));
  at_moment("mapped");
  return file;
}

void MappedFile::release(std::span<const std::byte> part) const {
  if (part.empty()) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(part.data()) / page * page;
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(part.data()) + part.size();
  ::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);  // advice: nothing depends on it
}

MappedFile::~MappedFile() {
  entry_->remove();
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

namespace {

struct sigaction action_before;
std::atomic<bool> shrank_told = false;

void write_raw(std::string_view text) {
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0) return;  // nobody listens; the program ends all the same
}

}  // namespace

// The handler calls nothing but stat, write, isatty, _exit and what sets signals: it may run on any thread, in the
// middle of anything.
void watch_mapped_files() {
  struct sigaction action{};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = [](int number, siginfo_t* info, void*) {
    const bool of_an_access = info->si_code == BUS_ADRERR || info->si_code == BUS_OBJERR;
    const MappedFile::Entry* entry = of_an_access ? MappedFile::Entry::find(info->si_addr) : nullptr;
    if (entry == nullptr) {
      ::sigaction(number, &action_before, nullptr);
      ::raise(number);  // pending until this returns
      return;
    }
    while (shrank_told.exchange(true)) ::pause();             // another thread says it
    if (::isatty(STDERR_FILENO) != 0) write_raw("\r\033[K");  // a progress bar
    write_raw("error: ");
    write_raw(entry->text());
    write_raw("\n");
    ::_exit(1);
  };
  ::sigaction(SIGBUS, &action, &action_before);
}

void fail_if_unreadable(std::span<const std::byte> bytes) {
  if (const MappedFile::Entry* entry = MappedFile::Entry::find(bytes.data()); entry != nullptr) {
    throw Error(entry->text());
  }
}

}  // namespace tapetune
