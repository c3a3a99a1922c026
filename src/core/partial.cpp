#include "core/partial.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "core/moment.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

constexpr std::string_view partial_mark = ".partial-", replaced_mark = ".replaced-";
constexpr std::size_t random_digits = 16;
constexpr std::size_t longest_stem = 200;  // of a name of at most 255 bytes, with what is put around it

// Nobody can guess it, and so nobody can have put a link there.
std::string random_name() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) {
    fail("output", "the system gives no random numbers: {}.", errno_text(errno));
  }
  return fmt::format("{:016x}", number);
}

std::string stem_of(std::string_view target) { return std::string(target.substr(0, longest_stem)); }

std::string hidden_name(std::string_view target, std::string_view mark) {
  return fmt::format(".{}{}{}", stem_of(target), mark, random_name());
}

// NAME and END in `.NAME` + mark + `END`.
struct HiddenName {
  std::string_view target, end;
};
std::optional<HiddenName> parse_hidden(std::string_view name, std::string_view mark) {
  const std::size_t at = name.rfind(mark);
  if (!name.starts_with('.') || at == std::string_view::npos || at <= 1) return std::nullopt;
  return HiddenName{name.substr(1, at - 1), name.substr(at + mark.size())};
}

bool consists_of(std::string_view text, std::string_view characters) {
  return !text.empty() && text.find_first_not_of(characters) == std::string_view::npos;
}

bool is_random(std::string_view end) { return end.size() == random_digits && consists_of(end, "0123456789abcdef"); }

// The target's name in `.NAME.partial-0123456789abcdef`; nothing where a name is not of this form.
std::optional<std::string> target_in(std::string_view name, std::string_view mark) {
  const auto found = parse_hidden(name, mark);
  return found && is_random(found->end) ? std::optional<std::string>(found->target) : std::nullopt;
}

bool unsupported(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP; }

bool is_there(const fs::path& path) {
  struct stat info{};
  return ::lstat(path.c_str(), &info) == 0;
}

// Whether the descriptor's file is still the one at this path.
bool is_still_at(int descriptor, const fs::path& path) {
  struct stat own{}, there{};
  return ::fstat(descriptor, &own) == 0 && ::lstat(path.c_str(), &there) == 0 && own.st_ino == there.st_ino &&
         own.st_dev == there.st_dev;
}

int rename_with(const fs::path& from, const fs::path& to, unsigned flags) {
  return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}

// Held while a target is looked at and renamed in two steps, against another tapetune that does the same. Where the
// file system has no locks, it is none.
class TargetLock {
 public:
  explicit TargetLock(const fs::path& target, bool wait = true)
      : path_(target.parent_path() / fmt::format(".{}.lock", stem_of(target.filename().string()))) {
    while (true) {
      descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
      if (descriptor_ < 0) return;
      if (::flock(descriptor_, LOCK_EX | (wait ? 0 : LOCK_NB)) != 0) {
        held_ = errno != EWOULDBLOCK;
        return;
      }
      if (is_still_at(descriptor_, path_)) return;
      ::close(descriptor_);  // its last holder has removed it
    }
  }
  ~TargetLock() {
    if (descriptor_ < 0) return;
    if (held_) ::unlink(path_.c_str());
    ::close(descriptor_);
  }
  TargetLock(const TargetLock&) = delete;
  TargetLock& operator=(const TargetLock&) = delete;

  bool held() const { return held_; }

 private:
  fs::path path_;
  int descriptor_ = -1;
  bool held_ = true;
};

// A kill came after an old folder was moved away: it goes back if nothing took its place, and is removed otherwise.
void settle_replaced(const fs::path& replaced, const fs::path& target) {
  const TargetLock lock(target, /*wait=*/false);
  std::error_code ignored;
  if (!lock.held()) return;
  if (is_there(target)) {
    fs::remove_all(replaced, ignored);
  } else {
    fs::rename(replaced, target, ignored);
  }
}

}  // namespace

Partial::Partial(const fs::path& target, Kind kind) : target_(fs::absolute(target)), kind_(kind) {
  const fs::path folder = target_.parent_path();
  const std::string name = target_.filename().string();
  const bool file = kind == Kind::file;
  for (int left = 100;; --left) {
    path_ = folder / hidden_name(name, partial_mark);
    const bool made = file || ::mkdir(path_.c_str(), 0777) == 0;
    const int flags = file ? O_RDWR | O_CREAT | O_EXCL : O_RDONLY | O_DIRECTORY;
    if (made) descriptor_ = ::open(path_.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor_ < 0) {
      const int error = errno;
      if (made && !file) ::rmdir(path_.c_str());
      fail_system(path_.string(), "creating", error);
    }
    // Waits for a process that came before the lock and takes this for abandoned. Where the file system has no locks,
    // nobody can tell, and nothing is ever removed as abandoned.
    while (::flock(descriptor_, LOCK_EX) != 0 && errno == EINTR) {
    }
    if (is_still_at(descriptor_, path_)) return;
    ::close(std::exchange(descriptor_, -1));
    if (left == 0) fail("output", "{}: is removed by another process again and again; choose another folder.", name);
  }
}

