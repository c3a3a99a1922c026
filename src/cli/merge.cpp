#include "export/merge.h"

#include <c10/core/InferenceMode.h>
#include <CLI/CLI.hpp>

#include "adapters/peft_config.h"
#include "checkpoint/dtype.h"
#include "cli/verbs.h"
#include "cli/wrote.h"
#include "core/error.h"
#include "core/log.h"

namespace tapetune::cli {

void add_merge(CLI::App& app) {
  struct Options {
    std::string folder, model, out, dtype = "keep", shard_size = "5GB", gguf;
    bool adapter = false, with_base = true, force = false, any_base = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("merge", "Merge a run into a checkpoint for other tools, or write its adapter");
  verb->add_option(
          "run", options->folder,
          "Folder of a training run, of a checkpoint of one (RUN/checkpoints/step-N), of a PEFT adapter, or of "
          "a model with TAPE's tensors")
      ->required();
  verb->add_option("--model", options->model,
                   "The base model's folder (default: the one that the run or the adapter names)");
  verb->add_option("--out", options->out, "Folder to write (with --gguf, a file); it appears only once it is complete")
      ->required();
  CLI::Option* adapter = verb->add_flag("--adapter", options->adapter, "Write the adapter instead, for PEFT");
  verb->add_flag("--with-base,!--no-with-base", options->with_base,
                 "For tape: --no-with-base writes its adapter alone");
  CLI::Option* dtype = verb->add_option("--dtype", options->dtype, "keep (the base model's), f32, f16 or bf16")
                           ->check(CLI::IsMember({"keep", "f32", "f16", "bf16"}));
  CLI::Option* shards =
      verb->add_option("--shard-size", options->shard_size, "Largest file, in decimal units (default: 5GB)");
  verb->add_option("--gguf", options->gguf, "Write one GGUF file for llama.cpp: f32, f16, bf16 or q8_0")
      ->check(CLI::IsMember(gguf::written_types()))
      ->excludes(adapter)
      ->excludes(shards);
  adapter->excludes(dtype)->excludes(shards);
  verb->add_flag("--force", options->force, "Replace a file, or a folder that this command wrote");
  verb->add_flag("--any-base", options->any_base, "Use the base model even if it changed since training");
  verb->footer(
      "example: tapetune merge runs/lora --out models/lora-8k\n"
      "         tapetune merge runs/lora --adapter --out adapters/lora-8k\n"
      "         tapetune merge some-peft-adapter --model /models/Llama-2-7b-hf --out models/merged");
  verb->callback([options] {
    const c10::InferenceMode inference;
    if (options->out.ends_with(".gguf") && options->gguf.empty()) {
      fail("merge", "{}: merge writes a folder; for a GGUF file add --gguf q8_0 (or f32, f16, bf16).", options->out);
    }
    MergeOptions merging;
    merging.out = options->out;
    if (options->dtype != "keep") merging.dtype = dtype_from_word(options->dtype);
    merging.shard_bytes = parse_size(options->shard_size);
    merging.replace = options->force;
    merging.any_base = options->any_base;
    merging.version = TAPETUNE_VERSION;
    const MergeInput input = open_merge(options->folder, options->model);
    if (!options->with_base && peft_loads(input.method)) {
      fail("merge",
           "{}: --no-with-base is for adapters that PEFT does not load, as tape's; give --adapter for this one.",
           options->folder);
    }
    if (options->adapter || !options->with_base) {
      export_adapter(input, merging);
      if (!peft_loads(input.method)) {
        note("only tapetune loads this adapter ({}), PEFT does not; for transformers, merge without {}",
             input.method.name(), options->adapter ? "--adapter" : "--no-with-base");
      }
    } else if (!options->gguf.empty()) {
      merge_gguf(input, gguf::written_types().at(options->gguf), merging);
    } else {
      merge(input, merging);
    }
    print_wrote(options->out);
  });
}

}  // namespace tapetune::cli
