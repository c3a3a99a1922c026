#include "export/verify.h"

#include <cstring>

#include "adapters/checkpoints.h"
#include "adapters/peft.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/dtype.h"
#include "checkpoint/folder.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/signals.h"
#include "export/merge.h"
#include "hf/tokenizer.h"
#include "model/llama.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

// One of the two models.
struct Side {
  std::optional<Checkpoint> checkpoint;  // of a plain model, or
  std::optional<MergeInput> input;       // what a merge starts from,
  std::optional<Merged> merged;          // and its result
  fs::path tokenizer;
  std::map<std::string, PlannedTensor> tensors;
};

Side open_side(const fs::path& folder, const fs::path& model) {
  Side side;
  std::error_code status;
  refuse_gguf(folder);
  if (!fs::is_directory(folder, status)) fail("verify", "{}: no such folder.", folder.string());
  if (fs::exists(folder / "config.json", status)) {
    side.checkpoint = open_checkpoint(folder);
    side.tokenizer = folder;
    for (const auto& [name, stored] : side.checkpoint->stored()) {
      const std::optional<at::ScalarType> dtype = dtype_from_safetensors(stored.entry.dtype);
      if (dtype && !stored.bytes.empty() && !stored.entry.shape.empty()) {
        side.tensors[name] = {name, *dtype, stored.entry.shape};
      }
    }
    return side;
  }
  side.input = open_merge(folder, model);
  side.merged.emplace(*side.input);
  side.tokenizer = side.input->carry_from;
  for (const PlannedTensor& tensor : side.merged->tensors()) side.tensors[tensor.name] = tensor;
  return side;
}

// A merge may store any dtype: what counts is that it rounded once to the one that it took.
void take_dtypes(Side& side, const Side& from) {
  if (!side.merged) return;
  for (auto& [name, tensor] : side.tensors) {
    const auto found = from.tensors.find(name);
    if (found == from.tensors.end()) continue;
    tensor.dtype = found->second.dtype;
    side.merged->store_as(name, tensor.dtype);
  }
}

at::Tensor rows_of(const Side& side, const std::string& name, std::int64_t begin, std::int64_t count) {
  return side.merged ? side.merged->rows(name, begin, count)
                     : rows_from(side.checkpoint->stored().find(name)->second, begin, count);
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

TensorDifference difference(const Side& a, const Side& b, const PlannedTensor& tensor) {
  TensorDifference found{tensor.name};
  double largest = 0;
  const std::int64_t block = rows_at_once(tensor.shape);
  for (std::int64_t begin = 0; begin < tensor.shape[0]; begin += block) {
    const std::int64_t count = std::min(block, tensor.shape[0] - begin);
    const at::Tensor left = rows_of(a, tensor.name, begin, count), right = rows_of(b, tensor.name, begin, count);
    largest = std::max(largest, left.abs().max().to(at::kDouble).item<double>());
    if (same_bytes(left, right)) continue;
    const double most = (left.to(at::kDouble) - right.to(at::kDouble)).abs().max().item<double>();
    found.absolute = std::max(found.absolute, std::isnan(most) ? INFINITY : most);
  }
  found.relative = found.absolute == 0 ? 0 : found.absolute / largest;
  return found;
}

Llama model_of(const Side& side) {
  if (side.checkpoint) return open_adapted(*side.checkpoint, map_weights(*side.checkpoint), at::kFloat).model;
  const MergeInput& input = *side.input;
  const LlamaWeights base = input.base ? map_weights(*input.base) : random_weights(input.config, input.recipe->seed);
  return load_adapter(input.config, base, input.adapter, at::kFloat).model;
}

at::Tensor logits_of(const Side& side, const std::vector<std::int64_t>& tokens) {
  const Llama model = model_of(side);
  ForwardInput in;
  in.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
  return model.logits(model.forward(in).last[0]).to(at::kFloat);  // [N, vocab]
}

std::vector<std::int64_t> tokens_of(const VerifyOptions& options, const Side& a, const Side& b) {
  if (!options.tokens.empty()) return options.tokens;
  if (!options.prompt.empty()) {
    std::error_code status;
    const fs::path folder =
        !a.tokenizer.empty() && fs::exists(a.tokenizer / "tokenizer.json", status) ? a.tokenizer : b.tokenizer;
    std::vector<std::int64_t> tokens = Tokenizer::open(folder).encode(options.prompt);
    if (tokens.empty()) fail("verify", "the prompt has no tokens; give a longer one.");
    return tokens;
  }
  // Some of all the vocabulary, always the same.
  const std::int64_t vocabulary = (a.checkpoint ? a.checkpoint->config() : a.merged->config()).vocab_size;
  constexpr std::int64_t length = 64;
  std::vector<std::int64_t> tokens;
  tokens.reserve(length);
  for (std::int64_t i = 0; i < length; ++i) tokens.push_back((3 + i * 7919) % vocabulary);
  return tokens;
}

std::string shape_and_dtype(const PlannedTensor& tensor) {
  return fmt::format("{} {}", dtype_to_safetensors(tensor.dtype), shape_text(tensor.shape));
}

void compare_tensors(const Side& a, const Side& b, Verification& result) {
  std::uint64_t bytes = 0;
  std::vector<std::string> both;
  for (const auto& [name, tensor] : a.tensors) {
    const auto found = b.tensors.find(name);
    if (found == b.tensors.end()) {
      result.only_a.push_back(name);
    } else if (found->second.dtype != tensor.dtype || found->second.shape != tensor.shape) {
      result.unlike.push_back(
          fmt::format("{}: {} and {}", name, shape_and_dtype(tensor), shape_and_dtype(found->second)));
    }
    if (found == b.tensors.end() || found->second.shape != tensor.shape) continue;
    both.push_back(name);
    bytes += c10::elementSize(tensor.dtype) * static_cast<std::uint64_t>(c10::multiply_integers(tensor.shape));
  }
  for (const auto& [name, tensor] : b.tensors) {
    if (!a.tensors.contains(name)) result.only_b.push_back(name);
  }
  Progress progress("comparing", bytes, "B");
  for (const std::string& name : both) {
    check_interrupted();
    const TensorDifference found = difference(a, b, a.tensors.at(name));
    ++result.compared;
    result.identical += found.absolute == 0 ? 1 : 0;
    if (found.absolute > result.worst_absolute.absolute) result.worst_absolute = found;
    if (found.relative > result.worst_relative.relative) result.worst_relative = found;
    const PlannedTensor& tensor = a.tensors.at(name);
    progress.advance(c10::elementSize(tensor.dtype) * static_cast<std::uint64_t>(c10::multiply_integers(tensor.shape)));
  }
}

// What rounding the weights to the narrower of the stored dtypes does to logits, generously.
double expected_rounding(const Side& a, const Side& b) {
  for (const Side* side : {&a, &b}) {
    for (const auto& [name, tensor] : side->tensors) {
      if (tensor.dtype == at::kBFloat16 || tensor.dtype == at::kHalf) return 0.05;
    }
  }
  return 1e-4;
}

}  // namespace

