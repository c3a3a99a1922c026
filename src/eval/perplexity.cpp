#include "eval/perplexity.h"

#include <array>
#include <numeric>

#include "core/error.h"
#include "core/nearest.h"
#include "core/signals.h"
#include "model/loss.h"

namespace tapetune {

namespace {

constexpr std::array<std::string_view, 3> protocol_names{"longlora", "sliding", "blocks"};  // in the enum's order
constexpr std::int64_t paper_stride = 256;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// A number for all ids. Reading them shows one that is outside the vocabulary before the work begins.
std::uint64_t hash_of(const TokenRange& data) {
  constexpr std::int64_t block = 1 << 16;
  std::vector<std::int64_t> ids(block);
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::int64_t at = 0; at < data.size; at += block) {
    check_interrupted();
    ids.resize(static_cast<std::size_t>(std::min(block, data.size - at)));
    data.file.read(data.begin + at, ids);
    for (const std::int64_t id : ids) hash = (hash ^ static_cast<std::uint64_t>(id)) * 0x100000001b3;
  }
  return hash;
}

void check_options(const PerplexityOptions& options) {
  if (options.contexts.empty()) fail("eval", "there is no context; give one or several.");
  if (options.stride == 0) fail("eval", "the stride is 0, but must be 1 or more.");
  if (options.stride > 0 && options.protocol == Protocol::blocks)
    fail("eval", "protocol blocks has no stride: its windows do not overlap; drop --stride.");
  for (std::size_t i = 0; i < options.contexts.size(); ++i) {
    const std::int64_t context = options.contexts[i];
    if (context < 2) fail("eval", "the context is {}, but must be 2 or more.", context);
    if (options.stride > context)
      fail("eval", "the stride of {} is larger than the context of {} and would skip tokens; lower it.", options.stride,
           context);
    if (options.buckets < 0 || options.buckets >= context)
      fail("eval", "{} buckets do not fit a context of {}; give fewer than its tokens.", options.buckets, context);
    if (std::find(options.contexts.begin(), options.contexts.begin() + static_cast<std::ptrdiff_t>(i), context) !=
        options.contexts.begin() + static_cast<std::ptrdiff_t>(i))
      fail("eval", "the context {} is given twice.", context);
  }
}

}  // namespace

std::string_view protocol_name(Protocol protocol) { return protocol_names[static_cast<std::size_t>(protocol)]; }

Protocol parse_protocol(std::string_view name) {
  const auto found = std::find(protocol_names.begin(), protocol_names.end(), name);
  if (found != protocol_names.end()) return static_cast<Protocol>(found - protocol_names.begin());
  const std::string meant = nearest(name, protocol_names);
  fail("eval", "there is no protocol \"{}\"; there are {}{}.", name, fmt::join(protocol_names, ", "),
       meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant));
}

std::int64_t held_out_begin(const TokenFile& file, double share, std::int64_t context) {
  if (!(share > 0 && share < 1)) fail("eval", "the held-out share is {}, but must be above 0 and below 1.", share);
  const std::int64_t windows = (file.size() - 1) / context;
  const auto held_out = static_cast<std::int64_t>(std::llround(share * static_cast<double>(windows)));
  return (windows - std::min(windows, std::max<std::int64_t>(1, held_out))) * context;
}

void to_json(Json& json, const ScoredWindows& scored) {
  json = {{"windows", scored.windows},
          {"tokens", scored.tokens},
          {"loss_sum", scored.loss_sum},
          {"bucket_loss_sums", scored.bucket_loss_sums},
          {"bucket_tokens", scored.bucket_tokens}};
}

void from_json(const Json& json, ScoredWindows& scored) {
  scored = {json.at("windows"), json.at("tokens"), json.at("loss_sum"), json.at("bucket_loss_sums"),
            json.at("bucket_tokens")};
}

void PerplexityRun::require_fits(const TokenRange& data, const PerplexityOptions& options) { parts_of(data, options); }

PerplexityRun::PerplexityRun(const Llama& model, TokenRange data, const PerplexityOptions& options)
    : model_(model), data_(std::move(data)), options_(options), parts_(parts_of(data_, options)) {
  data_hash_ = hash_of(data_);
}

std::vector<PerplexityRun::Part> PerplexityRun::parts_of(const TokenRange& data, const PerplexityOptions& options) {
  check_options(options);
  std::vector<Part> parts;
  parts.reserve(options.contexts.size());
  for (const std::int64_t context : options.contexts) parts.push_back(part_of(data, options, context));
  return parts;
}

