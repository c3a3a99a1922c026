#include "compare/output.h"

#include "core/error.h"

namespace tapetune {

void make_out_folder(const std::filesystem::path& folder) {
  std::error_code status;
  std::filesystem::create_directories(folder, status);
  if (status) fail("compare", "{}: cannot be created: {}; choose another --out.", folder.string(), status.message());
}

}  // namespace tapetune
