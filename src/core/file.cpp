#include "core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "core/error.h"
#include "core/moment.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t early_bytes = std::uint64_t{8} << 20;

[[noreturn]] void fail_errno(const fs::path& path, std::string_view doing, int error) {
  const char* remedy = error == ENOSPC || error == EDQUOT ? "free some space or choose another disk"
                       : error == EACCES || error == EPERM || error == EROFS
                           ? "check the permissions or choose another folder"
                       : error == ENOMEM ? "there is not enough memory (or address space: ulimit -v); close other "
                                           "programs, or use a machine with more (tapetune plan tells what a "
                                           "recipe needs)"
                       : error == EMFILE || error == ENFILE ? "too many files are open; raise the limit (ulimit -n)"
                                                            : "check the path";
  fail("file", "{}: {} failed: {}; {}.", path.string(), doing, errno_text(error), remedy);
}

void sync_path(const fs::path& path, int flags) {
  const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC);
  if (descriptor < 0) fail_errno(path, "opening", errno);
  const int status = ::fsync(descriptor);
  const int error = errno;
  ::close(descriptor);
  if (status != 0) fail_errno(path, "writing to disk", error);
}

fs::path parent_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

// "dir/" and "dir" are the same target.
fs::path without_trailing_slash(fs::path path) { return path.has_filename() ? path : path.parent_path(); }

}  // namespace

std::string read_text(const fs::path& path) {
  std::error_code status;
  if (fs::is_directory(path, status)) fail("file", "{}: is a folder, but a file is expected.", path.string());
  std::ifstream in(path, std::ios::binary);
  if (!in) fail_errno(path, "opening", errno);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (in.bad()) fail("file", "{}: reading failed.", path.string());
  return text;
}

MappedFile::MappedFile(fs::path path, std::span<const std::byte> bytes) : path_(std::move(path)), bytes_(bytes) {}

std::shared_ptr<const MappedFile> MappedFile::open(const fs::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail_errno(path, "opening", errno);
  struct stat info{};
  void* address = nullptr;
  if (::fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0) {
    address = ::mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ, MAP_SHARED, descriptor, 0);
  }
  const int error = errno;
  ::close(descriptor);
  if (!S_ISREG(info.st_mode)) fail("file", "{}: is not a regular file.", path.string());
  if (info.st_size == 0) fail("file", "{}: is empty; download or copy it again.", path.string());
  if (address == MAP_FAILED) fail_errno(path, "mapping", error);
  const auto* first = static_cast<const std::byte*>(address);
  return std::shared_ptr<const MappedFile>(new MappedFile(path, {first, static_cast<std::size_t>(info.st_size)}));
}

void MappedFile::release(std::span<const std::byte> part) const {
  if (part.empty()) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(part.data()) / page * page;
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(part.data()) + part.size();
  ::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);  // advice: nothing depends on it
}

MappedFile::~MappedFile() { ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()); }

OutputFile::OutputFile(fs::path path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail_errno(path_, "creating", errno);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_errno(path_, "writing", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    written_ += static_cast<std::uint64_t>(written);
  }
  // The disk begins while more is being made; else all of a large file would wait for finish().
  if (written_ - started_ < early_bytes) return;
  ::sync_file_range(descriptor_, static_cast<off64_t>(started_), static_cast<off64_t>(written_ - started_),
                    SYNC_FILE_RANGE_WRITE);
  started_ = written_;
}

void OutputFile::finish() {
  const int descriptor = std::exchange(descriptor_, -1);
  const int synced = ::fsync(descriptor);
  const int sync_error = errno;
  const int closed = ::close(descriptor);
  if (synced != 0) fail_errno(path_, "writing to disk", sync_error);
  if (closed != 0) fail_errno(path_, "closing", errno);
  at_moment("file");
}

