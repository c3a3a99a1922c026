#include <c10/core/InferenceMode.h>
#include <CLI/CLI.hpp>

#include "adapters/checkpoints.h"
#include "adapters/component.h"
#include "checkpoint/dtype.h"
#include "checkpoint/writer.h"
#include "cli/verbs.h"
#include "cli/wrote.h"
#include "core/error.h"

namespace tapetune::cli {

void add_convert(CLI::App& app) {
  struct Options {
    std::string model, out, dtype = "keep", shard_size = "5GB";
    bool force = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("convert", "Rewrite a checkpoint: dtype, sharding, current config.json format");
  verb->add_option("model", options->model, "Folder of a Hugging Face checkpoint")->required();
  verb->add_option("--out", options->out, "Folder to write; it appears only once it is complete")->required();
  verb->add_option("--dtype", options->dtype, "keep (as stored), f32, f16 or bf16 (default: keep)")
      ->check(CLI::IsMember({"keep", "f32", "f16", "bf16"}));
  verb->add_option("--shard-size", options->shard_size, "Largest file, in decimal units (default: 5GB)");
  verb->add_flag("--force", options->force, "Replace a folder that this command wrote");
  verb->footer("example: tapetune convert /models/Llama-2-7b-hf --dtype bf16 --out /models/llama2-7b-bf16");
  verb->callback([options] {
    const c10::InferenceMode inference;
    require_not_input(options->out, std::vector<std::filesystem::path>{options->model});
    WriteOptions write{parse_size(options->shard_size), options->force, options->model};
    const Checkpoint checkpoint = open_checkpoint(options->model);
    const PositionComponent& encoding = position_component({}, checkpoint.config());
    if (has_position_tensors(checkpoint)) {
      fail("convert", "{}: holds {}'s position tensors; rewrite it with tapetune merge, which keeps them.",
           options->model, encoding.title);
    }
    if (encoding.export_files != nullptr) {
      write.complete = [&](Files& files) {
        encoding.export_files(default_settings(encoding.name, encoding.keys), checkpoint.config(), options->model,
                              files);
      };
    }
    std::vector<PlannedTensor> plan;
    for (const TensorSpec& expected : tensor_specs(checkpoint.config())) {
      const TensorEntry& entry = checkpoint.stored().find(expected.name)->second.entry;
      const at::ScalarType stored = dtype_from_safetensors(entry.dtype).value();
      plan.push_back(
          {expected.name, options->dtype == "keep" ? stored : dtype_from_word(options->dtype).value(), entry.shape});
    }
    write_checkpoint(
        options->out, checkpoint.config(), plan, [&](const std::string& name) { return checkpoint.tensor(name); },
        write);
    print_wrote(options->out);
  });
}

}  // namespace tapetune::cli
