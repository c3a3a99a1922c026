#include "adapters/full/full.h"

#include "core/error.h"

namespace tapetune {

namespace {

// Lets all of the base's tensors of these kinds train.
void train_kinds(ModelBuilder& model, std::initializer_list<TensorKind> kinds) {
  for_each_tensor(model.config, model.weights, [&](const TensorSpec& spec, at::Tensor& tensor) {
    if (std::ranges::find(kinds, spec.kind) == kinds.end()) return;
    const std::string_view group = spec.kind == TensorKind::norm ? "norms" : "weights";
    tensor = model.train(spec.name, tensor, Owner::base, group);
  });
}

void train_embeddings_and_head(ModelBuilder& model, bool embeddings, bool head) {
  LlamaWeights& weights = model.weights;
  const bool tied = model.config.tied_embeddings;
  if (tied && model.options.untie) {
    model.config.tied_embeddings = false;
    model.notes.emplace_back("lm_head is untied from the embeddings: they train separately");
  } else if (tied && (embeddings || head)) {
    model.notes.emplace_back(
        "the embeddings are tied to lm_head: they train as one matrix and stay tied "
        "(untie=true separates them)");
    weights.embedding = weights.head.weight = model.train("model.embed_tokens.weight", weights.embedding, Owner::base, "embeddings");
    return;
  }
  if (embeddings) weights.embedding = model.train("model.embed_tokens.weight", weights.embedding, Owner::base, "embeddings");
  if (head) weights.head.weight = model.train("lm_head.weight", weights.head.weight, Owner::base, "head");
}

}  // namespace

void make_full(ModelBuilder& model) {
  train_embeddings_and_head(model, true, true);
  train_kinds(model, {TensorKind::weight, TensorKind::bias});
  train_kinds(model, {TensorKind::norm});
}

void train_also(ModelBuilder& model) {
  if (model.options.method == "full") return;
  const MethodOptions& options = model.options;
  const bool tied = model.config.tied_embeddings && !options.untie;
  const bool whole_head = options.train_head || (tied && options.train_embeddings);
  const bool has_lora = options.rank > 0 && std::find(options.targets.begin(), options.targets.end(),
                                                      Projection::head) != options.targets.end();
  if (whole_head && has_lora && std::ranges::any_of(model.components.parameters, [](const Parameter& p) { return p.name.starts_with("lm_head.lora_"); })) {
    fail("method",
         "the head would train in full{} and have LoRA matrices too; take lm_head out of train_also or targets.",
         options.train_head ? "" : " (it is tied to the embeddings)");
  }
  train_embeddings_and_head(model, options.train_embeddings, options.train_head);
  if (options.train_norms) train_kinds(model, {TensorKind::norm});
}

}  // namespace tapetune
