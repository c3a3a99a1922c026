#include "export/merge.h"

#include <atomic>
#include <chrono>
#include <future>
#include <set>

#include "adapters/checkpoints.h"
#include "adapters/component.h"
#include "adapters/peft.h"
#include "adapters/peft_config.h"
#include "checkpoint/dtype.h"
#include "checkpoint/finite.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "core/signals.h"
#include "export/card.h"
#include "gguf/writer.h"
#include "run/inputs.h"
#include "run/open.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

constexpr const char* embedding_name = "model.embed_tokens.weight";
constexpr const char* head_name = "lm_head.weight";

// The base's hash, taken beside the merge: it reads what the merge reads.
class BaseHash {
 public:
  BaseHash(const MergeInput& input, bool any_base) : any_base_(any_base) {
    if (!input.base) return;
    path_ = input.base->path().string();
    if (input.recipe) expected_ = input.recipe->model_hash;
    running_ = std::async(std::launch::async, [this, base = *input.base] {
      return base.hash([this](std::uint64_t) {
        if (stopped_) throw Interrupted("");
      });
    });
  }
  ~BaseHash() { stopped_ = true; }
  BaseHash(const BaseHash&) = delete;
  BaseHash& operator=(const BaseHash&) = delete;

  // Fails as soon as it is known that the base is another.
  void check() {
    if (running_.valid() && running_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) take();
  }
  // Empty where there is no base.
  const std::string& get() {
    while (running_.valid()) {
      check_interrupted();
      if (running_.wait_for(std::chrono::milliseconds(50)) == std::future_status::ready) take();
    }
    return hash_;
  }

 private:
  void take() {
    hash_ = running_.get();
    if (expected_.empty() || hash_ == expected_) return;
    if (any_base_) {
      warn("{}: the weights changed since the training: they are {}, the run was trained on {}", path_, hash_,
           expected_);
      return;
    }
    fail("merge",
         "{}: the weights changed since the training: they are {}, the run was trained on {}; give the right folder "
         "with --model, or --any-base to merge into this one.",
         path_, hash_, expected_);
  }

  std::string path_, expected_, hash_;
  bool any_base_;
  std::atomic<bool> stopped_ = false;
  std::future<std::string> running_;  // the last: its end waits for the task, which uses the others
};

// A folder that is replaced takes all in it along, and one inside another changes that.
void refuse_place(const MergeInput& input, const fs::path& out) {
  for (const fs::path& folder : {input.folder, input.base ? input.base->path() : fs::path()}) {
    if (!folder.empty() && (is_inside(out, folder) || is_inside(folder, out))) {
      fail("merge", "{}: is inside {} or holds it, which a merge must not touch; choose another folder.", out.string(),
           folder.string());
    }
  }
}

Origin origin_of(const MergeInput& input, const MergeOptions& options, const std::string& hash) {
  Origin origin;
  origin.version = options.version;
  origin.method = input.method;
  origin.base = input.base ? fs::absolute(input.base->path()).lexically_normal().string() : "";
  origin.base_hash = hash;
  origin.base_context = input.config.longest_context();
  origin.base_rope = input.config.rope;
  origin.step = input.step;
  if (input.recipe) {
    std::error_code status;
    origin.steps = input.recipe->steps;
    origin.batch = input.recipe->batch;
    origin.context = input.recipe->context;
    origin.finished = fs::is_directory(input.folder / "adapter", status);
    origin.trained_hash = input.recipe->model_hash;
    origin.recipe = read_text(input.folder / "recipe.yaml");
  }
  return origin;
}

// What the position encoding is made with; where the method leaves it to the base, that has no settings of its own.
Settings position_settings(const MergeInput& input) {
  if (input.method.positions.type != base_positions) return input.method.positions;
  const PositionComponent& encoding = position_component(input.method, input.config);
  return default_settings(encoding.name, encoding.keys);
}

bool is_merged_file(std::string_view name) {
  const auto exports = [&](const PositionComponent& encoding) {
    return std::ranges::find(encoding.exported, name) != encoding.exported.end();
  };
  return is_checkpoint_file(name) || name == "README.md" || name == "tapetune_provenance.json" ||
         std::ranges::any_of(position_components().all(), exports);
}

}  // namespace

