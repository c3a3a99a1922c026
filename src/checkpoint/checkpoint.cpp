#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <set>

#include "checkpoint/dtype.h"
#include "core/error.h"
#include "core/log.h"
#include "hf/hash.h"

namespace tapetune {

namespace {

constexpr std::size_t hashed_at_once = std::size_t{16} << 20;

at::ScalarType readable_dtype(const StoredTensor& stored) {
  const std::optional<at::ScalarType> dtype = dtype_from_safetensors(stored.entry.dtype);
  if (!dtype) {
    fail("checkpoint", "{}: tensor {} has dtype {}, which tapetune does not read; convert it to F32, F16 or BF16.",
         stored.file->path().string(), stored.entry.name, stored.entry.dtype);
  }
  return *dtype;
}

// A tensor over mapped bytes, or a copy where they are unaligned; `gone` is called with the tensor's end.
at::Tensor over(std::span<const std::byte> bytes, at::IntArrayRef shape, at::ScalarType dtype,
                const std::function<void()>& gone) {
  const auto options = at::TensorOptions().dtype(dtype);
  if (bytes.empty()) return at::empty(shape, options);
  auto* address = const_cast<std::byte*>(bytes.data());
  if (reinterpret_cast<std::uintptr_t>(address) % c10::elementSize(dtype) != 0) {
    at::Tensor copy = at::empty(shape, options);
    std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(copy.data_ptr()));
    gone();
    return copy;
  }
  return at::from_blob(address, shape, [gone](void*) { gone(); }, options);
}

// Tables that follow from config.json, which older versions of transformers stored.
bool is_derived(std::string_view name) {
  constexpr std::string_view endings[] = {".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached"};
  return std::ranges::any_of(endings, [&](std::string_view ending) { return name.ends_with(ending); });
}

// The encoding that config.json names, or that some tensor shows; null: RoPE.
const StoredEncoding* encoding_of(const ModelConfig& config, const StoredTensors& tensors,
                                  std::span<const StoredEncoding> encodings) {
  const auto matches = [&](const StoredEncoding& encoding) {
    if (!config.position.empty()) return encoding.type == config.position;
    return encoding.owns != nullptr &&
           std::ranges::any_of(tensors, [&](const auto& entry) { return encoding.owns(config, entry.first); });
  };
  const auto found = std::ranges::find_if(encodings, matches);
  return found == encodings.end() ? nullptr : &*found;
}

// A tensor that nothing reads changes what the model computes elsewhere: without it, this would be another model.
void require_claimed(const CheckpointFolder& folder, const std::vector<TensorSpec>& expected,
                     const StoredEncoding* encoding) {
  std::set<std::string_view> known{"lm_head.weight"};  // beside tied embeddings, where it is equal
  for (const TensorSpec& tensor : expected) known.insert(tensor.name);
  std::vector<std::string_view> unclaimed;
  for (const auto& [name, stored] : folder.tensors) {
    const bool owned = encoding != nullptr && encoding->owns != nullptr && encoding->owns(folder.config, name);
    if (!owned && !known.contains(name) && !is_derived(name)) unclaimed.push_back(name);
  }
  if (unclaimed.empty()) return;
  const std::string others = unclaimed.size() == 1 ? "" : fmt::format(" (and {} more)", unclaimed.size() - 1);
  fail("checkpoint",
       "{}: tensor {}{} is not part of a {} with this config.json; without it the model would compute something else. "
       "Use a checkpoint of a supported model, or remove the tensor if it is a leftover.",
       folder.path.string(), unclaimed.front(), others, architecture_name(folder.config.architecture));
}

}  // namespace

void require_known_position(const ModelConfig& config, std::span<const StoredEncoding> encodings,
                            std::string_view where) {
  std::string known;
  for (const StoredEncoding& encoding : encodings) {
    if (encoding.type == config.position) return;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", encoding.type);
  }
  if (config.position.empty() || config.position == "rope") return;
  fail("config", "{}: position.type \"{}\" is not supported; supported: {}.", where, config.position, known);
}

at::Tensor tensor_from(const StoredTensor& stored) {
  // The function's copy of the pointer keeps the file mapped.
  return over(stored.bytes, stored.entry.shape, readable_dtype(stored), [file = stored.file] {});
}

at::Tensor rows_from(const StoredTensor& stored, std::int64_t begin, std::int64_t count) {
  std::vector<std::int64_t> shape = stored.entry.shape;
  const std::size_t row = stored.bytes.size() / static_cast<std::size_t>(std::max<std::int64_t>(1, shape.at(0)));
  const auto bytes = stored.bytes.subspan(static_cast<std::size_t>(begin) * row, static_cast<std::size_t>(count) * row);
  shape.at(0) = count;
  return over(bytes, shape, readable_dtype(stored), [file = stored.file, bytes] { file->release(bytes); });
}

