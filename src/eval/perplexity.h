// Perplexity of a text under three named protocols, in pieces that ranks can share and a later run can resume from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "data/token_file.h"
#include "eval/resume.h"
#include "model/llama.h"

namespace tapetune {

enum class Protocol {
  // Windows of `context` tokens every `stride` tokens, all targets of each counted, as in LongLoRA's and TAPE's tables.
  longlora,
  // Each token is a target once, in a window that shows at least `context` - `stride` tokens before it. The first
  // window
  // counts in full; the last is moved back to end with the text.
  sliding,
  // Windows of `context` targets side by side, as in training; what is left at the end does not count.
  blocks,
};

std::string_view protocol_name(Protocol protocol);
// Fails with the nearest name where there is none such.
Protocol parse_protocol(std::string_view name);

// A part of a token file.
struct TokenRange {
  TokenFile file;
  std::int64_t begin = 0, size = 0;
};

// The first token of the held-out part, where training on windows of this context begins it (see Batches); a context of
// 1 gives the share of the tokens.
std::int64_t held_out_begin(const TokenFile& file, double share, std::int64_t context = 1);

struct PerplexityOptions {
  Protocol protocol = Protocol::sliding;
  std::vector<std::int64_t> contexts;
  std::int64_t stride = -1;  // negative: half the context for sliding, 256 (the context, where shorter) for longlora
  std::int64_t buckets = 0;  // equal parts of the window to give the loss of; 0: none
  // Short windows are computed together, up to so many tokens.
  std::int64_t tokens_at_once = 1024;
};

struct BucketLoss {
  std::int64_t begin = 0, end = 0;  // places in the window, of the token that is read
  std::int64_t tokens = 0;          // counted there
  double loss = 0;                  // their mean; 0 where there are none
};

struct ContextPerplexity {
  std::int64_t context = 0, stride = 0, windows = 0;
  std::int64_t tokens = 0;  // counted
  double loss = 0;          // their mean
  double perplexity = 0;
  std::vector<BucketLoss> buckets;
};

// Windows that were computed together.
struct ScoredWindows {
  std::int64_t windows = 0, tokens = 0;
  double loss_sum = 0;
  std::vector<double> bucket_loss_sums;
  std::vector<std::int64_t> bucket_tokens;
};
void to_json(Json& json, const ScoredWindows& scored);
void from_json(const Json& json, ScoredWindows& scored);

class PerplexityRun {
 public:
  // Fails where a setting or the length of the text allows no window.
  static void require_fits(const TokenRange& data, const PerplexityOptions& options);
  // The model must outlive it. Fails as require_fits does.
  PerplexityRun(const Llama& model, TokenRange data, const PerplexityOptions& options);

  static constexpr std::string_view kind = "perplexity", unit = "tokens";
  using Found = ScoredWindows;
  // The next windows, or those so many steps behind them; none where there are none.
  std::optional<Found> score(std::int64_t ahead) const;
  // Adds the next windows.
  void take(const std::optional<Found>& found);
  std::int64_t total() const;  // tokens that go through the model, over all contexts
  std::int64_t done() const;
  std::vector<ContextPerplexity> results() const;  // a context each, of what was scored so far

  Json settings() const;
  double fingerprint() const;
  // The sums so far, and what they depend on. The next run may ask for other contexts; nothing is forgotten.
  Json state() const;
  // Fails where the sums belong to other settings, another text, or a model that gives other losses.
  void restore(const Json& state);

 private:
  // The windows of one context, and their sums.
  struct Part {
    std::int64_t context, stride, windows, length;  // length: tokens of a window that are read
    std::int64_t scored = 0, tokens = 0;            // windows and targets so far
    double sum = 0, first = 0;                      // of all losses, and of those in the first piece
    std::vector<double> bucket_sums;
    std::vector<std::int64_t> bucket_tokens;
  };
  struct Window {
    std::int64_t begin, from;  // first token, and the place of the first target that counts
  };
  static Part part_of(const TokenRange& data, const PerplexityOptions& options, std::int64_t context);
  static std::vector<Part> parts_of(const TokenRange& data, const PerplexityOptions& options);
  Window window(const Part& part, std::int64_t index) const;
  std::int64_t windows_at_once(const Part& part) const;
  Json common_settings() const;
  // From this window on.
  ScoredWindows score_windows(const Part& part, std::int64_t first) const;

  const Llama& model_;
  TokenRange data_;
  PerplexityOptions options_;
  std::vector<Part> parts_;
  Json others_ = Json::array();  // saved sums of contexts that are not asked for now
  std::uint64_t data_hash_ = 0;
};

}  // namespace tapetune
