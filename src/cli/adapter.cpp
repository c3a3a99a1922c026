#include <CLI/CLI.hpp>

#include "adapters/peft.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "core/file.h"
#include "core/log.h"

namespace tapetune::cli {

void add_adapter(CLI::App& app) {
  struct Options {
    ModelOptions model;
    std::string out;
    bool force = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("adapter", "Write an adapter in PEFT's format: a freshly initialized method, or a copy");
  options->model.add_to(*verb);
  verb->add_option("--out", options->out, "Folder to write")->required();
  verb->add_flag("--force", options->force, "Replace a folder that this command wrote");
  verb->footer("example: tapetune adapter /models/Llama-2-7b-hf --method lora rank=16 --seed 1 --out start/");
  verb->callback([options] {
    const Checkpoint checkpoint = options->model.open();
    require_not_input(options->out, std::vector<std::filesystem::path>{checkpoint.path(), options->model.adapter});
    const AdaptedModel adapted = options->model.load(checkpoint);
    for (const std::string& text : adapted.notes) note("{}", text);
    save_adapter(adapted, options->out, checkpoint.path(), options->force);
  });
}

}  // namespace tapetune::cli
