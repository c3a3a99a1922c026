#include <CLI/CLI.hpp>

#include <fstream>
#include <iostream>

#include "checkpoint/folder.h"
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

// As std::getline, but a line without end is refused before it fills the memory.
bool next_line(std::istream& in, std::string& line, std::string_view where, std::size_t limit) {
  line.clear();
  std::streambuf& from = *in.rdbuf();
  constexpr int end = std::char_traits<char>::eof();
  int c = from.sbumpc();
  if (c == end) return false;
  for (; c != end && c != '\n'; c = from.sbumpc()) {
    if (line.size() == limit) fail("tokenizer", "{}: has a line of more than {} bytes; split it.", where, limit);
    line += static_cast<char>(c);
  }
  return true;
}

void encode_lines(const Tokenizer& tokenizer, std::istream& in, bool special, std::string_view where) {
  constexpr std::size_t block = 4096, block_bytes = 1 << 20;  // lines that are encoded in parallel
  std::vector<std::string> lines;
  std::size_t bytes = 0;
  const auto flush = [&] {
    const std::vector<std::string_view> views(lines.begin(), lines.end());
    for (const TokenIds& ids : tokenizer.encode_batch(views, special)) print_out("[{}]\n", fmt::join(ids, ","));
    lines.clear();
    bytes = 0;
    check_interrupted();
  };
  for (std::string line; next_line(in, line, where, longest_text);) {
    bytes += line.size();
    lines.push_back(std::move(line));
    if (lines.size() == block || bytes > block_bytes) flush();
  }
  flush();
}

void decode_lines(const Tokenizer& tokenizer, std::istream& in, bool skip_special, std::string_view where) {
  constexpr std::size_t longest_line = 8 * longest_text;  // a token and its id in digits
  for (std::string line; next_line(in, line, where, longest_line);) {
    check_interrupted();
    const Json ids = parse_json(line, "tokenizer", where);
    TokenIds tokens;
    for (const Json& id : ids) {
      if (!id.is_number_integer()) fail("tokenizer", "{}: {} is not a token id.", where, to_text(id));
      tokens.push_back(id.get<std::int64_t>());
    }
    print_out("{}\n", to_text(Json(tokenizer.decode(tokens, skip_special))));
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
    refuse_gguf(options->model);
    const Tokenizer tokenizer = Tokenizer::open(options->model);
    const std::string where = options->file.empty() ? "standard input" : options->file;
    std::ifstream file;
    if (!options->file.empty()) {
      require_readable(options->file);
      file.open(options->file, std::ios::binary);
      if (!file) fail("tokenizer", "{}: cannot be read as a file; check the path.", options->file);
    }
    std::istream& in = options->file.empty() ? std::cin : file;
    if (options->decode) {
      decode_lines(tokenizer, in, !options->no_special, where);
    } else {
      encode_lines(tokenizer, in, !options->no_special, where);
    }
  });
}

}  // namespace tapetune::cli
