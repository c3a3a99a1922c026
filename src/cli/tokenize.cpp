#include <CLI/CLI.hpp>

#include <iostream>

#include "cli/verbs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/output.h"
#include "core/signals.h"
#include "hf/tokenizer.h"

namespace tapetune::cli {

namespace {

struct TokenizeOptions {
  std::string model, file;
  bool decode = false, no_special = false;
};

void encode_lines(const Tokenizer& tokenizer, std::istream& in, bool special) {
  constexpr std::size_t block = 4096;  // lines that are encoded in parallel
  std::vector<std::string> lines;
  const auto flush = [&] {
    const std::vector<std::string_view> views(lines.begin(), lines.end());
    for (const TokenIds& ids : tokenizer.encode_batch(views, special)) print_out("[{}]\n", fmt::join(ids, ","));
    lines.clear();
    check_interrupted();
  };
  for (std::string line; std::getline(in, line);) {
    lines.push_back(std::move(line));
    if (lines.size() == block) flush();
  }
  flush();
}

void decode_lines(const Tokenizer& tokenizer, std::istream& in, bool skip_special, std::string_view where) {
  for (std::string line; std::getline(in, line);) {
    check_interrupted();
    const Json ids = parse_json(line, "tokenizer", where);
    TokenIds tokens;
    for (const Json& id : ids) {
      if (!id.is_number_integer()) fail("tokenizer", "{}: {} is not a token id.", where, to_text(id));
      tokens.push_back(id.get<std::int64_t>());
    }
    print_out("{}\n", to_text(Json(tokenizer.decode(tokens, skip_special)), -1, Json::error_handler_t::replace));
  }
}

}  // namespace

void add_tokenize(CLI::App& app) {
  const auto options = std::make_shared<TokenizeOptions>();
  CLI::App* verb = app.add_subcommand("tokenize", "Encode lines of text as token ids, or decode them");
  verb->add_option("model", options->model, "Folder with tokenizer.json")->required();
  verb->add_option("--file", options->file, "Text to read (default: standard input)");
  verb->add_flag("--no-special", options->no_special, "Do not add BOS and EOS tokens");
  verb->add_flag("--decode", options->decode,
                 "Decode lines of ids, as printed by this command, to text (JSON strings)");
  verb->footer("example: echo 'Hello there' | tapetune tokenize /models/Llama-2-7b-hf");
  verb->callback([options] {
    const Tokenizer tokenizer = Tokenizer::open(options->model);
    std::ifstream file;
    if (!options->file.empty()) {
      std::error_code status;
      file.open(options->file, std::ios::binary);
      if (!file || std::filesystem::is_directory(options->file, status))
        fail("tokenizer", "{}: cannot be read as a file; check the path.", options->file);
    }
    std::istream& in = options->file.empty() ? std::cin : file;
    if (options->decode) {
      decode_lines(tokenizer, in, !options->no_special, options->file.empty() ? "standard input" : options->file);
    } else {
      encode_lines(tokenizer, in, !options->no_special);
    }
  });
}

}  // namespace tapetune::cli
