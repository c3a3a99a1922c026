#include "model/generate.h"

#include <chrono>

#include "core/error.h"
#include "core/memory.h"
#include "core/signals.h"
#include "kernels/matvec.h"

namespace tapetune {

namespace {

constexpr std::int64_t many = 16;  // tokens that take longer than to bring back what was given back

struct Row {
  std::size_t prompt;
  std::vector<std::int64_t> tokens;  // prompt and what followed
  std::int64_t room;                 // tokens that may still come
  std::int64_t planned;              // length of the text at most
  // One set of frequencies from the first token to the last: were they to follow the growing length, as dynamic scaling
  // in transformers does, cached keys would keep angles that no longer hold, and a cache would change the text.
  std::int64_t rotary_length;
  Sampler sampler;
  std::unique_ptr<SequenceCache> cache;
};

at::Tensor as_batch(const std::vector<std::int64_t>& tokens) { return at::tensor(tokens, at::kLong).unsqueeze(0); }

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::string_view stop_name(Stop stop) {
  constexpr std::string_view names[] = {"eos", "length", "context", "interrupted"};
  return names[static_cast<std::size_t>(stop)];
}

std::vector<Generated> generate(const Llama& model, const std::vector<std::vector<std::int64_t>>& prompts,
                                const GenerateOptions& options,
                                const std::function<void(std::size_t, std::int64_t)>& on_token, GenerateTimes* times) {
  const std::int64_t context = options.context > 0 ? options.context : model.config().longest_context();
  std::vector<Row> rows;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const auto length = static_cast<std::int64_t>(prompts[i].size());
    if (length == 0) fail("generate", "prompt {} is empty; give at least one token.", i + 1);
    if (length > context) {
      fail("generate",
           "prompt {} has {} tokens, but the context is {}; shorten it, or raise the limit with --context (quality "
           "falls).",
           i + 1, length, context);
    }
    const std::int64_t planned = length + std::min(context - length, options.max_new_tokens);
    const std::int64_t rotary_length = model.components().positions->same_length(model.config(), planned);
    rows.push_back({i, prompts[i], planned - length, planned, rotary_length, Sampler(options.sampling), nullptr});
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Row& a, const Row& b) { return a.rotary_length < b.rotary_length; });

  std::vector<Generated> results(prompts.size());
  GenerateTimes measured;
  // Takes a row's next token; false when the row is done.
  const auto take = [&](Row& row, const at::Tensor& logits) {
    Generated& result = results[row.prompt];
    const auto full = [&] {
      const bool wanted_more = static_cast<std::int64_t>(result.tokens.size()) < options.max_new_tokens;
      result.stop = wanted_more ? Stop::context : Stop::length;
      return false;
    };
    if (row.room == 0) return full();
    const std::int64_t token = row.sampler.next(logits);
    row.tokens.push_back(token);
    result.tokens.push_back(token);
    if (on_token) on_token(row.prompt, token);
    if (std::find(options.eos.begin(), options.eos.end(), token) != options.eos.end()) {
      result.stop = Stop::eos;
      return false;
    }
    return --row.room > 0 || full();
  };
  const auto last_state = [&](Row& row) {
    ForwardInput in;
    in.tokens = as_batch(row.tokens);
    in.planned_length = row.rotary_length;
    if (row.cache) in.caches = {row.cache.get()};
    return model.forward(in).last[0][-1].clone();  // [hidden]
  };

  std::vector<Row> active;
  for (Row& row : rows) {
    check_interrupted();
    const auto start = std::chrono::steady_clock::now();
    if (options.use_cache) row.cache = std::make_unique<SequenceCache>(model.make_cache(row.planned));
    const at::Tensor state = last_state(row);
    // Before the head comes into memory, the last of the weights.
    if (&row == &rows.back() && row.room > many) trim_memory();
    const at::Tensor logits = model.logits(state);
    measured.prefill_tokens += static_cast<std::int64_t>(row.tokens.size());
    measured.prefill_seconds.push_back(since(start));
    if (take(row, logits)) active.push_back(std::move(row));
  }

  const Linear& sample = model.weights().layers.front().q;
  const at::Tensor row = at::empty({1, sample.weight.size(1)}, sample.weight.options().dtype(model.dtype()));
  const bool exact = kernels::matvec_applies(row, sample.weight, sample.bias);
  const std::size_t together =
      exact && !model.components().positions->changes(model.config().layers) ? kernels::matvec_rows : 1;
  const auto start = std::chrono::steady_clock::now();
  while (!active.empty()) {
    if (interrupted()) {
      for (const Row& row : active) results[row.prompt].stop = Stop::interrupted;
      break;
    }
    std::vector<at::Tensor> logits;
    if (options.use_cache) {
      // Rows with the same frequencies share one reading of the weights, as far as the matrix-vector kernel goes: a
      // matrix product would sum in another order, and a row must not depend on how many others there are.
      for (std::size_t begin = 0; begin < active.size();) {
        std::size_t end = begin;
        ForwardInput in;
        in.planned_length = active[begin].rotary_length;
        std::vector<std::int64_t> last;
        for (; end < active.size() && active[end].rotary_length == in.planned_length && end - begin < together; ++end) {
          last.push_back(active[end].tokens.back());
          in.caches.push_back(active[end].cache.get());
        }
        in.tokens = at::tensor(last, at::kLong).unsqueeze(1);                    // [R, 1]
        const at::Tensor out = model.logits(model.forward(in).last.squeeze(1));  // [R, vocab]
        for (std::int64_t r = 0; r < out.size(0); ++r) logits.push_back(out[r]);
        begin = end;
      }
    } else {
      for (Row& row : active) logits.push_back(model.logits(last_state(row)));
    }
    measured.decode_tokens += static_cast<std::int64_t>(active.size());
    std::vector<Row> going;
    for (std::size_t i = 0; i < active.size(); ++i) {
      if (take(active[i], logits[i])) going.push_back(std::move(active[i]));
    }
    active = std::move(going);
  }
  measured.decode_seconds = since(start);
  if (times != nullptr) *times = measured;
  return results;
}

}  // namespace tapetune
