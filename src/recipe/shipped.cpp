#include "recipe/shipped.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "core/error.h"
#include "core/file.h"
#include "core/nearest.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

std::string summary_of(const fs::path& file) {
  std::istringstream lines(read_text(file));
  for (std::string line; std::getline(lines, line) && line.starts_with('#');) {
    const std::size_t begin = line.find_first_not_of("# ");
    if (begin != std::string::npos && line.compare(begin, 9, "tapetune ") != 0) return line.substr(begin);
  }
  return "";
}

// Files only: folders that cannot be read and broken links are no recipes.
std::vector<ShippedRecipe> recipes_in(const fs::path& folder) {
  std::vector<ShippedRecipe> found;
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied, error), end;
       !error && at != end; at.increment(error)) {
    std::error_code status;
    if (at->path().extension() != ".yaml" || !at->is_regular_file(status)) continue;
    const std::string name = at->path().lexically_relative(folder).replace_extension().generic_string();
    found.push_back({name, summary_of(at->path()), at->path()});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return found;
}

}  // namespace

fs::path shipped_recipes() {
  std::error_code error;
  if (const char* given = std::getenv("TAPETUNE_RECIPES"); given != nullptr && *given != '\0') {
    if (!fs::is_directory(given, error)) fail("recipe", "TAPETUNE_RECIPES={} is not a folder.", given);
    return given;
  }
  std::vector<fs::path> places;
  if (const fs::path program = fs::read_symlink("/proc/self/exe", error); !error) {
    places.push_back(program.parent_path().parent_path() / "share" / "tapetune" / "recipes");
  }
  places.emplace_back(TAPETUNE_RECIPES);
  for (const fs::path& place : places) {
    if (fs::is_directory(place, error)) return place;
  }
  fail("recipe", "there are no shipped recipes in {}; set TAPETUNE_RECIPES to their folder.",
       fmt::join(std::vector<std::string>(places.begin(), places.end()), " nor in "));
}

std::vector<ShippedRecipe> list_recipes() { return recipes_in(shipped_recipes()); }

fs::path find_recipe(const std::string& name) {
  std::error_code error;
  const bool folder = fs::is_directory(name, error);
  if (!folder && fs::exists(name, error)) return name;
  std::string_view wanted = name;
  if (wanted.starts_with("recipes/")) wanted.remove_prefix(8);
  if (wanted.ends_with(".yaml")) wanted.remove_suffix(5);
  const std::vector<ShippedRecipe> all = list_recipes();
  std::vector<std::string_view> names;
  for (const ShippedRecipe& each : all) {
    if (each.name == wanted) return each.file;
    names.push_back(each.name);
  }
  if (folder) return name;  // whoever reads it says that a file is expected
  const std::string meant = nearest(wanted, names);
  fail(
      "recipe",
      "{}: there is neither such a file or run folder nor such a shipped recipe{}; \"tapetune recipes ls\" lists them.",
      name, meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant));
}

}  // namespace tapetune
