#include "data/encoder.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "core/cores.h"
#include "core/error.h"
#include "data/utf8.h"

namespace tapetune {

namespace {

constexpr std::size_t task_bytes = 64 << 10;    // of text: small enough to spread, large enough not to be felt
constexpr std::size_t slice_bytes = 128 << 10;  // a thread: the tokenizer needs a hundred times its text for a while
constexpr std::size_t longest_word = 48;        // longer ones hardly come again
constexpr std::size_t most_words = 1 << 19;     // about 60 MB with their ids; then all is forgotten

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = text.size() * 0x9e3779b97f4a7c15;
  const auto add = [&](std::uint64_t eight) {
    hash = (hash ^ eight) * 0xbf58476d1ce4e5b9;
    hash ^= hash >> 29;
  };
  while (text.size() >= 8) {
    std::uint64_t eight;
    std::memcpy(&eight, text.data(), 8);
    add(eight);
    text.remove_prefix(8);
  }
  if (!text.empty()) {
    std::uint64_t rest = 0;
    std::memcpy(&rest, text.data(), text.size());
    add(rest);
  }
  return hash * 0x94d049bb133111eb | 1;  // never 0, which marks an empty slot
}

// A tokenizer may have no id at all for a word of which the first would be dropped.
std::span<const std::uint32_t> without_first(std::span<const std::uint32_t> ids, bool drop_first) {
  return drop_first && !ids.empty() ? ids.subspan(1) : ids;
}

// Runs work(0) … work(count - 1) on this many threads and throws what one of them threw.
template <typename Work>
void in_parallel(int threads, std::size_t count, const Work& work) {
  std::atomic<std::size_t> next = 0;
  std::exception_ptr failure;
  std::mutex mutex;
  const auto loop = [&] {
    try {
      for (std::size_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      const std::scoped_lock lock(mutex);
      failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < std::min(count, static_cast<std::size_t>(threads)); ++i) others.emplace_back(loop);
    loop();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

// Texts that are each kept once, in the order in which they came.
class TextEncoder::Distinct {
 public:
  std::uint32_t index_of(std::string_view text, std::uint64_t hash) {
    if (2 * (texts_.size() + 1) > slots_.size()) grow();
    for (std::size_t at = hash >> 20;; ++at) {
      Slot& slot = slots_[at & (slots_.size() - 1)];
      if (slot.hash == hash && texts_[slot.index] == text) return slot.index;
      if (slot.hash != 0) continue;
      slot = {hash, static_cast<std::uint32_t>(texts_.size())};
      texts_.push_back(text);
      hashes_.push_back(hash);
      return slot.index;
    }
  }
  std::span<const std::string_view> texts() const { return texts_; }
  std::span<const std::uint64_t> hashes() const { return hashes_; }

 private:
  struct Slot {
    std::uint64_t hash = 0;
    std::uint32_t index = 0;
  };
  void grow() {
    slots_.assign(std::max<std::size_t>(256, 4 * slots_.size()), {});
    for (std::uint32_t i = 0; i < texts_.size(); ++i) {
      std::size_t at = hashes_[i] >> 20;
      while (slots_[at & (slots_.size() - 1)].hash != 0) ++at;
      slots_[at & (slots_.size() - 1)] = {hashes_[i], i};
    }
  }
  std::vector<Slot> slots_;
  std::vector<std::string_view> texts_;
  std::vector<std::uint64_t> hashes_;
};

// Words of earlier batches with their ids; only read while a batch is looked up.
class TextEncoder::Words {
 public:
  Words() { clear(); }

  std::optional<std::span<const std::uint32_t>> find(std::string_view text, std::uint64_t hash) const {
    for (std::size_t at = hash >> 20;; ++at) {
      const Slot& slot = slots_[at & (slots_.size() - 1)];
      if (slot.hash == 0) return std::nullopt;
      if (slot.hash == hash && std::string_view(texts_).substr(slot.text, slot.length) == text)
        return std::span(ids_).subspan(slot.ids, slot.count);
    }
  }

  void add(std::string_view text, std::uint64_t hash, std::span<const std::uint32_t> ids) {
    if (count_ == most_words) clear();
    if (find(text, hash)) return;
    std::size_t at = hash >> 20;
    while (slots_[at & (slots_.size() - 1)].hash != 0) ++at;
    slots_[at & (slots_.size() - 1)] = {
        hash, static_cast<std::uint32_t>(texts_.size()), static_cast<std::uint32_t>(ids_.size()),
        static_cast<std::uint16_t>(text.size()), static_cast<std::uint16_t>(ids.size())};
    texts_ += text;
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    ++count_;
  }

 private:
  struct Slot {
    std::uint64_t hash = 0;
    std::uint32_t text = 0, ids = 0;
    std::uint16_t length = 0, count = 0;
  };
  void clear() {
    slots_.assign(2 * most_words, {});
    texts_.clear();
    ids_.clear();
    count_ = 0;
  }
  std::vector<Slot> slots_;
  std::string texts_;
  std::vector<std::uint32_t> ids_;
  std::size_t count_ = 0;
};

// Ids of several texts, one after the other.
struct TextEncoder::Encoded {
  std::vector<std::uint32_t> ids;
  std::vector<std::size_t> ends;

  void add(const TokenIds& word) {
    for (const std::int64_t id : word) ids.push_back(static_cast<std::uint32_t>(id));
    ends.push_back(ids.size());
  }
  std::span<const std::uint32_t> word(std::uint32_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::span(ids).subspan(begin, ends[i] - begin);
  }
};

// Some pieces in a row, and what is known of them: ids with gaps where words are still to be tokenised.
struct TextEncoder::Task {
  struct Gap {
    std::size_t at;      // in ids
    std::uint32_t word;  // of unknown, later of all that is tokenised
    bool drop_first;
  };
  std::size_t first_piece, end_piece;
  std::vector<std::uint32_t> ids;
  std::vector<Gap> gaps;
  std::vector<std::pair<std::size_t, std::size_t>> piece_ends;  // in ids and in gaps
  Distinct unknown;
  std::size_t invalid = 0;
};

TextEncoder::TextEncoder(const Tokenizer& tokenizer, const nlohmann::json& tokenizer_json, int threads)
    : tokenizer_(tokenizer),
      split_points_(tokenizer_json),
      threads_(threads > 0 ? threads : available_cores()),
      words_(std::make_unique<Words>()) {
  if (!split_points_.any()) return;
  // What is proved from tokenizer.json is tried once as well: slow ids are better than wrong ones.
  const TextPiece sample{
      "The fox's 12 tails, (and more) were\nseen in 1999.  Two  spaces\n\n new\r\nline caf\xc3\xa9 "
      "\xe4\xb8\xad\xe6\x96\x87 <s> </s> a\tb \n c\xe2\x80\x94 d\xff \xe2\x96\x81 e. END"};
  const std::vector<std::uint32_t> parts = encode(std::span(&sample, 1))[0];
  if (!std::ranges::equal(parts, tokenizer.encode(sample.text, false))) split_points_.disable();
  words_ = std::make_unique<Words>();
  invalid_ = 0;
}

TextEncoder::~TextEncoder() = default;

void TextEncoder::look_up(Task& task, std::span<const TextPiece> pieces) const {
  for (std::size_t p = task.first_piece; p < task.end_piece; ++p) {
    const std::string_view text = pieces[p].text;
    task.invalid += count_invalid_utf8(text);
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(split_points_.next(text, begin + 1), text.size());
      const std::string_view word = text.substr(begin, end - begin);
      const SplitPoints::Part part =
          begin == 0 && pieces[p].begins ? SplitPoints::Part{word} : split_points_.continued(word);
      const std::uint64_t hash = hash_of(part.text);
      if (const auto known = part.text.size() > longest_word ? std::nullopt : words_->find(part.text, hash)) {
        const auto ids = without_first(*known, part.drop_first);
        task.ids.insert(task.ids.end(), ids.begin(), ids.end());
      } else {
        task.gaps.push_back({task.ids.size(), task.unknown.index_of(part.text, hash), part.drop_first});
      }
      begin = end;
    }
    task.piece_ends.emplace_back(task.ids.size(), task.gaps.size());
  }
}

void TextEncoder::fill_in(Task& task, const Encoded& encoded, std::span<std::vector<std::uint32_t>> ids) const {
  std::size_t at = 0, gap = 0;
  for (std::size_t p = task.first_piece; p < task.end_piece; ++p) {
    const auto [ids_end, gaps_end] = task.piece_ends[p - task.first_piece];
    std::vector<std::uint32_t>& out = ids[p];
    std::size_t size = ids_end - at;
    for (std::size_t g = gap; g < gaps_end; ++g) size += encoded.word(task.gaps[g].word).size();
    out.reserve(size);
    const auto copy_up_to = [&](std::size_t end) {
      out.insert(out.end(), task.ids.begin() + static_cast<std::ptrdiff_t>(at),
                 task.ids.begin() + static_cast<std::ptrdiff_t>(end));
      at = end;
    };
    for (; gap < gaps_end; ++gap) {
      copy_up_to(task.gaps[gap].at);
      const auto word = without_first(encoded.word(task.gaps[gap].word), task.gaps[gap].drop_first);
      out.insert(out.end(), word.begin(), word.end());
    }
    copy_up_to(ids_end);
  }
  task = {};
}

std::vector<std::vector<std::uint32_t>> TextEncoder::encode(std::span<const TextPiece> pieces) {
  std::vector<Task> tasks;
  for (std::size_t begin = 0; begin < pieces.size();) {
    std::size_t end = begin, bytes = 0;
    while (end < pieces.size() && bytes < task_bytes) bytes += pieces[end++].text.size();
    tasks.emplace_back().first_piece = begin;
    tasks.back().end_piece = begin = end;
  }
  in_parallel(threads_, tasks.size(), [&](std::size_t i) { look_up(tasks[i], pieces); });

  Distinct unknown;
  for (Task& task : tasks) {
    invalid_ += task.invalid;
    std::vector<std::uint32_t> index;
    for (std::size_t i = 0; i < task.unknown.texts().size(); ++i)
      index.push_back(unknown.index_of(task.unknown.texts()[i], task.unknown.hashes()[i]));
    for (Task::Gap& gap : task.gaps) gap.word = index[gap.word];
  }
  Encoded encoded;
  for (std::size_t begin = 0, end = 0; begin < unknown.texts().size(); begin = end) {
    const auto threads = static_cast<std::size_t>(threads_);
    // Several texts that could not be split share the memory that one of them may take.
    std::size_t bytes = 0;
    const auto fits = [&](std::size_t size) {
      const std::size_t most =
          end - begin < threads ? std::max(longest_stretch, slice_bytes * threads) : slice_bytes * threads;
      return end == begin || bytes + size <= most;
    };
    while (end < unknown.texts().size() && fits(unknown.texts()[end].size())) bytes += unknown.texts()[end++].size();
    for (const TokenIds& ids : tokenizer_.encode_batch(unknown.texts().subspan(begin, end - begin), false))
      encoded.add(ids);
  }

  std::vector<std::vector<std::uint32_t>> ids(pieces.size());
  in_parallel(threads_, tasks.size(), [&](std::size_t i) { fill_in(tasks[i], encoded, ids); });
  if (split_points_.any()) {
    for (std::uint32_t i = 0; i < unknown.texts().size(); ++i) {
      if (unknown.texts()[i].size() <= longest_word)
        words_->add(unknown.texts()[i], unknown.hashes()[i], encoded.word(i));
    }
  }
  return ids;
}

}  // namespace tapetune
