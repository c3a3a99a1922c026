#include <c10/core/InferenceMode.h>
#include <CLI/CLI.hpp>

#include "checkpoint/writer.h"
#include "cli/loaded_model.h"
#include "cli/verbs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"

namespace tapetune::cli {

void add_logits(CLI::App& app) {
  struct Options {
    ModelOptions model;
    std::string tokens, tokens_file, text, out;
    bool hidden = false, force = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "logits", "Write the logits of every position to a safetensors file, to compare with other tools");
  add_loaded_model(*verb, options->model);
  auto* input = verb->add_option_group("input", "Input (one of)");
  input->add_option("--tokens", options->tokens, "Token ids, as 1,2,3");
  input->add_option("--tokens-file", options->tokens_file,
                    "File with token ids, separated by spaces, commas or newlines");
  const CLI::Option* text =
      input->add_option("--text", options->text, "Text, tokenized with BOS and EOS as the tokenizer adds them");
  input->require_option(1);
  verb->add_option("--out", options->out, "File to write: logits [N, vocab] f32")->required();
  verb->add_flag("--hidden", options->hidden,
                 "Also write hidden.K, the input of layer K; the last is after the final norm");
  verb->add_flag("--force", options->force, "Replace an existing file");
  verb->footer("example: tapetune logits /models/Llama-2-7b-hf --text 'Hello' --out logits.safetensors");
  verb->callback([options, text] {
    const c10::InferenceMode inference;
    require_writable(options->out, options->force);
    require_not_input(options->out, std::vector<std::filesystem::path>{options->model.folder, options->tokens_file});
    const LoadedModel loaded = open_loaded_model(options->model);
    const Llama& model = loaded.adapted.model;
    const std::vector<std::int64_t> tokens = !options->tokens_file.empty()
                                                 ? parse_tokens(read_text(options->tokens_file), options->tokens_file)
                                             : text->count() > 0 ? loaded.open_tokenizer().encode(options->text)
                                                                 : parse_tokens(options->tokens, "--tokens");
    if (tokens.empty()) fail("logits", "the text has no tokens; give a longer one.");
    const std::int64_t context = model.config().longest_context();
    if (static_cast<std::int64_t>(tokens.size()) > context) {
      warn("{} tokens are more than the model's context of {}; expect poor logits beyond it", tokens.size(), context);
    }
    ForwardInput in;
    in.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
    in.all_hidden = options->hidden;
    const ForwardOutput out = model.forward(in);
    std::map<std::string, at::Tensor> tensors{{"logits", model.logits(out.last[0]).to(at::kFloat)}};
    for (std::size_t k = 0; k < out.hidden.size(); ++k) {
      tensors[fmt::format("hidden.{}", k)] = out.hidden[k][0].to(at::kFloat);
    }
    save_safetensors(options->out, tensors, options->force);
  });
}

}  // namespace tapetune::cli
