#include <CLI/CLI.hpp>

#include "adapters/checkpoints.h"
#include "cli/loaded_model.h"
#include "cli/verbs.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/output.h"
#include "run/open.h"

namespace tapetune::cli {

namespace {

std::int64_t elements(const TensorEntry& entry) {
  std::int64_t count = 1;
  for (const std::int64_t extent : entry.shape) count *= extent;
  return count;
}

std::string rope_text(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  std::string text = fmt::format("{}, theta {:g}", rope_type_name(rope.type), rope.theta);
  if (rope.type != RopeType::standard) text += fmt::format(", factor {:g}", rope.factor);
  if (rope.original_context > 0) text += fmt::format(", original context {}", rope.original_context);
  return text;
}

Json describe_adapter(const AdaptedModel& adapted) {
  std::map<std::string, std::int64_t> by_part;
  std::int64_t trained = 0;
  for (const Parameter& p : adapted.parameters) {
    by_part[std::string(p.group)] += p.value.numel();
    trained += p.value.numel();
  }
  Json root;
  root["method"] = adapted.options.name();
  root["settings"] = Json::object();
  for (const auto& [name, value] : shown_settings(adapted.options)) root["settings"][name] = value;
  root["trained_parameters"] = trained;
  root["trained_by_part"] = by_part;
  root["context"] = adapted.model.config().longest_context();
  root["rope"] = rope_text(adapted.model.config());
  return root;
}

const char* part_of(const TensorSpec& tensor) {
  switch (tensor.kind) {
    case TensorKind::embedding:
      return "embeddings";
    case TensorKind::norm:
      return "norms";
    case TensorKind::head:
      return "head";
    default:
      return tensor.projection <= Projection::o ? "attention" : "mlp";
  }
}

Json describe(const Checkpoint& checkpoint) {
  const ModelConfig& c = checkpoint.config();
  std::map<std::string, std::uint64_t> by_dtype, by_part;
  std::uint64_t parameters = 0;
  for (const TensorSpec& expected : tensor_specs(c)) {
    const TensorEntry& entry = checkpoint.stored().find(expected.name)->second.entry;
    const auto count = static_cast<std::uint64_t>(elements(entry));
    const char* part = part_of(expected);
    by_part[part] += count;
    by_dtype[entry.dtype] += count;
    parameters += count;
  }
  Json root;
  root["path"] = checkpoint.path().string();
  root["architecture"] = architecture_name(c.architecture);
  root["parameters"] = parameters;
  root["parameters_by_part"] = by_part;
  root["parameters_by_dtype"] = by_dtype;
  root["bytes"] = checkpoint.bytes();
  root["shards"] = checkpoint.shards();
  root["tensors"] = checkpoint.stored().size();
  root["layers"] = c.layers;
  root["hidden_size"] = c.hidden_size;
  root["intermediate_size"] = c.intermediate_size;
  root["heads"] = c.heads;
  root["kv_heads"] = c.kv_heads;
  root["head_dim"] = c.head_dim;
  root["vocab_size"] = c.vocab_size;
  root["context"] = c.longest_context();
  if (c.longest_window() > 0) root["window"] = c.longest_window();
  root["tied_embeddings"] = c.tied_embeddings;
  root["rope"] = {{"type", rope_type_name(c.rope.type)}, {"theta", c.rope.theta}, {"factor", c.rope.factor}};
  std::error_code status;
  root["tokenizer"] = std::filesystem::exists(checkpoint.path() / "tokenizer.json", status);
  return root;
}

void print_table(const Checkpoint& checkpoint, const Json& d) {
  const ModelConfig& c = checkpoint.config();
  const auto row = [](std::string_view key, const std::string& value) { print_out("{:<13} {}\n", key, value); };
  const auto counts = [](const Json& parts) {
    std::string text;
    for (const auto& [name, count] : parts.items()) {
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, grouped(count.get<std::uint64_t>()));
    }
    return text;
  };
  row("path", d["path"]);
  row("architecture", d["architecture"]);
  row("parameters", grouped(d["parameters"].get<std::uint64_t>()));
  row("  by part", counts(d["parameters_by_part"]));
  row("  by dtype", counts(d["parameters_by_dtype"]));
  row("size", fmt::format("{:.3f} GB in {} file{}", d["bytes"].get<double>() / 1e9, checkpoint.shards(),
                          checkpoint.shards() == 1 ? "" : "s"));
  row("layers", fmt::format("{} of width {}, feed-forward {}", c.layers, c.hidden_size, c.intermediate_size));
  row("heads", fmt::format("{} of width {}, {} for keys and values", c.heads, c.head_dim, c.kv_heads));
  row("vocabulary", fmt::format("{}{}", grouped(static_cast<std::uint64_t>(c.vocab_size)),
                                c.tied_embeddings ? ", embeddings tied to the head" : ""));
  row("context", grouped(static_cast<std::uint64_t>(c.longest_context())));
  if (c.longest_window() > 0) {
    const auto windowed = std::ranges::count_if(c.layer_specs, [](const LayerSpec& layer) { return layer.window > 0; });
    row("window",
        fmt::format("{} tokens in {} of {} layers", grouped(d["window"].get<std::uint64_t>()), windowed, c.layers));
  }
  row("rope", rope_text(c));
  row("tokenizer", d["tokenizer"].get<bool>() ? "tokenizer.json" : "none (no tokenizer.json in the folder)");
  if (!d.contains("adapter")) return;
  const Json& a = d["adapter"];
  row("method", a["method"]);
  std::string settings;
  for (const auto& [key, value] : a["settings"].items()) {
    const std::string text = value.is_string() ? value.get<std::string>() : to_text(value);
    if (!text.empty()) settings += fmt::format("{}{}={}", settings.empty() ? "" : " ", key, text);
  }
  row("  settings", settings);
  row("  trained", grouped(a["trained_parameters"].get<std::uint64_t>()));
  row("  by part", counts(a["trained_by_part"]));
  row("  context", grouped(a["context"].get<std::uint64_t>()));
  row("  rope", a["rope"]);
}

}  // namespace

void add_inspect(CLI::App& app) {
  struct Options {
    ModelOptions model;
    bool json = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "inspect", "Show a checkpoint: architecture, parameters, dtypes, sizes, context, and trainable parameters");
  add_loaded_model(*verb, options->model);
  verb->add_flag("--json", options->json, "Print the results as JSON");
  verb->footer("example: tapetune inspect /models/Llama-2-7b-hf --method tape train_also=embeddings,norms");
  verb->callback([options] {
    const ModelOptions& model = options->model;
    const std::filesystem::path folder = base_folder(identify(model.folder));
    if (folder.empty()) {
      fail("inspect", "{}: was trained from scratch and has no base model; merge it first.", model.folder);
    }
    const Checkpoint checkpoint = open_checkpoint(folder);
    Json description = describe(checkpoint);
    const bool adapts = folder != model.folder || !model.adapter.empty() || !model.method.empty();
    if (adapts || has_position_tensors(checkpoint)) {
      const AdaptedModel adapted = open_loaded_model(model).adapted;
      description["adapter"] = describe_adapter(adapted);
      for (const std::string& text : adapted.notes) note("{}", text);
    }
    if (options->json) {
      print_out("{}\n", to_text(description, 2));
    } else {
      print_table(checkpoint, description);
    }
  });
}

}  // namespace tapetune::cli