Verification verify(const VerifyOptions& options) {
  Side a = open_side(options.a, options.model), b = open_side(options.b, options.model);
  take_dtypes(a, b);
  take_dtypes(b, a);
  Verification result;
  compare_tensors(a, b, result);
  result.tensors_agree = result.only_a.empty() && result.only_b.empty() && result.unlike.empty() &&
                         result.worst_absolute.absolute <= options.tolerance;
  const std::vector<std::int64_t> tokens = tokens_of(options, a, b);
  const at::Tensor left = logits_of(a, tokens), right = logits_of(b, tokens);
  if (left.sizes() != right.sizes()) {
    fail("verify", "the vocabularies differ: {} and {} tokens.", left.size(1), right.size(1));
  }
  const double most = (left - right).abs().max().item<double>();
  result.tokens = static_cast<std::int64_t>(tokens.size());
  result.logits_difference = std::isnan(most) ? INFINITY : most;
  result.largest_logit = left.abs().max().item<double>();
  result.same_next = left.argmax(1).eq(right.argmax(1)).sum().item<std::int64_t>();
  result.logits_tolerance = options.logits_tolerance.value_or(expected_rounding(a, b));
  result.logits_agree = result.logits_difference <= result.logits_tolerance * result.largest_logit;
  return result;
}

Json verification_json(const Verification& result) {
  const auto number = [](double value) { return std::isfinite(value) ? Json(value) : Json("infinite"); };
  Json json;
  json["agree"] = result.agree();
  json["tensors"] = {{"compared", result.compared}, {"identical", result.identical}, {"only_a", result.only_a},
                     {"only_b", result.only_b},     {"unlike", result.unlike},       {"agree", result.tensors_agree}};
  json["tensors"]["largest_absolute"] = {{"tensor", result.worst_absolute.name},
                                         {"difference", number(result.worst_absolute.absolute)}};
  json["tensors"]["largest_relative"] = {{"tensor", result.worst_relative.name},
                                         {"difference", number(result.worst_relative.relative)}};
  json["logits"] = {{"tokens", result.tokens},
                    {"difference", number(result.logits_difference)},
                    {"largest", number(result.largest_logit)},
                    {"same_next", result.same_next},
                    {"tolerance", result.logits_tolerance},
                    {"agree", result.logits_agree}};
  return json;
}

}  // namespace tapetune
