#include <CLI/CLI.hpp>

#include <cstdio>
#include <map>

#include "checkpoint/folder.h"
#include "cli/numbers.h"
#include "cli/verbs.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/json.h"
#include "core/output.h"
#include "core/signals.h"
#include "data/pack.h"
#include "data/token_file.h"
#include "hf/tokenizer.h"

namespace tapetune::cli {

namespace {

// \n, \t and \\ as a shell leaves them.
std::string unescaped(const std::string& text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char next = text[i] == '\\' && i + 1 < text.size() ? text[i + 1] : '\0';
    const bool known = next == 'n' || next == 't' || next == '\\';
    plain += !known ? text[i] : next == 'n' ? '\n' : next == 't' ? '\t' : '\\';
    if (known) ++i;
  }
  return plain;
}

void add_pack(CLI::App& app) {
  const auto options = std::make_shared<PackOptions>();
  CLI::App* verb = app.add_subcommand("pack", "Pack text into a token file");
  const std::map<std::string, Frame> frames{
      {"auto", Frame::automatic}, {"always", Frame::always}, {"none", Frame::never}};
  verb->add_option("text", options->inputs, ".txt or .jsonl, also with .gz or .zst; folders; patterns in quotes")
      ->required();
  verb->add_option("--model", options->model, "Folder with tokenizer.json")->required();
  verb->add_option("--out", options->out, "Token file to write; it appears only when all of it is on disk")->required();
  verb->add_option("--delimiter", options->format.delimiter,
                   "Splits a .txt into documents; \\n and \\t are understood (default: a file is a document)");
  verb->add_option("--key", options->format.key, "Key of the text in each line of a .jsonl")->capture_default_str();
  verb->add_option("--bos", options->bos, "Before each document: auto (as the checkpoint does), always or none")
      ->transform(CLI::Transformer(frames))
      ->default_str("auto");
  verb->add_option("--eos", options->eos, "After each document: auto (where the tokenizer has it), always or none")
      ->transform(CLI::Transformer(frames))
      ->default_str("auto");
  verb->add_flag("--strip", options->strip, "Strip white space from both ends of each document");
  verb->add_option("--threads", options->threads, "CPU threads (default: all cores)")->transform(thread_count());
  verb->add_flag("--force", options->replace, "Replace an existing token file");
  verb->footer(
      "example: tapetune data pack books/ 'more/*.jsonl.zst' --model /models/Llama-2-7b-hf --out books.tokens");
  verb->callback([options] {
    options->format.delimiter = unescaped(options->format.delimiter);
    const Packed packed = pack(*options);
    print_out("{}: {} of {} bits in {}, from {} of {} bytes\n", options->out.string(),
              counted(packed.info.tokens, "token"), 8 * packed.info.token_bytes,
              counted(packed.info.documents, "document"), counted(packed.files, "file"), grouped(packed.bytes));
  });
}

struct ShowOptions {
  std::string file, model;
  std::int64_t documents = 1, from = 0;
  bool json = false, raw = false;
};

Json header(const TokenFile& file) {
  const TokenFileInfo& info = file.info();
  const auto id = [](std::optional<std::int64_t> token) { return token ? Json(*token) : Json(); };
  Json json{{"file", file.path().string()},
            {"raw", info.raw},
            {"tokens", info.tokens},
            {"documents", info.documents},
            {"bits", 8 * info.token_bytes},
            {"vocabulary", info.vocabulary_size},
            {"vocabulary_hash", fmt::format("{:016x}", info.vocabulary_hash)}};
  json["bos"] = id(info.bos);
  json["eos"] = id(info.eos);
  if (info.raw) {
    for (const char* unknown : {"documents", "vocabulary", "vocabulary_hash"}) json[unknown] = nullptr;
  }
  return json;
}

// A raw file does not say where its documents end; EOS does.
std::pair<std::int64_t, std::int64_t> raw_document(const TokenFile& file, std::int64_t begin,
                                                   std::optional<std::int64_t> eos) {
  TokenIds block(1 << 16);
  for (std::int64_t at = begin; at < file.size(); at += static_cast<std::int64_t>(block.size())) {
    check_interrupted();
    block.resize(std::min<std::size_t>(block.size(), static_cast<std::size_t>(file.size() - at)));
    file.read(at, block);
    const auto found = eos ? std::ranges::find(block, *eos) : block.end();
    if (found != block.end()) return {begin, at + (found - block.begin()) + 1};
  }
  return {begin, file.size()};
}

// Without holding a document of any length, or its text.
void print_document(const TokenFile& file, const Tokenizer& tokenizer, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t block = 4096;
  TokenStream stream = tokenizer.stream();
  for (; begin < end; begin += block) {
    check_interrupted();
    TokenIds ids(static_cast<std::size_t>(std::min(block, end - begin)));
    file.read(begin, ids);
    write_text(stream.push(ids));
  }
  write_text(stream.finish() + "\n");
}

void show(const ShowOptions& options) {
  const TokenFile file = options.raw ? TokenFile::open_raw(options.file) : TokenFile::open(options.file);
  if (options.json) {
    if (!options.model.empty()) file.require_vocabulary(read_vocabulary(options.model));
    print_out("{}\n", to_text(header(file)));
    return;
  }
  if (options.model.empty())
    fail("data", "showing documents needs a tokenizer; give --model DIR, or --json for the header.");
  refuse_gguf(options.model);
  const Tokenizer tokenizer = Tokenizer::open(options.model);
  const Vocabulary vocabulary = read_vocabulary(options.model);
  file.require_vocabulary(vocabulary);
  const TokenFile readable = options.raw ? TokenFile::open_raw(options.file, vocabulary.size) : file;
  if (!options.raw && options.from >= file.info().documents) {
    fail("data", "{}: has {} documents, counted from 0, so that --from {} is beyond its end.", options.file,
         file.info().documents, options.from);
  }
  std::pair<std::int64_t, std::int64_t> place{0, 0};
  for (std::int64_t i = options.raw ? 0 : options.from; i < options.from + options.documents; ++i) {
    if (options.raw && place.second == file.size()) break;
    if (!options.raw && i == file.info().documents) break;
    place = options.raw ? raw_document(readable, place.second, tokenizer.eos()) : file.document(i);
    if (i < options.from) continue;
    print_out("--- document {}, {} tokens\n", i, place.second - place.first);
    print_document(readable, tokenizer, place.first, place.second);
  }
}

void add_show(CLI::App& app) {
  const auto options = std::make_shared<ShowOptions>();
  CLI::App* verb = app.add_subcommand("show", "Show documents of a token file as text, or its header");
  verb->add_option("file", options->file, "Token file")->required();
  verb->add_option("--model", options->model, "Folder with the tokenizer.json that the file was packed with");
  verb->add_option("--documents", options->documents, "How many to print")
      ->transform(whole_number(0))
      ->capture_default_str();
  verb->add_option("--from", options->from, "The first to print, counted from 0")
      ->transform(whole_number(0))
      ->capture_default_str();
  verb->add_flag("--raw", options->raw, "The file is 16-bit tokens without a header (LongLoRA's .bin)");
  verb->add_flag("--json", options->json, "Only the header, as JSON");
  verb->footer("example: tapetune data show books.tokens --model /models/Llama-2-7b-hf --from 2");
  verb->callback([options] { show(*options); });
}

}  // namespace

void add_data(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("data", "Pack text into token files, and show them");
  verb->require_subcommand(1);
  verb->footer(
      "example: tapetune data pack books/ --model /models/Llama-2-7b-hf --out books.tokens\n"
      "         tapetune data show books.tokens --model /models/Llama-2-7b-hf");
  add_pack(*verb);
  add_show(*verb);
}

}  // namespace tapetune::cli