Partial::~Partial() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
  ::close(descriptor_);
}

bool Partial::place(bool replace) {
  const bool placed = kind_ == Kind::file ? place_file(replace) : place_folder(replace);
  if (!placed) return false;
  sync_folder(target_.parent_path());
  return true;
}

void Partial::rename_to_target(const fs::path& from) const {
  if (::rename(from.c_str(), target_.c_str()) != 0) fail_system(target_.string(), "putting it in place", errno);
}

bool Partial::place_file(bool replace) {
  if (replace) {
    rename_to_target(path_);
    path_.clear();
    return true;
  }
  int error = rename_with(path_, target_, RENAME_NOREPLACE);
  if (unsupported(error)) {
    // A second name is refused where there is one already, on all file systems that have second names.
    error = ::link(path_.c_str(), target_.c_str()) == 0 ? 0 : errno;
    if (error == 0) ::unlink(path_.c_str());
  }
  if (error == EPERM || unsupported(error)) {
    const TargetLock lock(target_);
    error = is_there(target_) ? EEXIST : 0;
    if (error == 0) rename_to_target(path_);
  }
  if (error == EEXIST) return false;
  if (error != 0) fail_system(target_.string(), "putting it in place", error);
  path_.clear();
  return true;
}

bool Partial::place_folder(bool replace) {
  // Another program may have made the target meanwhile; it is not ours to replace unless we were told so.
  int error = rename_with(path_, target_, RENAME_NOREPLACE);
  if (error == 0) {
    path_.clear();
    return true;
  }
  if (error == EEXIST) {
    if (!replace) return false;
    // In one step: a kill at any moment leaves the old or the new folder under the name, never none.
    error = rename_with(path_, target_, RENAME_EXCHANGE);
    if (error == 0) return true;
  }
  if (!unsupported(error)) fail_system(target_.string(), "putting it in place", error);
  return place_folder_in_steps(replace);
}

// For NFS, FUSE and others without the flags of renameat2.
bool Partial::place_folder_in_steps(bool replace) {
  const TargetLock lock(target_);
  // Should somebody make the folder just now, then this rename fails, unless theirs is empty.
  if (!is_there(target_) && ::rename(path_.c_str(), target_.c_str()) == 0) {
    path_.clear();
    return true;
  }
  if (!is_there(target_)) fail_system(target_.string(), "putting it in place", errno);
  if (!replace) return false;
  const fs::path replaced = target_.parent_path() / hidden_name(target_.filename().string(), replaced_mark);
  if (::rename(target_.c_str(), replaced.c_str()) != 0) fail_system(target_.string(), "moving it away", errno);
  at_moment("replaced");
  try {
    rename_to_target(path_);
  } catch (const Error&) {
    std::error_code ignored;
    fs::rename(replaced, target_, ignored);
    throw;
  }
  path_ = replaced;
  return true;
}

std::optional<std::string> partial_target(std::string_view name) {
  const auto found = parse_hidden(name, partial_mark);
  const bool is_partial = found && (is_random(found->end) || consists_of(found->end, "0123456789"));
  return is_partial ? std::optional<std::string>(found->target) : std::nullopt;
}

void remove_abandoned(const fs::path& folder, std::string_view name) {
  std::error_code status;
  const std::string stem = stem_of(name);
  for (const auto& entry : fs::directory_iterator(folder, status)) {
    const std::string found = entry.path().filename().string();
    const auto of_target = [&](const std::optional<std::string>& target) {
      return target && (name.empty() ? target->size() < longest_stem : *target == stem);
    };
    if (const auto target = target_in(found, replaced_mark); of_target(target)) {
      settle_replaced(entry.path(), folder / (name.empty() ? *target : name));
    }
    if (!of_target(target_in(found, partial_mark))) continue;
    const auto open_with = [&](int flags) {
      return ::open(entry.path().c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    };
    int descriptor = open_with(O_RDWR);  // NFS locks only what can be written
    if (descriptor < 0) descriptor = open_with(O_RDONLY | O_DIRECTORY);
    if (descriptor < 0) continue;
    // The lock ends with its holder, in whatever container that was.
    if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0 && is_still_at(descriptor, entry.path())) {
      std::error_code ignored;
      fs::remove_all(entry.path(), ignored);
    }
    ::close(descriptor);
  }
}

}  // namespace tapetune
