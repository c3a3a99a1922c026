#include "core/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "core/digits.h"
#include "core/error.h"
#include "core/moment.h"
#include "core/partial.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t early_bytes = std::uint64_t{8} << 20;

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

void require_regular(const fs::path& path, const struct stat& info) {
  if (S_ISREG(info.st_mode)) return;
  const char* kind = S_ISDIR(info.st_mode)                            ? "a folder"
                     : S_ISFIFO(info.st_mode)                         ? "a named pipe"
                     : S_ISCHR(info.st_mode) || S_ISBLK(info.st_mode) ? "a device"
                                                                      : "a socket";
  fail("file", "{}: is not a regular file but {}; check the path.", path.string(), kind);
}

// What the shell opened for us: opening it again waits for nobody.
bool handed_over(const fs::path& path) {
  const fs::path folder = path.parent_path();
  return path == "/dev/stdin" || folder == "/dev/fd" || folder == "/proc/self/fd";
}

fs::path parent_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

fs::path real(const fs::path& path) {
  std::error_code status;
  return fs::weakly_canonical(fs::absolute(path), status);
}

[[noreturn]] void refuse_existing_file(const fs::path& target) {
  fail("output", "{}: already exists; choose another name or give --force to replace it.", target.string());
}

// "dir/" and "dir" are the same target.
fs::path without_trailing_slash(fs::path path) { return path.has_filename() ? path : path.parent_path(); }

}  // namespace

void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail_system(folder.string(), "opening", errno);
  const int status = ::fsync(descriptor);
  const int error = errno;
  ::close(descriptor);
  // Some network file systems know no fsync of folders, and need none.
  if (status != 0 && error != EINVAL && error != EOPNOTSUPP) fail_system(folder.string(), "writing to disk", error);
}

int open_regular(const fs::path& path) {
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0) fail_system(path.string(), "opening", errno);
  require_regular(path, info);
  // Should another program put a pipe in the file's place just now, opening must not wait for its writer.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor < 0) fail_system(path.string(), "opening", errno);
  if (::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(descriptor);
    require_regular(path, info);
  }
  return descriptor;
}

void require_readable(const fs::path& path) {
  if (!handed_over(path)) ::close(open_regular(path));
}

std::string read_text(const fs::path& path, std::uint64_t limit) {
  const Descriptor in{handed_over(path) ? ::open(path.c_str(), O_RDONLY | O_CLOEXEC) : open_regular(path)};
  struct stat info{};
  if (in.number < 0 || ::fstat(in.number, &info) != 0) fail_system(path.string(), "opening", errno);
  if (S_ISDIR(info.st_mode)) require_regular(path, info);
  const auto size = static_cast<std::uint64_t>(S_ISREG(info.st_mode) ? info.st_size : 0);
  const auto require_below_limit = [&](std::uint64_t bytes) {
    if (bytes <= limit) return;
    fail("file", "{}: has more than {} bytes, the limit for such a file; check that it is the right one.",
         path.string(), limit);
  };
  require_below_limit(size);
  // With one byte more than a file has, its end shows without another allocation.
  std::string text(size > 0 ? size + 1 : 1 << 16, '\0');
  std::size_t got = 0;
  for (ssize_t count; (count = ::read(in.number, text.data() + got, text.size() - got)) != 0;) {
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_system(path.string(), "reading", errno);
    got += static_cast<std::size_t>(count);
    require_below_limit(got);
    if (got == text.size()) text.resize(2 * got);
  }
  text.resize(got);
  return text;
}

OutputFile::OutputFile(fs::path path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail_system(path_.string(), "creating", errno);
}

OutputFile::OutputFile(fs::path path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      if (error == EFAULT) fail_if_unreadable(bytes);
      fail_system(path_.string(), "writing", error);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    written_ += static_cast<std::uint64_t>(written);
  }
  // The disk begins while more is being made; else all of a large file would wait for finish().
  if (written_ - started_ < early_bytes) return;
  ::sync_file_range(descriptor_, static_cast<off64_t>(started_), static_cast<off64_t>(written_ - started_),
                    SYNC_FILE_RANGE_WRITE);
  started_ = written_;
}

