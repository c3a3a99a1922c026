#include "model/generate.h"

#include <c10/core/InferenceMode.h>
#include <CLI/CLI.hpp>

#include <chrono>

#include "cli/loaded_model.h"
#include "cli/numbers.h"
#include "cli/verbs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "core/output.h"
#include "core/signals.h"
#include "hf/tokenizer.h"

namespace tapetune::cli {

namespace {

struct Options {
  ModelOptions model;
  std::vector<std::string> prompts, tokens;
  std::string prompt_file;
  GenerateOptions generate;
  bool no_cache = false, ignore_eos = false, json = false, no_echo = false, timing = false;
};

struct Prompt {
  std::string text;
  TokenIds tokens;
};

std::vector<Prompt> read_prompts(const Options& options, const Tokenizer* tokenizer) {
  std::vector<Prompt> prompts;
  for (const std::string& tokens : options.tokens) {
    Prompt prompt{{}, parse_tokens(tokens, "--tokens")};
    if (tokenizer != nullptr) prompt.text = tokenizer->decode(prompt.tokens);
    prompts.push_back(std::move(prompt));
  }
  std::vector<std::string> texts = options.prompts;
  if (!options.prompt_file.empty()) {
    const std::string file = read_text(options.prompt_file);
    for (std::size_t begin = 0; begin < file.size();) {
      const std::size_t end = std::min(file.find('\n', begin), file.size());
      if (end > begin) texts.push_back(file.substr(begin, end - begin));
      begin = end + 1;
    }
    if (texts.empty()) fail("generate", "{}: has no prompt; write one per line.", options.prompt_file);
  }
  for (std::string& text : texts) {
    TokenIds tokens = tokenizer->encode_prompt(text);
    if (tokens.empty() && tokenizer->bos()) tokens.push_back(*tokenizer->bos());
    prompts.push_back({std::move(text), std::move(tokens)});
  }
  return prompts;
}

// generation_config.json knows the ends of a text best; config.json is older and may name only one.
std::vector<std::int64_t> end_tokens(const std::filesystem::path& folder, const ModelConfig& config_json) {
  const std::filesystem::path path = folder / "generation_config.json";
  std::error_code status;
  if (!std::filesystem::exists(path, status)) return config_json.eos;
  const Json config = parse_json(read_text(path), "generate", path.string());
  const auto eos = config.find("eos_token_id");
  if (eos == config.end() || eos->is_null()) return config_json.eos;
  std::vector<std::int64_t> ids;
  for (const Json& id : eos->is_array() ? *eos : Json::array({*eos})) {
    if (!id.is_number_integer())
      fail("generate", "{}: eos_token_id must be a token id or a list of them.", path.string());
    ids.push_back(id.get<std::int64_t>());
  }
  return ids;
}

void put(const std::string& text) {
  write_text(text);
  flush_out();
}

void run(const Options& options) {
  const c10::InferenceMode inference;
  const auto start = std::chrono::steady_clock::now();
  const LoadedModel loaded = open_loaded_model(options.model);
  const Llama& model = loaded.adapted.model;
  std::error_code status;
  const bool with_text = options.tokens.empty() || std::filesystem::exists(loaded.tokenizer / "tokenizer.json", status);
  std::optional<Tokenizer> tokenizer;
  if (with_text) tokenizer.emplace(loaded.open_tokenizer());
  const std::vector<Prompt> prompts = read_prompts(options, tokenizer ? &*tokenizer : nullptr);

  GenerateOptions wanted = options.generate;
  wanted.use_cache = !options.no_cache;
  if (!options.ignore_eos) wanted.eos = end_tokens(loaded.tokenizer, model.config());
  if (wanted.context > model.config().longest_context()) {
    warn("--context {} is longer than the model's context of {}; expect worse text past it", wanted.context,
         model.config().longest_context());
  }
  std::vector<std::vector<std::int64_t>> tokens;
  tokens.reserve(prompts.size());
  for (const Prompt& prompt : prompts) tokens.push_back(prompt.tokens);

  // One prompt streams; several come out one after the other when all are done. The prompt is echoed with the first
  // token, so that nothing is printed when it is refused.
  const bool streaming = !options.json && prompts.size() == 1 && tokenizer;
  std::optional<TokenStream> stream;
  const auto start_text = [&](const Prompt& prompt) {
    stream.emplace(tokenizer->stream());
    return stream->push(prompt.tokens);
  };
  const auto rest_of_text = [&](const TokenIds& tokens) {
    std::string text = stream->push(tokens);
    text += stream->finish();
    return text;
  };
  const auto echo = [&](const Prompt& prompt) {
    const std::string text = start_text(prompt);
    if (!options.no_echo) put(text);
  };
  const double load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  GenerateTimes times;
  std::vector<Generated> results;
  try {
    results = generate(
        model, tokens, wanted,
        [&](std::size_t, std::int64_t token) {
          if (!streaming) return;
          if (!stream) echo(prompts.front());
          put(stream->push(std::array{token}));
        },
        &times);
  } catch (const NotFinite& error) {
    fail_naming_weight(loaded, error);
  }

  for (std::size_t i = 0; i < results.size(); ++i) {
    if (options.json) {
      Json line;
      line["prompt"] = prompts[i].text;
      line["prompt_tokens"] = prompts[i].tokens;
      line["tokens"] = results[i].tokens;
      if (tokenizer) {
        start_text(prompts[i]);
        line["text"] = rest_of_text(results[i].tokens);
      }
      line["stopped"] = stop_name(results[i].stop);
      put(to_text(line) + "\n");
    } else if (streaming) {
      if (!stream) echo(prompts.front());
      put(stream->finish() + "\n");
    } else if (tokenizer) {
      echo(prompts[i]);
      put(rest_of_text(results[i].tokens) + "\n");
    } else {
      put(fmt::format("{}\n", fmt::join(results[i].tokens, ",")));
    }
    if (results[i].stop == Stop::context) {
      warn("prompt {}: stopped at the context of {} tokens", i + 1,
           wanted.context > 0 ? wanted.context : model.config().longest_context());
    }
  }
  if (options.timing) {
    const Json line = {{"load_seconds", load_seconds},
                       {"prefill_tokens", times.prefill_tokens},
                       {"prefill_seconds", times.prefill_seconds},
                       {"decode_tokens", times.decode_tokens},
                       {"decode_seconds", times.decode_seconds}};
    write_error(to_text(line) + "\n");
  }
  if (interrupted()) throw Interrupted("interrupted; the text so far is complete");
}

}  // namespace

void add_generate(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  GenerateOptions& g = options->generate;
  CLI::App* verb = app.add_subcommand("generate", "Generate text from a prompt");
  add_loaded_model(*verb, options->model, /*seeded=*/true);
  auto* input = verb->add_option_group("prompt", "Prompt (one of)");
  input->add_option("--prompt", options->prompts, "Text to continue; repeat the option for several prompts")
      ->allow_extra_args(false);
  input->add_option("--prompt-file", options->prompt_file,
                    "File with one prompt per line; they are decoded as a batch");
  input->add_option("--tokens", options->tokens, "Token ids, as 1,2,3 (needs no tokenizer); repeat for several prompts")
      ->allow_extra_args(false);
  input->require_option(1);
  verb->add_option("--max-new-tokens", g.max_new_tokens, "Stop after this many tokens (default: 256)")
      ->transform(whole_number(0));
  verb->add_option("--context", g.context, "Longest prompt plus output, in tokens (default: the model's context)")
      ->transform(context_length());
  verb->add_option("--temperature", g.sampling.temperature, "Sampling temperature; 0 is greedy decoding (default: 0)");
  verb->add_option("--top-k", g.sampling.top_k, "Sample from the k most likely tokens (default: 0, all)");
  verb->add_option("--top-p", g.sampling.top_p, "Sample from the smallest set of tokens with this total probability");
  verb->add_option("--seed", g.sampling.seed, "Seed of the sampling: the same seed gives the same text");
  verb->add_flag("--ignore-eos", options->ignore_eos, "Do not stop at EOS");
  verb->add_flag("--no-echo", options->no_echo, "Print the continuation without the prompt");
  verb->add_flag("--no-cache", options->no_cache,
                 "Recompute all tokens at each step instead of using the KV cache (slow)");
  verb->add_flag("--json", options->json, "Print one JSON object per prompt: prompt_tokens, tokens, text, stopped");
  verb->add_flag("--timing", options->timing, "Print the seconds of loading, prefill and decoding as JSON on stderr");
  verb->footer("example: tapetune generate /models/Llama-2-7b-hf --prompt 'Once upon a time' --max-new-tokens 100");
  verb->callback([options] { run(*options); });
}

}  // namespace tapetune::cli
