#include "data/pack.h"

#include <stdlib.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "checkpoint/folder.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/log.h"
#include "core/moment.h"
#include "core/progress.h"
#include "core/signals.h"
#include "data/encoder.h"
#include "data/utf8.h"
#include "hf/tokenizer.h"

namespace tapetune {

namespace {

constexpr std::size_t piece_bytes = 128 << 10;         // longer documents are split, where that is possible
constexpr std::size_t batch_bytes_a_thread = 1 << 20;  // of text that is tokenised together
constexpr std::size_t waiting_batches = 2;             // read ahead
constexpr std::string_view white_space = " \t\r\n\v\f";

struct Batch {
  std::vector<TextPiece> pieces;
  std::size_t bytes = 0;
  std::uint64_t consumed = 0;  // of the files, for the progress
};

struct Stopped {};  // thrown in the reading thread when nobody wants more

// Batches on their way from the reading thread to the one that writes.
class Queue {
 public:
  void push(Batch batch) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ || batches_.size() < waiting_batches; });
    if (stopped_) throw Stopped();
    batches_.push_back(std::move(batch));
    changed_.notify_all();
  }
  // False at the end. Throws what the reading thread threw, after what it had read before.
  bool pop(Batch& batch) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !batches_.empty() || ended_; });
    if (batches_.empty() && failure_) std::rethrow_exception(failure_);
    if (batches_.empty()) return false;
    batch = std::move(batches_.front());
    batches_.pop_front();
    changed_.notify_all();
    return true;
  }
  void end(std::exception_ptr failure) {
    const std::scoped_lock lock(mutex_);
    ended_ = true;
    failure_ = failure;
    changed_.notify_all();
  }
  void stop() {
    const std::scoped_lock lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Batch> batches_;
  std::exception_ptr failure_;
  bool ended_ = false, stopped_ = false;
};

// Makes pieces of documents that come bit by bit, and batches of pieces.
class Batcher {
 public:
  Batcher(Queue& queue, const SplitPoints& split_points, bool strip, std::size_t batch_bytes)
      : queue_(queue), split_points_(split_points), strip_(strip), batch_bytes_(batch_bytes) {}

  void begin_file(const TextFile& file) { file_ = &file; }

  void text(std::string_view part, std::uint64_t at) {
    pending_ += part;
    at_ = at;
    last_ = part.size();
    if (strip_ && !begun_) pending_.erase(0, std::min(pending_.find_first_not_of(white_space), pending_.size()));
    std::size_t begin = 0;
    while (split_points_.any() && pending_.size() - begin > piece_bytes) {
      const std::string_view rest = std::string_view(pending_).substr(begin);
      const std::size_t cut = split_points_.next_piece(rest, std::max(piece_bytes, searched_));
      if (cut == std::string_view::npos) {
        searched_ = rest.size() - SplitPoints::undecided;
        break;
      }
      give(std::string(rest.substr(0, cut)), false);
      begin += cut;
      searched_ = 0;
    }
    pending_.erase(0, begin);
    const std::size_t limit = split_points_.any() ? longest_stretch : longest_text;
    // What is no UTF-8 becomes U+FFFD, which has three bytes.
    if (3 * pending_.size() > limit && pending_.size() + 2 * count_invalid_utf8(pending_) > limit) refuse_long();
  }

  void end_document() {
    if (strip_) pending_.erase(pending_.find_last_not_of(white_space) + 1);
    if (begun_ || !pending_.empty()) give(std::exchange(pending_, {}), true);
    begun_ = false;
    searched_ = 0;
  }

  void consumed(std::uint64_t bytes) { batch_.consumed += bytes; }

  void flush() {
    if (batch_.pieces.empty() && batch_.consumed == 0) return;
    queue_.push(std::exchange(batch_, {}));
  }

 private:
  [[noreturn]] void refuse_long() const {
    const bool lines = file_->kind == TextFile::Kind::json_lines;
    std::size_t begin = 0;  // pieces are not split at the first place that there is
    for (std::size_t at = 0; (at = split_points_.next_piece(pending_, at + 1)) != std::string_view::npos;) begin = at;
    const std::string where =
        lines ? fmt::format("line {}", at_) : fmt::format("byte {}", at_ + last_ - pending_.size() + begin);
    if (!split_points_.any()) {
      fail("data",
           "{}: the document at {} has more than {} MB, the limit for a tokenizer that takes documents whole; {}.",
           file_->path.string(), where, longest_text >> 20,
           lines ? "split it into several lines" : "split the text into documents with --delimiter");
    }
    fail("data",
         "{}: the text at {} goes on for more than {} MB without a place to split it, such as a space between words; "
         "{}remove it{}.",
         file_->path.string(), where, longest_stretch >> 20,
         pending_.find('\0') != std::string::npos ? "it has NUL bytes, as binary files do; " : "",
         lines ? "" : ", or split it with --delimiter");
  }

  void give(std::string text, bool ends) {
    batch_.bytes += text.size() + sizeof(TextPiece);
    batch_.pieces.push_back({std::move(text), !begun_, ends});
    begun_ = true;
    if (batch_.bytes >= batch_bytes_) flush();
  }