PerplexityRun::Part PerplexityRun::part_of(const TokenRange& data, const PerplexityOptions& options,
                                           std::int64_t context) {
  const std::int64_t size = data.size;
  if (size < context + 1) {
    fail("eval",
         "{}: {} tokens are too few for one window of context {}, which needs {}; give more text or a context of at "
         "most {}.",
         data.file.path().string(), size, context, context + 1, size - 1);
  }
  Part part{};
  part.context = part.length = context;
  switch (options.protocol) {
    case Protocol::longlora:
      part.stride = options.stride > 0 ? options.stride : std::min(paper_stride, context);
      part.windows = ceil_div(size - context, part.stride);  // begin below size - context, as the papers' scripts do
      part.length = context - 1;  // their windows have `context` tokens together with the last target
      break;
    case Protocol::sliding:
      part.stride = options.stride > 0 ? options.stride : (context + 1) / 2;
      part.windows = 1 + ceil_div(size - 1 - context, part.stride);
      break;
    case Protocol::blocks:
      part.stride = context;
      part.windows = (size - 1) / context;
      break;
  }
  part.bucket_sums.resize(static_cast<std::size_t>(options.buckets));
  part.bucket_tokens.resize(static_cast<std::size_t>(options.buckets));
  return part;
}

PerplexityRun::Window PerplexityRun::window(const Part& part, std::int64_t index) const {
  const std::int64_t begin = index * part.stride;
  if (options_.protocol != Protocol::sliding || index == 0) return {begin, 0};
  const std::int64_t moved = std::min(begin, data_.size - 1 - part.context);
  return {moved, begin - part.stride + part.context - moved};  // the windows before counted up to there
}

std::int64_t PerplexityRun::windows_at_once(const Part& part) const {
  return std::max<std::int64_t>(1, options_.tokens_at_once / part.length);
}

ScoredWindows PerplexityRun::score_windows(const Part& part, std::int64_t first) const {
  const c10::NoGradGuard evaluation;
  const std::int64_t rows = std::min(windows_at_once(part), part.windows - first), length = part.length;
  const at::Tensor ids = at::empty({rows, length + 1}, at::kLong);
  std::vector<Window> windows;
  for (std::int64_t r = 0; r < rows; ++r) {
    windows.push_back(window(part, first + r));
    auto* row = ids.mutable_data_ptr<std::int64_t>() + r * (length + 1);
    data_.file.read(data_.begin + windows.back().begin, std::span(row, static_cast<std::size_t>(length + 1)));
  }
  ForwardInput in;
  in.tokens = ids.narrow(1, 0, length);
  in.planned_length = part.context;
  const at::Tensor hidden = model_.forward(in).last;  // [R, N, hidden]
  std::vector<at::Tensor> states, targets;            // of what counts, which spares the head the rest
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t from = windows[static_cast<std::size_t>(r)].from;
    states.push_back(hidden[r].narrow(0, from, length - from));
    targets.push_back(ids[r].narrow(0, from + 1, length - from));
  }
  const at::Tensor losses =
      token_losses(model_, rows == 1 ? states[0] : at::cat(states), at::cat(targets)).to(at::kCPU, at::kDouble);
  const double* loss = losses.const_data_ptr<double>();
  ScoredWindows scored;
  scored.windows = rows;
  scored.bucket_loss_sums.resize(part.bucket_sums.size());
  scored.bucket_tokens.resize(part.bucket_tokens.size());
  for (const Window& each : windows) {
    for (std::int64_t place = each.from; place < length; ++place, ++loss) {
      if (!std::isfinite(*loss)) {
        fail("eval",
             "context {}: the loss of token {} is NaN or Inf; the model's weights or its dtype are broken (try --dtype "
             "f32).",
             part.context, data_.begin + each.begin + place + 1);
      }
      scored.loss_sum += *loss;
      if (options_.buckets == 0) continue;
      const auto bucket = static_cast<std::size_t>(place * options_.buckets / length);
      scored.bucket_loss_sums[bucket] += *loss;
      ++scored.bucket_tokens[bucket];
    }
    scored.tokens += length - each.from;
  }
  return scored;
}

std::optional<ScoredWindows> PerplexityRun::score(std::int64_t ahead) const {
  for (const Part& part : parts_) {
    const std::int64_t at_once = windows_at_once(part), left = ceil_div(part.windows - part.scored, at_once);
    if (ahead < left) return score_windows(part, part.scored + ahead * at_once);
    ahead -= left;
  }
  return {};
}

void PerplexityRun::take(const std::optional<ScoredWindows>& found) {
  if (!found) return;
  const auto next = std::find_if(parts_.begin(), parts_.end(), [](const Part& p) { return p.scored < p.windows; });
  if (next == parts_.end()) throw std::out_of_range("more than all windows");
  Part& part = *next;
  if (found->windows < 1 || found->windows > part.windows - part.scored) throw std::out_of_range("windows");
  if (part.scored == 0) part.first = found->loss_sum;
  part.sum += found->loss_sum;
  part.scored += found->windows;
  part.tokens += found->tokens;
  for (std::size_t b = 0; b < part.bucket_sums.size(); ++b) {
    part.bucket_sums[b] += found->bucket_loss_sums.at(b);
    part.bucket_tokens[b] += found->bucket_tokens.at(b);
  }
}