std::int64_t rows_at_once(const std::vector<std::int64_t>& shape) {
  std::int64_t width = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) width *= std::max<std::int64_t>(1, shape[i]);
  return std::max<std::int64_t>(1, (std::int64_t{4} << 20) / width);
}

Checkpoint Checkpoint::open(const std::filesystem::path& folder, std::span<const StoredEncoding> encodings) {
  Checkpoint checkpoint;
  checkpoint.folder_ = CheckpointFolder::open(folder);
  ModelConfig& config = checkpoint.folder_.config;
  require_known_position(config, encodings, (folder / "config.json").string());
  if (static_cast<std::uint64_t>(config.layers) > checkpoint.stored().size()) {
    fail("checkpoint",
         "{}: config.json says {} layers, but the files hold {} tensors in all; they are of different models.",
         folder.string(), config.layers, checkpoint.stored().size());
  }
  if (config.tied_embeddings && checkpoint.has("lm_head.weight") && checkpoint.has("model.embed_tokens.weight") &&
      !at::equal(checkpoint.tensor("lm_head.weight"), checkpoint.tensor("model.embed_tokens.weight"))) {
    // transformers 5 does the same: a head that is stored separately was trained separately.
    warn("{}: tie_word_embeddings is true, but lm_head.weight differs from the embeddings; they are used untied",
         folder.string());
    config.tied_embeddings = false;
  }
  const std::vector<TensorSpec> all = tensor_specs(config);
  for (const TensorSpec& expected : all) {
    const auto found = checkpoint.stored().find(expected.name);
    if (found == checkpoint.stored().end()) {
      fail("checkpoint", "{}: tensor {} {} is missing; the shards are incomplete or of another model.", folder.string(),
           expected.name, shape_text(expected.shape));
    }
    const TensorEntry& entry = found->second.entry;
    if (entry.shape != expected.shape) {
      fail("checkpoint", "{}: {}: expected {}, but the file has {}; config.json and weights are of different models.",
           found->second.file->path().string(), entry.name, shape_text(expected.shape), shape_text(entry.shape));
    }
    const std::optional<at::ScalarType> dtype = dtype_from_safetensors(entry.dtype);
    if (!dtype || !c10::isFloatingType(*dtype)) {
      fail("checkpoint", "{}: tensor {} has dtype {}; weights must be F32, F16, BF16 or F64, convert them first.",
           found->second.file->path().string(), entry.name, entry.dtype);
    }
  }
  const StoredEncoding* encoding = encoding_of(config, checkpoint.stored(), encodings);
  if (encoding != nullptr) config.position = encoding->type;
  require_claimed(checkpoint.folder_, all, encoding);
  return checkpoint;
}

at::ScalarType Checkpoint::dtype() const {
  std::map<std::string, std::uint64_t> bytes;
  for (const auto& [name, stored] : stored()) bytes[stored.entry.dtype] += stored.bytes.size();
  const auto most =
      std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return dtype_from_safetensors(most->first).value_or(at::kFloat);
}

std::uint64_t Checkpoint::bytes() const {
  std::uint64_t total = 0;
  for (const auto& [name, stored] : stored()) total += stored.bytes.size();
  return total;
}

std::string Checkpoint::hash(const std::function<void(std::uint64_t bytes)>& between) const {
  Hasher hasher;
  for (const auto& [name, stored] : folder_.tensors) {
    hasher.add(fmt::format("{} {} {}\n", name, stored.entry.dtype, shape_text(stored.entry.shape)));
    for (std::size_t begin = 0; begin < stored.bytes.size(); begin += hashed_at_once) {
      const auto piece = stored.bytes.subspan(begin, std::min(hashed_at_once, stored.bytes.size() - begin));
      hasher.add(piece);
      stored.file->release(piece);
      if (between) between(piece.size());
    }
  }
  return "blake3-" + hasher.hex();
}

at::Tensor Checkpoint::tensor(std::string_view name) const {
  const auto found = stored().find(name);
  if (found == stored().end()) fail("checkpoint", "{}: has no tensor {}.", path().string(), name);
  return tensor_from(found->second);
}

LlamaWeights map_weights(const Checkpoint& checkpoint, at::Device device) {
  return make_weights(checkpoint.config(),
                      [&](const TensorSpec& spec) { return checkpoint.tensor(spec.name).to(device); });
}

}  // namespace tapetune
