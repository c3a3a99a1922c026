#include "adapters/train_also.h"

#include "core/error.h"

namespace tapetune {

namespace {

constexpr const char *embeddings_tensor = "model.embed_tokens.weight", *head_tensor = "lm_head.weight";

// Lets all of the base's tensors of these kinds train.
void train_kinds(ModelBuilder& model, std::initializer_list<TensorKind> kinds) {
  for_each_tensor(model.config, model.weights, [&](const TensorSpec& spec, at::Tensor& tensor) {
    if (std::ranges::find(kinds, spec.kind) == kinds.end()) return;
    const std::string_view group = spec.kind == TensorKind::norm ? "norms" : "weights";
    tensor = model.train(spec.name, tensor, Owner::base, group);
  });
}

void train_embeddings_and_head(ModelBuilder& model, bool untie, bool embeddings, bool head) {
  LlamaWeights& weights = model.weights;
  const bool tied = model.config.tied_embeddings;
  const auto train_embeddings = [&] {
    return weights.embedding = model.train(embeddings_tensor, weights.embedding, Owner::base, "embeddings");
  };
  if (tied && untie) {
    model.config.tied_embeddings = false;
    model.notes.emplace_back("lm_head is untied from the embeddings: they train separately");
  } else if (tied && (embeddings || head)) {
    model.notes.emplace_back(
        "the embeddings are tied to lm_head: they train as one matrix and stay tied "
        "(untie=true separates them)");
    weights.head.weight = train_embeddings();
    return;
  }
  if (embeddings) train_embeddings();
  if (head) weights.head.weight = model.train(head_tensor, weights.head.weight, Owner::base, "head");
}

bool is_adapted(const ModelBuilder& model, std::string_view module) {
  return std::ranges::any_of(model.components.parameters, [&](const Parameter& p) {
    return p.owner == Owner::adapter && p.name.starts_with(module);
  });
}

}  // namespace

void train_also(const MethodOptions& options, ModelBuilder& model) {
  const TrainAlso& also = options.train_also;
  const bool embeddings = also.embeddings || also.all, head = also.head || also.all;
  const bool tied = model.config.tied_embeddings && !options.untie;
  if ((head || (tied && embeddings)) && is_adapted(model, "lm_head.")) {
    fail("method", "the head would train in full{} and have an adapter too; take lm_head out of train_also or targets.",
         head ? "" : " (it is tied to the embeddings)");
  }
  train_embeddings_and_head(model, options.untie, embeddings, head);
  if (also.all) train_kinds(model, {TensorKind::weight, TensorKind::bias});
  if (also.all || also.norms) train_kinds(model, {TensorKind::norm});
}

}  // namespace tapetune
