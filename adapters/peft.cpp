#include "adapters/peft.h"

#include "adapters/checkpoints.h"
#include "adapters/component.h"
#include "adapters/peft_config.h"
#include "checkpoint/writer.h"
#include "core/error.h"
#include "core/file.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view prefix = "base_model.model.";
constexpr const char* head_name = "lm_head.weight";
constexpr const char* adapter_file = "adapter_model.safetensors";
constexpr const char* embedding_name = "model.embed_tokens.weight";

void write_json(const fs::path& path, const Json& json) {
  OutputFile file(path);
  file.write(to_text(json, 2) + "\n");
  file.finish();
}

bool is_checkpoint(const fs::path& folder) {
  std::error_code status;
  return fs::exists(folder / "config.json", status) && !fs::exists(folder / adapter_file, status);
}

// PEFT may have saved into the folder after us, or somebody may have changed its file.
void require_agreement(const MethodOptions& options, const fs::path& own, const fs::path& peft) {
  std::error_code status;
  const AdapterComponent& adapter = adapter_components().find(options.adapter.type);
  if (!fs::exists(peft, status) || adapter.to_peft == nullptr) return;
  const Json config = parse_json(read_text(peft), "adapter", peft.string());
  if (!config.is_object() || !config.contains("peft_type") || config["peft_type"] != adapter.peft_type) return;
  const Json expected = adapter.to_peft(options.adapter);
  for (const auto& [key, value] : expected.items()) {
    // Which modules, and dropout, may be said in more than one way.
    if (!(value.is_number() || value.is_boolean()) || key == "lora_dropout") continue;
    if (config.contains(key) && config[key] != value) {
      fail("adapter", "{} says {} = {}, but {} has {}; remove the one that is out of date.", peft.string(), key,
           to_text(config[key]), own.filename().string(), to_text(value));
    }
  }
}

void check_shape(const Parameter& parameter, const TensorEntry& entry, const std::string& where) {
  if (parameter.value.sizes() == at::IntArrayRef(entry.shape)) return;
  fail("adapter", "{}: {}: the model needs {}, but the file has {}; is this an adapter for another model?", where,
       parameter.name, shape_text(parameter.value.sizes().vec()), shape_text(entry.shape));
}