void OutputFile::rewrite(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off64_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_system(path_.string(), "writing", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void OutputFile::finish() {
  const int descriptor = std::exchange(descriptor_, -1);
  const int synced = ::fsync(descriptor);
  const int sync_error = errno;
  const int closed = ::close(descriptor);
  if (synced != 0) fail_system(path_.string(), "writing to disk", sync_error);
  if (closed != 0) fail_system(path_.string(), "closing", errno);
  at_moment("file");
}

StagedFolder::StagedFolder(fs::path target, bool replace, WritesName writes, Others others)
    : replace_(replace), writes_(writes), others_(others) {
  std::error_code status;
  if (target.empty()) fail("output", "the name of the output folder is empty.");
  target_ = without_trailing_slash(fs::absolute(target).lexically_normal());
  if (!target_.has_filename() || fs::equivalent(target_, fs::current_path(), status)) {
    fail("output", "{}: is the current folder or the root; give a folder of its own, for example {}.", target.string(),
         (target / "model").string());
  }
  const fs::path parent = parent_of(target_);
  fs::create_directories(parent, status);
  if (status) fail("output", "{}: cannot be created: {}; choose another folder.", parent.string(), status.message());
  remove_abandoned(parent, target_.filename().string());  // which may bring back a folder that was being replaced
  if (fs::exists(fs::symlink_status(target_, status))) require_replaceable();
  partial_ = std::make_unique<Partial>(target_, Partial::Kind::folder);
}

StagedFolder::~StagedFolder() = default;

const fs::path& StagedFolder::path() const { return partial_->path(); }

void StagedFolder::refuse_existing() const {
  fail("output", "{}: already exists; choose another folder or give --force to replace it.", target_.string());
}

void StagedFolder::require_replaceable() const {
  std::error_code status;
  if (!replace_) refuse_existing();
  if (!fs::is_directory(target_, status)) {
    fail("output", "{}: exists and is not a folder; choose another name.", target_.string());
  }
  if (writes_ == nullptr || others_ == Others::keep) return;
  std::vector<std::string> foreign;
  for (const auto& entry : fs::directory_iterator(target_, status)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_directory(status) && writes_(name)) continue;
    foreign.push_back(entry.is_directory(status) ? name + "/" : name);
  }
  if (status) fail("output", "{}: cannot be read: {}; choose another folder.", target_.string(), status.message());
  if (foreign.empty()) return;
  std::sort(foreign.begin(), foreign.end());
  constexpr std::size_t named = 3;
  const std::size_t more = foreign.size() - std::min(named, foreign.size());
  foreign.resize(foreign.size() - more);
  fail(
      "output",
      "{}: has files that this command does not write ({}{}), which --force would delete; move them, or choose another "
      "folder.",
      target_.string(), fmt::join(foreign, ", "), more > 0 ? fmt::format(" and {} more", more) : "");
}

// What was replaced is where the new folder was made.
void StagedFolder::take_over_others() const {
  std::error_code status;
  for (const auto& entry : fs::directory_iterator(path(), status)) {
    const fs::path name = entry.path().filename();
    std::error_code ignored;
    if (!writes_(name.string()) && !fs::exists(fs::symlink_status(target_ / name, ignored))) {
      fs::rename(entry.path(), target_ / name, ignored);
    }
  }
}

void StagedFolder::commit() {
  sync_folder(path());
  at_moment("commit");
  std::error_code status;
  // Another program may have made the target, or put something into it, while we were writing.
  if (replace_ && fs::exists(fs::symlink_status(target_, status))) require_replaceable();
  if (!partial_->place(replace_)) refuse_existing();
  at_moment("committed");
  if (others_ == Others::keep && writes_ != nullptr && !path().empty()) take_over_others();
}

void require_writable(const fs::path& target, bool replace) {
  std::error_code status;
  if (!target.has_filename()) fail("output", "\"{}\" is not the name of a file.", target.string());
  if (fs::is_directory(target, status))
    fail("output", "{}: is a folder, but a file is to be written.", target.string());
  if (fs::exists(target, status) && !replace) refuse_existing_file(target);
  const fs::path parent = parent_of(target);
  if (!fs::is_directory(parent, status)) fail("output", "{}: no such folder; create it first.", parent.string());
}

bool is_inside(const fs::path& inner, const fs::path& outer) {
  const fs::path way = real(inner).lexically_relative(real(outer));
  return !way.empty() && *way.begin() != "..";
}

void require_not_input(const fs::path& target, std::span<const fs::path> inputs) {
  std::error_code status;
  const bool file = fs::is_regular_file(target, status);
  for (const fs::path& input : inputs) {
    if (input.empty() || !fs::exists(input, status)) continue;
    if (real(target) == real(input) || fs::equivalent(target, input, status)) {
      fail("output", "{}: is the input itself; choose another name.", target.string());
    }
    if (is_inside(input, target)) {
      fail("output", "{}: holds the input {}; choose another folder.", target.string(), input.string());
    }
    if (file && is_inside(target, input) && target.extension() != ".gguf") {
      fail("output", "{}: is a file of the input {}; choose another name.", target.string(), input.string());
    }
  }
}

WholeFile::WholeFile(fs::path target, bool replace) : target_(std::move(target)), replace_(replace) {
  require_writable(target_, replace);
  const fs::path whole = fs::absolute(target_);
  remove_abandoned(whole.parent_path(), whole.filename().string());
  partial_ = std::make_unique<Partial>(target_, Partial::Kind::file);
  const int descriptor =
      ::fcntl(partial_->descriptor(), F_DUPFD_CLOEXEC, 0);  // the partial keeps its own, for the lock
  if (descriptor < 0) fail_system(partial_->path().string(), "opening", errno);
  out_ = std::make_unique<OutputFile>(partial_->path(), descriptor);
}

WholeFile::~WholeFile() = default;

void WholeFile::commit() {
  out_->finish();
  at_moment("commit");
  if (!partial_->place(replace_)) refuse_existing_file(target_);
  at_moment("committed");
}

ScratchFile::ScratchFile(const fs::path& folder)
    : out_(folder, [&] {
        const Partial partial(folder / "scratch", Partial::Kind::file);
        const int descriptor = ::fcntl(partial.descriptor(), F_DUPFD_CLOEXEC, 0);
        if (descriptor < 0) fail_system(partial.path().string(), "opening", errno);
        return descriptor;  // its name goes with the partial
      }()) {}

void ScratchFile::read(const std::function<void(std::span<const std::byte> part)>& take) const {
  std::vector<std::byte> part(std::size_t{1} << 20);
  for (off64_t at = 0;;) {
    const ssize_t count = ::pread(out_.descriptor_, part.data(), part.size(), at);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_system(out_.path_.string(), "reading back", errno);
    if (count == 0) return;
    take(std::span(part).first(static_cast<std::size_t>(count)));
    at += count;
  }
}

void require_space(const fs::path& path, std::uint64_t bytes) {
  std::error_code status;
  const fs::space_info space = fs::space(parent_of(path), status);
  if (!status && space.available < bytes) {
    fail("output", "{}: {} are to be written, but the disk has {} left; free some space or choose another disk.",
         path.string(), bytes_text(static_cast<double>(bytes)), bytes_text(static_cast<double>(space.available)));
  }
}

}  // namespace tapetune