std::int64_t PerplexityRun::total() const {
  return std::accumulate(parts_.begin(), parts_.end(), std::int64_t{0},
                         [](std::int64_t sum, const Part& p) { return sum + p.windows * p.length; });
}

std::int64_t PerplexityRun::done() const {
  return std::accumulate(parts_.begin(), parts_.end(), std::int64_t{0},
                         [](std::int64_t sum, const Part& p) { return sum + p.scored * p.length; });
}

std::vector<ContextPerplexity> PerplexityRun::results() const {
  const auto mean = [](double sum, std::int64_t tokens) { return tokens > 0 ? sum / static_cast<double>(tokens) : 0; };
  std::vector<ContextPerplexity> results;
  for (const Part& part : parts_) {
    ContextPerplexity result{part.context, part.stride, part.scored, part.tokens, mean(part.sum, part.tokens), 0, {}};
    result.perplexity = std::exp(result.loss);
    for (std::int64_t b = 0; b < options_.buckets; ++b) {
      const auto i = static_cast<std::size_t>(b);
      result.buckets.push_back({ceil_div(b * part.length, options_.buckets),
                                ceil_div((b + 1) * part.length, options_.buckets), part.bucket_tokens[i],
                                mean(part.bucket_sums[i], part.bucket_tokens[i])});
    }
    results.push_back(std::move(result));
  }
  return results;
}

// But for contexts and strides, of which a later run may have others.
Json PerplexityRun::common_settings() const {
  return {{"protocol", protocol_name(options_.protocol)},
          {"buckets", options_.buckets},
          {"tokens", data_.size},
          {"tokens_hash", fmt::format("{:016x}", data_hash_)}};
}

Json PerplexityRun::settings() const {
  Json settings = common_settings();
  for (const Part& part : parts_) settings["windows"].push_back({part.context, part.stride});
  return settings;
}

double PerplexityRun::fingerprint() const {
  constexpr std::int64_t looked_at = 64;
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(std::min(looked_at, data_.size)));
  data_.file.read(data_.begin, tokens);
  return tapetune::fingerprint(model_, tokens);
}

Json PerplexityRun::state() const {
  Json contexts = others_;
  for (const Part& part : parts_) {
    contexts.push_back({{"context", part.context},
                        {"stride", part.stride},
                        {"windows", part.scored},
                        {"tokens", part.tokens},
                        {"loss_sum", part.sum},
                        {"first_loss_sum", part.first},
                        {"bucket_loss_sums", part.bucket_sums},
                        {"bucket_tokens", part.bucket_tokens}});
  }
  return {{"settings", common_settings()}, {"contexts", contexts}};
}

void PerplexityRun::restore(const Json& state) {
  const Json before = resume_value<Json>(state, "settings"), now = common_settings();
  for (const auto& [key, value] : now.items()) {
    if (const Json there = resume_value<Json>(before, key.c_str()); there != value) {
      fail("eval",
           "the saved results are of other settings or another text: {} was {}, now {}; give --resume another file.",
           key, to_text(there), to_text(value));
    }
  }
  std::vector<Part> parts = parts_;
  Json others = Json::array();
  for (const Json& one : resume_value<std::vector<Json>>(state, "contexts")) {
    const auto context = resume_value<std::int64_t>(one, "context"), stride = resume_value<std::int64_t>(one, "stride");
    const auto part = std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.context == context; });
    if (part == parts.end()) {
      others.push_back(one);
      continue;
    }
    if (part->stride != stride) {
      fail("eval", "the saved results of context {} have a stride of {}, now {}; give --resume another file.", context,
           stride, part->stride);
    }
    part->scored = resume_value<std::int64_t>(one, "windows");
    part->tokens = resume_value<std::int64_t>(one, "tokens");
    part->sum = resume_value<double>(one, "loss_sum");
    part->first = resume_value<double>(one, "first_loss_sum");
    part->bucket_sums = resume_value<std::vector<double>>(one, "bucket_loss_sums");
    part->bucket_tokens = resume_value<std::vector<std::int64_t>>(one, "bucket_tokens");
    const auto buckets = static_cast<std::size_t>(options_.buckets);
    if (part->scored < 0 || part->scored > part->windows || part->bucket_sums.size() != buckets ||
        part->bucket_tokens.size() != buckets)
      fail_damaged();
  }
  const auto known = std::find_if(parts.begin(), parts.end(), [](const Part& p) { return p.scored > 0; });
  if (known != parts.end()) {
    check_fingerprint(known->first, score_windows(part_of(data_, options_, known->context), 0).loss_sum);
  }
  parts_ = std::move(parts);
  others_ = std::move(others);
}

}  // namespace tapetune
