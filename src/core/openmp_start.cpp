// How long OpenMP's threads spin at a barrier before they sleep, in programs of ours.
#include <unistd.h>

#include <string_view>

namespace {

// libgomp spins 300,000 times by default, a few milliseconds, while the thread it waits for may need that very core:
// beside other work training was 2 to 4 times slower than with one thread. 1000 times are some 25 us, which is most of
// what threads of an idle machine wait for each other. docs/figures.md has the measurements of tools/bench busy.
char spin_count[] = "GOMP_SPINCOUNT=1000";  // NOLINT(*-avoid-c-arrays): execve takes pointers to char

bool is_set(const char* entry, const char* name) {
  while (*name != '\0' && *entry == *name) ++entry, ++name;
  return *name == '\0' && *entry == '=';
}

// Whether this file is the program itself: not the dynamic linker, which runs it in `ld.so ./tapetune`, and not a file
// that was replaced since.
bool is_program(std::string_view path) {
  const std::string_view name = path.substr(path.rfind('/') + 1);
  return !name.starts_with("ld-") && !name.starts_with("ld.") && !name.ends_with(" (deleted)");
}

// libgomp reads its variables in its initialiser, before main(). The executable's own pre-initialisers run before those
// of any library, when a second start costs no more than loading the libraries once more (tens of milliseconds). What
// the user chose wins.
void start_again(int, char** arguments, char** environment) {
  constexpr int most = 4096;
  char* extended[most + 2];  // NOLINT(*-avoid-c-arrays): no library may be used yet
  int count = 0;
  for (; environment[count] != nullptr; ++count) {
    if (count == most) return;
    if (is_set(environment[count], "GOMP_SPINCOUNT") || is_set(environment[count], "OMP_WAIT_POLICY")) return;
    extended[count] = environment[count];
  }
  extended[count] = spin_count;
  extended[count + 1] = nullptr;
  char path[most + 1];  // NOLINT(*-avoid-c-arrays)
  const ssize_t length = ::readlink("/proc/self/exe", path, most);
  if (length <= 0 || length == most || !is_program({path, static_cast<std::size_t>(length)})) return;
  path[length] = '\0';
  // Not /proc/self/exe itself, after which the process would be called "exe". Where it fails, we go on with libgomp's
  // default.
  ::execve(path, arguments, extended);
}

using Initialiser = void (*)(int, char**, char**);
__attribute__((section(".preinit_array"), used)) const Initialiser before_all_libraries = start_again;

}  // namespace
