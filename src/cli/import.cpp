#include "gguf/import.h"

#include <c10/core/InferenceMode.h>
#include <CLI/CLI.hpp>

#include "checkpoint/dtype.h"
#include "checkpoint/writer.h"
#include "cli/verbs.h"
#include "cli/wrote.h"
#include "core/file.h"

namespace tapetune::cli {

void add_import(CLI::App& app) {
  struct Options {
    std::string file, out, dtype, shard_size = "5GB";
    bool force = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("import", "Convert a GGUF file to a Hugging Face checkpoint");
  verb->add_option("file", options->file, "GGUF file with F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K or Q6_K tensors")
      ->required();
  verb->add_option("--out", options->out, "Folder to write; it appears only once it is complete")->required();
  verb->add_option("--dtype", options->dtype, "f32, f16 or bf16 (default: as stored; f32 if the file is quantized)")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}));
  verb->add_option("--shard-size", options->shard_size, "Largest file, in decimal units (default: 5GB)");
  verb->add_flag("--force", options->force, "Replace a folder that this command wrote");
  verb->footer("example: tapetune import SmolLM2-135M-Instruct.Q4_1.gguf --out /models/smollm2-135m");
  verb->callback([options] {
    const c10::InferenceMode inference;
    require_not_input(options->out, std::vector<std::filesystem::path>{options->file});
    gguf::ImportOptions import;
    if (!options->dtype.empty()) import.dtype = dtype_from_word(options->dtype).value();
    import.shard_bytes = parse_size(options->shard_size);
    import.replace = options->force;
    gguf::import_gguf(options->file, options->out, import);
    print_wrote(options->out);
  });
}

}  // namespace tapetune::cli