MergeInput open_merge(const fs::path& folder, const fs::path& given_model) {
  fs::path model = given_model;
  MergeInput input;
  input.folder = folder;
  std::error_code status;
  if (!fs::is_directory(folder, status)) {
    fail("merge", "{}: no such folder; give the folder of a run or of an adapter.", folder.string());
  }
  using Kind = ModelFolder::Kind;
  const ModelFolder found = identify(folder);
  if (found.kind == Kind::run) {
    input.folder = found.run;
    input.recipe = read_run_recipe(found.run);
    const RunAdapter trained = find_adapter(found);
    input.adapter = trained.folder;
    input.step = trained.step;
  } else if (found.kind == Kind::adapter) {
    input.adapter = folder;
    if (model.empty()) {
      const AdapterBase base = adapter_base(folder);
      model = base.folder;
      if (model.empty()) {
        fail("merge", "{}: its base model{} is not a folder here; give it with --model DIR.", folder.string(),
             base.name.empty() ? "" : fmt::format(" {}", base.name));
      }
    }
  } else if (found.kind == Kind::checkpoint && has_position_tensors(open_checkpoint(folder))) {
    input.adapter = folder;
    if (!model.empty()) {
      fail("merge", "{}: is a whole model with the tensors of its positions, which has its base in it; drop --model.",
           folder.string());
    }
  } else {
    fail("merge",
         "{}: is neither a run (it has no recipe.yaml), nor an adapter (no adapter_config.json), nor a model whose "
         "positions have tensors.",
         folder.string());
  }
  if (model.empty() && input.recipe && input.recipe->init) {
    input.config = random_model_config(*input.recipe);
    input.carry_from = input.recipe->init->tokenizer;
  } else {
    input.base = open_checkpoint(!model.empty() ? model : input.recipe ? fs::path(input.recipe->model) : folder);
    input.config = input.base->config();
    input.carry_from = input.base->path();
  }
  input.method = adapter_options(input.config, input.adapter);
  return input;
}

Merged::Merged(const MergeInput& input, std::optional<at::ScalarType> dtype)
    : base_(input.base), base_tied_(input.config.tied_embeddings) {
  // Names, shapes and settings come from the method itself, on weights without numbers.
  const LlamaWeights shapes = make_weights(input.config, [](const TensorSpec& tensor) {
    return at::empty(tensor.shape, at::TensorOptions().dtype(at::kFloat).device(at::kMeta));
  });
  const AdaptedModel adapted = adapt(input.config, shapes, input.method, at::kFloat);
  config_ = adapted.model.config();
  if (input.recipe) config_.context = trained_context(config_, *input.recipe);
  adapter_ = adapted.model.components().adapter;
  encoding_ = &position_component(input.method, input.config);
  const at::Tensor head = base_ ? base_->tensor(base_tied_ ? embedding_name : head_name) : at::Tensor();
  trained_ = stored_parameters(adapted, head, input.adapter);
  if (!base_) {
    draw_ = [config = input.config, seed = input.recipe->seed] {
      std::map<std::string, at::Tensor> all;
      for (auto& [name, tensor] : named_weights(config, random_weights(config, seed))) all.emplace(name, tensor);
      return all;
    };
  }
  // An adapter of a tied head unties it from the embeddings; if both are equal still, one is stored.
  const FindTrained find = [this](const std::string& name) { return trained(name); };
  if (adapter_->merge(head_name, find)) config_.tied_embeddings = false;
  plan(input, dtype);
  require_consumed();
  if (base_tied_ && !config_.tied_embeddings && !ends_differ()) {
    config_.tied_embeddings = true;
    plan(input, dtype);
  }
}

const StoredTensor* Merged::trained(const std::string& name) const {
  const auto found = trained_.find(name);
  return found == trained_.end() ? nullptr : &found->second;
}

Merged::Source Merged::source_of(const std::string& name) const {
  Source source;
  source.whole = trained(name);
  source.base = name == head_name && base_tied_ ? embedding_name : name;
  source.merge = adapter_->merge(name, [this](const std::string& each) { return trained(each); });
  return source;
}