  Queue& queue_;
  const SplitPoints& split_points_;
  bool strip_;
  std::size_t batch_bytes_;
  Batch batch_;
  std::string pending_;
  std::size_t searched_ = 0;  // up to here, pending_ has no place to split
  const TextFile* file_ = nullptr;
  std::uint64_t at_ = 0;  // where the last part of pending_ is: see DocumentReader
  std::size_t last_ = 0;  // bytes of that part
  bool begun_ = false;
};

std::optional<std::int64_t> frame(Frame frame, std::optional<std::int64_t> token, bool by_default, const char* name,
                                  const PackOptions& options) {
  if (frame == Frame::always && !token) {
    fail("data", "{}: tokenizer_config.json names no {} token; add it there, or pack with --{} none.",
         options.model.string(), name, name);
  }
  return frame == Frame::always || (frame == Frame::automatic && by_default) ? token : std::nullopt;
}

}  // namespace

Packed pack(const PackOptions& options) {
  require_writable(options.out, options.replace);
  refuse_gguf(options.model);
  std::map<std::string, std::size_t> skipped;
  const std::vector<TextFile> files = find_text_files(options.inputs, &skipped);
  std::vector<std::filesystem::path> read{options.model};
  for (const TextFile& file : files) read.push_back(file.path);
  require_not_input(options.out, read);
  // Before its first use: the tokenizers crate keeps its threads.
  if (options.threads > 0) ::setenv("RAYON_NUM_THREADS", std::to_string(options.threads).c_str(), 1);
  const Tokenizer tokenizer = Tokenizer::open(options.model);
  nlohmann::json json = read_tokenizer_json(options.model);
  const Vocabulary vocabulary = vocabulary_of(json, options.model);
  TextEncoder encoder(tokenizer, json, options.threads);
  json = {};

  TokenFileInfo settings;
  settings.vocabulary_hash = vocabulary.hash;
  settings.vocabulary_size = vocabulary.size;
  const TokenIds framed = tokenizer.encode("a");
  const bool adds_bos = tokenizer.bos() && !framed.empty() && framed.front() == *tokenizer.bos();
  settings.bos = frame(options.bos, tokenizer.bos(), adds_bos, "bos", options);
  settings.eos = frame(options.eos, tokenizer.eos(), true, "eos", options);

  Packed packed{settings, files.size(), 0};
  for (const TextFile& file : files) packed.bytes += file.bytes;
  TokenFileWriter writer(options.out, options.replace, settings);
  Progress progress("packing", packed.bytes, "B");
  Queue queue;
  std::size_t replaced = 0, empty = 0;
  std::jthread reader([&] {
    try {
      Batcher batcher(queue, encoder.split_points(), options.strip,
                      batch_bytes_a_thread * static_cast<std::size_t>(encoder.threads()));
      for (const TextFile& file : files) {
        bool any = false;
        batcher.begin_file(file);
        replaced += read_documents(file, options.format,
                                   {.text =
                                        [&](std::string_view text, std::uint64_t at) {
                                          any = any || !text.empty();
                                          batcher.text(text, at);
                                        },
                                    .end = [&] { batcher.end_document(); },
                                    .consumed = [&](std::uint64_t bytes) { batcher.consumed(bytes); }});
        if (!any) ++empty;
      }
      batcher.flush();
      queue.end(nullptr);
    } catch (const Stopped&) {
    } catch (...) {
      queue.end(std::current_exception());
    }
  });
  // However this function is left, the reader must not wait for room forever.
  const std::unique_ptr<Queue, void (*)(Queue*)> stop(&queue, [](Queue* waiting) { waiting->stop(); });

  for (Batch batch; queue.pop(batch);) {
    at_moment("batch");
    check_interrupted();
    const std::vector<std::vector<std::uint32_t>> ids = encoder.encode(batch.pieces);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (batch.pieces[i].begins && settings.bos) writer.append(static_cast<std::uint32_t>(*settings.bos));
      writer.append(ids[i]);
      if (!batch.pieces[i].ends) continue;
      if (settings.eos) writer.append(static_cast<std::uint32_t>(*settings.eos));
      writer.end_document();
    }
    progress.advance(batch.consumed);
  }
  check_interrupted();
  if (writer.info().documents == 0) {
    fail("data", "there is no text in {}; give files that are not empty.",
         files.size() == 1 ? files[0].path.string() : fmt::format("these {} files", files.size()));
  }
  writer.commit();
  packed.info = writer.info();
  replaced += encoder.invalid();
  if (replaced > 0) warn("{} of the text replaced by U+FFFD: not UTF-8.", counted(replaced, "part"));
  if (empty > 0) warn("{} of {} contain no text.", empty, counted(files.size(), "file"));
  if (!skipped.empty()) {
    std::size_t all = 0;
    std::vector<std::string> kinds;
    for (const auto& [kind, count] : skipped) {
      all += count;
      kinds.push_back(fmt::format("{} {}", count, kind));
    }
    warn("{} in the folders {} not packed: {}; only .txt and .jsonl are, also with .gz or .zst.", counted(all, "file"),
         all == 1 ? "was" : "were", fmt::join(kinds, ", "));
  }
  return packed;
}

}  // namespace tapetune