StagedFolder::StagedFolder(fs::path target, bool replace) : replace_(replace) {
  std::error_code status;
  if (target.empty()) fail("output", "the name of the output folder is empty.");
  target_ = without_trailing_slash(fs::absolute(target).lexically_normal());
  if (!target_.has_filename() || fs::equivalent(target_, fs::current_path(), status)) {
    fail("output", "{}: is the current folder or the root; give a folder of its own, for example {}.", target.string(),
         (target / "model").string());
  }
  if (fs::exists(target_, status) && !replace_) refuse_existing();
  if (fs::exists(target_, status) && !fs::is_directory(target_, status)) {
    fail("output", "{}: exists and is not a folder; choose another name.", target_.string());
  }
  const fs::path parent = parent_of(target_);
  fs::create_directories(parent, status);
  if (status) fail("output", "{}: cannot be created: {}; choose another folder.", parent.string(), status.message());
  const std::string prefix = "." + target_.filename().string() + ".partial-";
  for (const auto& entry : fs::directory_iterator(parent, status)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(prefix, 0) != 0) continue;
    const pid_t owner = static_cast<pid_t>(std::atoi(name.c_str() + prefix.size()));
    // A live process may still be writing there; a dead one cannot come back for it, nor can one that had our number.
    const bool dead = owner == ::getpid() || ::access(fmt::format("/proc/{}", owner).c_str(), F_OK) != 0;
    if (owner > 0 && dead) fs::remove_all(entry.path(), status);
  }
  staging_ = parent / (prefix + std::to_string(::getpid()));
  if (!fs::create_directory(staging_, status)) {
    fail("output", "{}: cannot be created: {}; choose another folder.", staging_.string(), status.message());
  }
}

void StagedFolder::refuse_existing() const {
  fail("output", "{}: already exists; choose another folder or give --force to replace it.", target_.string());
}

StagedFolder::~StagedFolder() {
  std::error_code ignored;
  if (!staging_.empty()) fs::remove_all(staging_, ignored);
}

void StagedFolder::commit() {
  sync_path(staging_, O_RDONLY | O_DIRECTORY);
  at_moment("commit");
  const auto rename_with = [&](unsigned flags) {
    return ::renameat2(AT_FDCWD, staging_.c_str(), AT_FDCWD, target_.c_str(), flags) == 0 ? 0 : errno;
  };
  // Another program may have made the target while we were writing; it is not ours to replace unless we were told so.
  int error = rename_with(RENAME_NOREPLACE);
  if (error == 0) {
    staging_.clear();
  } else if (error == EEXIST) {
    if (!replace_) refuse_existing();
    // Exchanging the two names in one step means that a kill at any moment leaves the old or the new folder, never
    // none. What was replaced then stands under the staging name and goes with it.
    error = rename_with(RENAME_EXCHANGE);
  }
  if (error != 0) {
    fail("output", "{}: cannot be put in place: {}; choose another folder.", target_.string(), errno_text(error));
  }
  sync_path(parent_of(target_), O_RDONLY | O_DIRECTORY);
  at_moment("committed");
}

void require_writable(const fs::path& target, bool replace) {
  std::error_code status;
  if (!target.has_filename()) fail("output", "\"{}\" is not the name of a file.", target.string());
  if (fs::is_directory(target, status))
    fail("output", "{}: is a folder, but a file is to be written.", target.string());
  if (fs::exists(target, status) && !replace) {
    fail("output", "{}: already exists; choose another name or give --force to replace it.", target.string());
  }
  const fs::path parent = parent_of(target);
  if (!fs::is_directory(parent, status)) fail("output", "{}: no such folder; create it first.", parent.string());
}

WholeFile::WholeFile(fs::path target, bool replace) : target_(std::move(target)) {
  require_writable(target_, replace);
  partial_ = parent_of(target_) / ("." + target_.filename().string() + ".partial-" + std::to_string(::getpid()));
  out_ = std::make_unique<OutputFile>(partial_);
}

WholeFile::~WholeFile() {
  std::error_code ignored;
  if (!partial_.empty()) fs::remove(partial_, ignored);
}

void WholeFile::commit() {
  out_->finish();
  at_moment("commit");
  std::error_code status;
  fs::rename(partial_, target_, status);
  if (status) fail("output", "{}: cannot be put in place: {}.", target_.string(), status.message());
  partial_.clear();
  sync_path(parent_of(target_), O_RDONLY | O_DIRECTORY);
  at_moment("committed");
}

void require_space(const fs::path& path, std::uint64_t bytes) {
  std::error_code status;
  const fs::space_info space = fs::space(parent_of(path), status);
  if (!status && space.available < bytes) {
    fail("output",
         "{}: {:.2f} GB are to be written, but the disk has {:.2f} GB left; free some space or choose another disk.",
         path.string(), static_cast<double>(bytes) / 1e9, static_cast<double>(space.available) / 1e9);
  }
}

}  // namespace tapetune
