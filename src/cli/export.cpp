#include <c10/core/InferenceMode.h>
#include <CLI/CLI.hpp>

#include "adapters/checkpoints.h"
#include "adapters/component.h"
#include "cli/verbs.h"
#include "cli/wrote.h"
#include "core/error.h"
#include "core/file.h"
#include "gguf/writer.h"

namespace tapetune::cli {

void add_export(CLI::App& app) {
  struct Options {
    std::string model, out, type;
    bool force = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("export", "Convert a checkpoint to a GGUF file for llama.cpp");
  verb->add_option("model", options->model, "Folder of a Hugging Face checkpoint")->required();
  verb->add_option("--gguf", options->type, "Type of the matrices: f32, f16, bf16 or q8_0")
      ->required()
      ->check(CLI::IsMember(gguf::written_types()));
  verb->add_option("--out", options->out, "File to write; it appears only once it is complete")->required();
  verb->add_flag("--force", options->force, "Replace an existing file");
  verb->footer("example: tapetune export /models/llama2-7b-8k --gguf q8_0 --out llama2-7b-8k.Q8_0.gguf");
  verb->callback([options] {
    const c10::InferenceMode inference;
    require_not_input(options->out, std::vector<std::filesystem::path>{options->model});
    const Checkpoint checkpoint = open_checkpoint(options->model);
    const PositionComponent& encoding = position_component({}, checkpoint.config());
    if (encoding.export_files != nullptr) {
      fail("export", "{}: llama.cpp does not support its positions, {}; nothing was written.", options->model,
           encoding.title);
    }
    gguf::ExportOptions write;
    write.type = gguf::written_types().at(options->type);
    write.tokenizer = options->model;
    write.name = (std::filesystem::absolute(options->model) / "").lexically_normal().parent_path().filename().string();
    write.replace = options->force;
    gguf::write_gguf(
        options->out, checkpoint.config(), [&](const std::string& name) { return checkpoint.tensor(name); }, write);
    print_wrote(options->out);
  });
}

}  // namespace tapetune::cli