// Block by block: such a matrix may be a large part of the memory.
bool same_numbers(const StoredTensor& stored, const at::Tensor& expected) {
  if (at::IntArrayRef(stored.entry.shape) != expected.sizes()) return false;
  constexpr std::int64_t block = 1024;
  for (std::int64_t begin = 0; begin < expected.size(0); begin += block) {
    const std::int64_t count = std::min(block, expected.size(0) - begin);
    if (!at::equal(rows_from(stored, begin, count).to(at::kFloat),
                   expected.narrow(0, begin, count).to(at::kCPU, at::kFloat))) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::string name_on_disk(std::string_view parameter) { return std::string(prefix) + std::string(parameter); }

std::string name_from_disk(std::string_view stored) {
  if (stored.starts_with(prefix)) stored.remove_prefix(prefix.size());
  return std::string(stored);
}

bool is_adapter_file(std::string_view name) {
  return name == adapter_file || name == "adapter_config.json" || name == "tapetune.json" ||
         name == "tapetune_provenance.json" || name == "README.md";
}

void save_adapter(const AdaptedModel& adapted, const fs::path& folder, const fs::path& base, bool replace,
                  StagedFolder::Others others) {
  if (adapted.parameters.empty())
    fail("adapter", "method {} has no trainable parameters, so there is nothing to save.", adapted.options.name());
  StagedFolder staged(folder, replace, is_adapter_file, others);
  write_adapter_files(adapted, staged.path(), base);
  staged.commit();
}

std::uint64_t adapter_bytes(const AdaptedModel& adapted) {
  std::uint64_t bytes = 0;
  for (const Parameter& parameter : adapted.parameters) {
    const bool twice = parameter.name == embedding_name && stays_tied(adapted);
    bytes += static_cast<std::uint64_t>(parameter.value.numel()) * sizeof(float) * (twice ? 2 : 1);
  }
  return bytes;
}

void write_adapter_files(const AdaptedModel& adapted, const fs::path& folder, const fs::path& base) {
  std::map<std::string, at::Tensor> tensors;
  for (const Parameter& parameter : adapted.parameters) {
    const at::Tensor value = parameter.value.detach().to(at::kCPU, at::kFloat).contiguous();
    tensors[name_on_disk(parameter.name)] = value;
    // PEFT asks for both names of a tied matrix.
    if (parameter.name == embedding_name && stays_tied(adapted)) tensors[name_on_disk(head_name)] = value;
  }
  require_space(folder, adapter_bytes(adapted));
  save_safetensors(folder / adapter_file, tensors, false, {{"format", "pt"}});
  write_json(folder / "adapter_config.json", peft_config(adapted, base));
  write_json(folder / "tapetune.json", method_json(adapted.options));
}

namespace {

// Of a checkpoint that holds a position encoding.
MethodOptions stored_options(const fs::path& folder) {
  const Checkpoint checkpoint = open_checkpoint(folder);
  if (!has_position_tensors(checkpoint)) {
    fail("adapter", "{}: is a checkpoint whose positions have no tensors, not an adapter; give it as the model.",
         folder.string());
  }
  const PositionComponent& encoding = position_components().find(checkpoint.config().position);
  MethodOptions options;
  if (std::ranges::any_of(presets(), [&](const Preset& preset) { return preset.name == encoding.name; })) {
    options.preset = encoding.name;
  }
  options.positions = encoding.recognise(checkpoint);
  return options;
}

}  // namespace

MethodOptions adapter_options(const ModelConfig& config, const fs::path& folder) {
  std::error_code status;
  if (!fs::is_directory(folder, status)) fail("adapter", "{}: no such folder.", folder.string());
  if (is_checkpoint(folder)) return stored_options(folder);
  const fs::path file = folder / adapter_file, own = folder / "tapetune.json", peft = folder / "adapter_config.json";
  if (!fs::exists(file, status)) {
    fail("adapter", "{}: has no adapter_model.safetensors{}.", folder.string(),
         fs::exists(folder / "adapter_model.bin", status)
             ? "; adapter_model.bin is a Python pickle: load it with PEFT and save it again"
             : "");
  }
  if (fs::exists(own, status)) {
    MethodOptions options = method_from_json(parse_json(read_text(own), "adapter", own.string()), own.string()).options;
    require_agreement(options, own, peft);
    const AdapterComponent& adapter = adapter_components().find(options.adapter.type);
    if (adapter.mend_earlier != nullptr) adapter.mend_earlier(options.adapter, config);
    return options;
  }
  StoredTensors stored;
  map_safetensors(file, stored);
  return options_from_peft(parse_json(read_text(peft), "adapter", peft.string()), stored, config, peft.string());
}

AdapterBase adapter_base(const fs::path& folder) {
  AdapterBase base;
  std::error_code status;
  const fs::path file = folder / "adapter_config.json";
  if (!fs::exists(file, status)) return base;
  const Json config = parse_json(read_text(file), "adapter", file.string());
  const auto found = config.is_object() ? config.find("base_model_name_or_path") : config.end();
  if (found == config.end() || !found->is_string() || found->get_ref<const std::string&>().empty()) return base;
  base.name = found->get<std::string>();
  for (const fs::path& path : {fs::path(base.name), folder / base.name}) {
    if (!base.folder.empty() || !fs::exists(path / "config.json", status)) continue;
    base.folder = path;
  }
  return base;
}

AdaptedModel load_adapter(const ModelConfig& config, const LlamaWeights& weights, const fs::path& folder,
                          at::ScalarType dtype) {
  AdaptedModel adapted = adapt(config, weights, adapter_options(config, folder), dtype);
  restore_parameters(adapted, weights, folder);
  note_windows_off(config, adapted.options);
  return adapted;
}

AdaptedModel open_adapted(const Checkpoint& checkpoint, const LlamaWeights& weights, at::ScalarType dtype,
                          bool train_all) {
  const bool stored = has_position_tensors(checkpoint);
  MethodOptions options = stored ? adapter_options(checkpoint.config(), checkpoint.path()) : MethodOptions();
  options.train_also.all = train_all;
  AdaptedModel adapted = adapt(checkpoint.config(), weights, options, dtype);
  if (stored) restore_parameters(adapted, weights, checkpoint.path());
  return adapted;
}

StoredTensors stored_parameters(const AdaptedModel& adapted, const at::Tensor& frozen_head, const fs::path& folder) {
  const bool whole = is_checkpoint(folder);
  const fs::path file = whole ? folder : folder / adapter_file;
  StoredTensors stored, found;
  if (whole) {
    stored = open_checkpoint(folder).stored();
  } else {
    map_safetensors(file, stored);
  }
  // What is taken leaves `stored`; of an adapter, nothing may be left in the end.
  for (const Parameter& parameter : adapted.parameters) {
    const std::string name = whole ? parameter.name : name_on_disk(parameter.name);
    auto node = stored.extract(name);
    if (node.empty()) {
      fail("adapter", "{}: tensor {} is missing; is the file complete, and made for this model?", file.string(), name);
    }
    check_shape(parameter, node.mapped().entry, file.string());
    found.emplace(parameter.name, std::move(node.mapped()));
  }
  if (whole) return found;
  // The frozen head that PEFT stores beside its LoRA matrices, and a tied matrix under its second name, may be there;
  // equal ones.
  const auto repeated = [&](const std::string& name, const at::Tensor& expected) {
    const auto node = stored.extract(name_on_disk(name));
    if (!node.empty() && !same_numbers(node.mapped(), expected)) {
      fail("adapter", "{}: {} differs from the matrix that it should repeat; is this an adapter for another model?",
           file.string(), name);
    }
  };
  if (frozen_head.defined()) repeated("lm_head.base_layer.weight", frozen_head);
  if (stays_tied(adapted)) repeated(head_name, tensor_from(found.at(embedding_name)));
  if (!stored.empty()) {
    fail("adapter", "{}: tensor {} does not belong to this model and method; is this an adapter for another model?",
         file.string(), stored.begin()->first);
  }
  return found;
}

void restore_parameters(const AdaptedModel& adapted, const LlamaWeights& weights, const fs::path& folder) {
  const StoredTensors stored = stored_parameters(adapted, weights.head.weight, folder);
  const c10::NoGradGuard loading;
  for (const Parameter& parameter : adapted.parameters) parameter.value.copy_(tensor_from(stored.at(parameter.name)));
}

}  // namespace tapetune