void Merged::plan(const MergeInput& input, std::optional<at::ScalarType> dtype) {
  plan_.clear();
  sources_.clear();
  const at::ScalarType most = input.base ? input.base->dtype() : at::kFloat;
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
    Source source = source_of(name);
    at::ScalarType stored = most;
    if (input.base && input.base->has(source.base)) {
      stored = dtype_from_safetensors(input.base->stored().find(source.base)->second.entry.dtype).value();
    }
    source.planned = plan_.size();
    plan_.push_back({name, dtype.value_or(stored), shape});
    sources_.emplace(name, std::move(source));
  };
  for (const TensorSpec& tensor : tensor_specs(config_)) add(tensor.name, tensor.shape);
  for (const auto& [name, stored] : trained_) {
    if (encoding_->owns != nullptr && encoding_->owns(config_, name)) add(name, stored.entry.shape);
  }
}

// What training made and the result would not have must not get lost in silence.
void Merged::require_consumed() const {
  std::set<const StoredTensor*> consumed;
  for (const auto& [name, source] : sources_) {
    consumed.insert(source.whole);
    if (!source.merge) continue;
    for (const std::string& used : source.merge->uses) consumed.insert(trained(used));
  }
  for (const auto& [name, stored] : trained_) {
    if (consumed.contains(&stored)) continue;
    fail("merge", "{}: was trained, but nothing in a merged model corresponds to it; use the run or adapter as it is.",
         name);
  }
}

void Merged::store_as(const std::string& name, at::ScalarType dtype) {
  const auto found = sources_.find(name);
  if (found != sources_.end()) plan_[found->second.planned].dtype = dtype;
}

bool Merged::ends_differ() const {
  const std::vector<std::int64_t>& shape = plan_[sources_.at(embedding_name).planned].shape;
  const std::int64_t block = rows_at_once(shape);
  for (std::int64_t begin = 0; begin < shape[0]; begin += block) {
    const std::int64_t count = std::min(block, shape[0] - begin);
    if (!at::equal(rows(embedding_name, begin, count), rows(head_name, begin, count))) return true;
  }
  return false;
}

const at::Tensor& Merged::drawn(const std::string& name) const {
  if (drawn_.empty()) drawn_ = draw_();
  return drawn_.at(name);
}

at::Tensor Merged::base_rows(const std::string& name, std::int64_t begin, std::int64_t count) const {
  if (!base_) return drawn(name).narrow(0, begin, count);
  return rows_from(base_->stored().find(name)->second, begin, count);
}

at::Tensor Merged::rows(const std::string& name, std::int64_t begin, std::int64_t count) const {
  const Source& source = sources_.at(name);
  const PlannedTensor& planned = plan_[source.planned];
  at::Tensor value = source.whole != nullptr ? rows_from(*source.whole, begin, count)
                                             : base_rows(source.base, begin, count);  // [count, ...]
  if (source.merge) {
    value = source.merge->apply(value.to(value.scalar_type() == at::kDouble ? at::kDouble : at::kFloat), begin);
  }
  value = value.to(planned.dtype).contiguous();
  if (!all_finite(value)) {
    fail("merge", "{}: the result has NaN or Inf{}; nothing was written.", planned.name,
         planned.dtype == at::kHalf ? " in f16, whose largest number is 65504; use --dtype bf16"
                                    : ": the adapter or the base model is damaged, use another checkpoint");
  }
  return value;
}

void Merged::stream(const std::string& name, const PutRows& put) const {
  const std::vector<std::int64_t>& shape = plan_[sources_.at(name).planned].shape;
  const std::int64_t block = rows_at_once(shape);
  for (std::int64_t begin = 0; begin < shape[0]; begin += block) {
    put(rows(name, begin, std::min(block, shape[0] - begin)));
  }
}

at::Tensor Merged::tensor(const std::string& name) const {
  const PlannedTensor& planned = plan_[sources_.at(name).planned];
  at::Tensor whole = at::empty(planned.shape, planned.dtype);
  std::int64_t filled = 0;
  stream(name, [&](const at::Tensor& part) {
    whole.narrow(0, filled, part.size(0)).copy_(part);
    filled += part.size(0);
  });
  return whole;
}

