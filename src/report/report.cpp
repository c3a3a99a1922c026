#include "report/report.h"

#include "compare/output.h"
#include "core/file.h"
#include "core/json.h"
#include "report/page.h"
#include "report/results.h"
#include "report/tables.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

void write_whole(const fs::path& path, const std::string& text) {
  WholeFile file(path, /*replace=*/true);
  file.write(text);
  file.commit();
}

}  // namespace

void write_report(const Comparison& comparison, const fs::path& out) {
  make_out_folder(out / "charts");
  for (const auto& [name, text] : chart_files(comparison)) write_whole(out / "charts" / name, text);
  write_whole(out / "results.json", to_text(results_json(comparison), 1) + "\n");
  write_whole(out / "results.csv", results_csv(comparison));
  write_whole(out / "cost.csv", cost_csv(comparison));
  write_whole(out / "table.md", markdown(comparison));
  write_whole(out / "report.html", report_page(comparison));
}

}  // namespace tapetune
