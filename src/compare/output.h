// What a comparison tells the user while it works, and where it writes.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "core/escape.h"
#include "core/log.h"
#include "core/output.h"

namespace tapetune {

template <typename... Args>
void say_progress(fmt::format_string<Args...> text, Args&&... args) {
  if (!quiet()) write_error(printable(fmt::format(text, std::forward<Args>(args)...)) + "\n");
}

// A folder below --out.
void make_out_folder(const std::filesystem::path& folder);

}  // namespace tapetune
