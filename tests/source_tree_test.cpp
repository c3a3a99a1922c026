// The source tree: a folder uses only those above it in CONTRIBUTING.md's table, and no file is too long to be read.
#include <algorithm>
#include <sstream>

#include "catch.h"
#include "support.h"

namespace source_tree_test {

using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

constexpr std::size_t most_lines = 500;

// The first cells of the table of folders, from the one that uses no other to the one that may use all.
std::vector<std::string> folders_in_order(const fs::path& root) {
  std::istringstream page(read_file(root / "CONTRIBUTING.md"));
  std::string line;
  while (std::getline(page, line) && !line.starts_with("| folder |")) {
  }
  std::getline(page, line);  // |---|---|
  std::vector<std::string> folders;
  while (std::getline(page, line) && line.starts_with("| ")) folders.push_back(line.substr(2, line.find(" |", 2) - 2));
  return folders;
}

// src/core of src/core/file.h, adapters of adapters/positions/rope/rope.h.
std::string folder_of(const fs::path& file) {
  auto part = file.begin();
  const fs::path top = *part;
  return top == "src" ? (top / *++part).string() : top.string();
}

bool is_source(const fs::path& file) {
  static const std::vector<std::string> endings{".h", ".cpp", ".cu", ".cuh", ".in", ".py", ".rs", ".sh"};
  return std::find(endings.begin(), endings.end(), file.extension().string()) != endings.end();
}

// Below root, in the order of their names.
std::vector<fs::path> source_files(const fs::path& root) {
  std::vector<fs::path> files;
  for (const char* top : {"src", "adapters", "tests"}) {
    if (!fs::exists(root / top)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      if (entry.is_regular_file() && is_source(entry.path())) files.push_back(entry.path().lexically_relative(root));
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

// What #include "name" means in this file; empty: no file of ours, as generated headers.
fs::path included_file(const fs::path& root, const fs::path& file, const std::string& name) {
  for (const fs::path& candidate : {fs::path("src") / name, fs::path(name), file.parent_path() / name}) {
    if (fs::exists(root / candidate)) return candidate.lexically_normal();
  }
  return {};
}

// The name in #include "name"; empty: another line.
std::string included_name(const std::string& line) {
  constexpr std::string_view directive = "#include \"";
  if (!line.starts_with(directive)) return "";
  return line.substr(directive.size(), line.find('"', directive.size()) - directive.size());
}

void find_forbidden_includes(const fs::path& root, const fs::path& file, const std::vector<std::string>& folders,
                             std::string& found) {
  const auto place = [&](const std::string& folder) { return std::find(folders.begin(), folders.end(), folder); };
  const std::string own = folder_of(file);
  const std::vector<std::string> lines = lines_of(read_file(root / file));
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string name = included_name(lines[i]);
    const fs::path used = name.empty() ? fs::path() : included_file(root, file, name);
    if (used.empty() || place(folder_of(used)) <= place(own)) continue;
    found += fmt::format("{}:{}: {} must not use {}, which is below it in CONTRIBUTING.md's table ({})\n",
                         file.string(), i + 1, own, folder_of(used), name);
  }
}

// A line for each include of a folder that may not be used, and for each folder that the table lacks or invents.
std::string violations(const fs::path& root) {
  const std::vector<std::string> folders = folders_in_order(root);
  std::string found;
  for (const std::string& folder : folders) {
    if (!fs::is_directory(root / folder)) found += fmt::format("CONTRIBUTING.md: there is no folder {}\n", folder);
  }
  for (const fs::path& file : source_files(root)) {
    if (std::find(folders.begin(), folders.end(), folder_of(file)) == folders.end()) {
      found += fmt::format("{}: CONTRIBUTING.md's table lacks the folder {}\n", file.string(), folder_of(file));
    } else {
      find_forbidden_includes(root, file, folders, found);
    }
  }
  return found;
}

// A line for each file that is too long.
std::string long_files(const fs::path& root) {
  std::string found;
  for (const fs::path& file : source_files(root)) {
    const std::string text = read_file(root / file);
    const auto lines = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
    if (lines > most_lines) found += fmt::format("{}: {} lines, more than {}\n", file.string(), lines, most_lines);
  }
  return found;
}

}  // namespace

TEST_CASE("a folder uses only those above it in CONTRIBUTING.md's table") {
  CHECK(folders_in_order(source_folder).size() > 10);
  CHECK(source_files(source_folder).size() > 200);
  CHECK(violations(source_folder) == "");
}

TEST_CASE("no source file is longer than 500 lines") { CHECK(long_files(source_folder) == ""); }

TEST_CASE("an include of a folder further down is found with file and line, and so is what the table lacks") {
  const TempFolder root;
  for (const char* folder : {"src/core", "src/model", "src/new", "adapters/lora", "tests"}) {
    fs::create_directories(root / folder);
  }
  write_file(
      root / "CONTRIBUTING.md",
      "# Folders\n\n| folder | content |\n|---|---|\n| src/core | files |\n| src/gone | old |\n| adapters | x |\n"
      "| src/model | y |\n| tests | z |\n\nAnd | so | on.\n");
  write_file(root / "src/core/file.h", "#pragma once\n#include <string>\n#include \"model/llama.h\"\n");
  write_file(root / "src/core/own.h", "#include \"core/file.h\"\n#include \"generated.h\"\n");
  write_file(root / "src/model/llama.h", "#include \"core/file.h\"\n#include \"adapters/lora/lora.h\"\n");
  write_file(root / "adapters/lora/lora.h", "// model/llama.h\n#include \"core/file.h\"\n");
  write_file(root / "adapters/lora/lora.cpp", "#include \"lora.h\"\n\n#include \"../../src/model/llama.h\"\n");
  write_file(root / "src/new/new.h", "");
  write_file(root / "tests/all.cpp", "#include \"model/llama.h\"\n");
  CHECK(violations(root.path()) ==
        "CONTRIBUTING.md: there is no folder src/gone\n"
        "adapters/lora/lora.cpp:3: adapters must not use src/model, which is below it in CONTRIBUTING.md's table "
        "(../../src/model/llama.h)\n"
        "src/core/file.h:3: src/core must not use src/model, which is below it in CONTRIBUTING.md's table "
        "(model/llama.h)\n"
        "src/new/new.h: CONTRIBUTING.md's table lacks the folder src/new\n");
  CHECK(long_files(root.path()) == "");
  std::string lines;
  for (std::size_t i = 0; i <= most_lines; ++i) lines += "\n";
  write_file(root / "src/core/own.h", lines);
  CHECK(long_files(root.path()) == "src/core/own.h: 501 lines, more than 500\n");
}

}  // namespace source_tree_test
