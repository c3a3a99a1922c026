#include "cli/wrote.h"
#include "core/output.h"

#include <fmt/format.h>

#include <cstdint>

namespace tapetune::cli {

namespace fs = std::filesystem;

namespace {

// Three digits, decimal units.
std::string size_text(std::uint64_t bytes) {
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  for (const char* unit : {"kB", "MB", "GB"}) {
    value /= 1000;
    if (value < 999.5) return fmt::format("{:.{}f} {}", value, value < 9.95 ? 1 : 0, unit);
  }
  return fmt::format("{:.1f} TB", value / 1000);
}

}  // namespace

std::string wrote(const fs::path& path) {
  std::error_code status;
  if (!fs::is_directory(path, status))
    return fmt::format("wrote {} ({})", path.string(), size_text(fs::file_size(path)));
  std::uint64_t files = 0, bytes = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path)) {
    if (!entry.is_regular_file(status)) continue;
    ++files;
    bytes += entry.file_size();
  }
  return fmt::format("wrote {} ({} file{}, {})", path.string(), files, files == 1 ? "" : "s", size_text(bytes));
}

void print_wrote(const fs::path& path) { print_out("{}\n", wrote(path)); }

}  // namespace tapetune::cli
