#include "adapters/full/full.h"

#include "core/error.h"

namespace tapetune {

namespace {

void train_norms(ModelBuilder& model) {
  for (std::size_t i = 0; i < model.weights.layers.size(); ++i) {
    LayerWeights& layer = model.weights.layers[i];
    const std::string name = fmt::format("model.layers.{}.", i);
    layer.input_norm = model.train(name + "input_layernorm.weight", layer.input_norm);
    layer.post_attention_norm = model.train(name + "post_attention_layernorm.weight", layer.post_attention_norm);
  }
  model.weights.norm = model.train("model.norm.weight", model.weights.norm);
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
    weights.embedding = weights.head.weight = model.train("model.embed_tokens.weight", weights.embedding);
    return;
  }
  if (embeddings) weights.embedding = model.train("model.embed_tokens.weight", weights.embedding);
  if (head) weights.head.weight = model.train("lm_head.weight", weights.head.weight);
}

}  // namespace

void make_full(ModelBuilder& model) {
  train_embeddings_and_head(model, true, true);
  for (std::size_t i = 0; i < model.weights.layers.size(); ++i) {
    const auto all = linears(model.weights.layers[i]);
    for (std::size_t p = 0; p < all.size(); ++p) {
      const std::string name = module_name(static_cast<std::int64_t>(i), static_cast<Projection>(p));
      all[p]->weight = model.train(name + ".weight", all[p]->weight);
      if (all[p]->bias.defined()) all[p]->bias = model.train(name + ".bias", all[p]->bias);
    }
  }
  train_norms(model);
}

void train_also(ModelBuilder& model) {
  if (model.options.method == "full") return;
  const MethodOptions& options = model.options;
  const bool tied = model.config.tied_embeddings && !options.untie;
  const bool whole_head = options.train_head || (tied && options.train_embeddings);
  const bool has_lora = options.rank > 0 && std::find(options.targets.begin(), options.targets.end(),
                                                      Projection::head) != options.targets.end();
  if (whole_head && has_lora && !model.seams.linear->trained(model.config.layers).empty()) {
    fail("method",
         "the head would train in full{} and have LoRA matrices too; take lm_head out of train_also or targets.",
         options.train_head ? "" : " (it is tied to the embeddings)");
  }
  train_embeddings_and_head(model, options.train_embeddings, options.train_head);
  if (options.train_norms) train_norms(model);
}

}  // namespace tapetune