void merge(const MergeInput& input, const MergeOptions& options) {
  refuse_place(input, options.out);
  const Merged merged(input, options.dtype);
  BaseHash base_hash(input, options.any_base);
  WriteOptions write;
  write.shard_bytes = options.shard_bytes;
  write.replace = options.replace;
  write.carry_from = input.carry_from;
  write.writes = is_merged_file;
  write.finite = true;  // Merged::rows refuses what is not
  write.complete = [&](std::map<std::string, std::string>& files) {
    const Origin origin = origin_of(input, options, base_hash.get());
    const PositionComponent& encoding = merged.encoding();
    if (encoding.export_files != nullptr) {
      encoding.export_files(position_settings(input), merged.config(), input.carry_from, files);
    }
    complete_tokenizer(merged.config(), input.carry_from, files);
    files["tapetune_provenance.json"] = provenance(origin, "a merged model");
    files["README.md"] = model_card(origin, merged.config(), options.out);
  };
  const auto stream = [&](const std::string& name, const PutRows& put) {
    base_hash.check();
    merged.stream(name, put);
  };
  stream_checkpoint(options.out, merged.config(), merged.tensors(), stream, write);
}

void merge_gguf(const MergeInput& input, gguf::TensorType type, const MergeOptions& options) {
  refuse_place(input, options.out);
  if (const PositionComponent& encoding = position_component(input.method, input.config);
      encoding.export_files != nullptr) {
    fail("merge", "{}: llama.cpp does not support {}; drop --gguf for a folder.", input.folder.string(),
         encoding.title);
  }
  require_writable(options.out, options.replace);
  const Merged merged(input, options.dtype);
  BaseHash(input, options.any_base).get();
  gguf::ExportOptions write;
  write.type = type;
  write.tokenizer = input.carry_from;
  write.name = options.out.stem().string();
  write.replace = options.replace;
  gguf::write_gguf(options.out, merged.config(), [&](const std::string& name) { return merged.tensor(name); }, write);
}

void export_adapter(const MergeInput& input, const MergeOptions& options) {
  refuse_place(input, options.out);
  if (input.method.train_also.all) {
    fail("merge", "{}: method {} has no adapter; drop --adapter.", input.folder.string(), input.method.name());
  }
  if (input.base && input.adapter == input.base->path()) {
    fail("merge", "{}: is a whole model; drop --adapter.", input.folder.string());
  }
  const Merged fits(input);  // refuses what belongs to another model
  BaseHash base_hash(input, options.any_base);
  StagedFolder staged(options.out, options.replace, is_adapter_file);
  const auto write = [&](const char* name, const std::string& text) {
    OutputFile out(staged.path() / name);
    out.write(text);
    out.finish();
  };
  const std::shared_ptr<const MappedFile> weights = MappedFile::open(input.adapter / "adapter_model.safetensors");
  require_space(staged.path(), weights->bytes().size());
  OutputFile out(staged.path() / "adapter_model.safetensors");
  constexpr std::size_t at_once = std::size_t{16} << 20;
  for (std::size_t begin = 0; begin < weights->bytes().size(); begin += at_once) {
    check_interrupted();
    const auto part = weights->bytes().subspan(begin, std::min(at_once, weights->bytes().size() - begin));
    out.write(part);
    weights->release(part);
  }
  out.finish();
  const Origin origin = origin_of(input, options, base_hash.get());
  const fs::path peft = input.adapter / "adapter_config.json";
  Json config = parse_json(read_text(peft), "adapter", peft.string());
  config["base_model_name_or_path"] = origin.base;
  write("adapter_config.json", to_text(config, 2) + "\n");
  write("tapetune.json", to_text(method_json(input.method), 2) + "\n");
  write("tapetune_provenance.json", provenance(origin, "an adapter"));
  write("README.md", adapter_card(origin, fits.config(), options.out));
  check_interrupted();
  staged.commit();
}

}  // namespace tapetune
