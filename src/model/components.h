// The three kinds of component that a plain Llama is adapted by: Adapter, PositionEncoding and AttentionPattern. The
// defaults are those of a Llama as it is. A method is one of each; adapters/ has them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/folder.h"
#include "kernels/visible.h"
#include "model/linear.h"
#include "model/training.h"

namespace tapetune {

// Whose a trained tensor is.
enum class Owner { base, adapter, positions };

// A trained tensor under the name that Hugging Face and PEFT would give it:
// model.layers.0.self_attn.q_proj.weight, and what an adapter adds below that. What a layer trains follows from the
// names that begin with model.layers.N.
struct Parameter {
  std::string name;
  at::Tensor value;
  std::string_view group;  // for people: embeddings, norms, low-rank, …
  Owner owner = Owner::base;
};

// The trained tensor of this name as it is stored; null: there is none such.
using FindTrained = std::function<const StoredTensor*(const std::string& name)>;

// What comes out of frozen projections, with what is added to them.
class Adapter {
 public:
  virtual ~Adapter() = default;
  struct Call {
    std::int64_t layer;                 // the number of layers for the head
    std::span<const Projection> which;  // they read the same input
    std::span<const Linear> frozen;     // one each, gathered where the base is sharded
    const Training* training;           // null in evaluation
    bool gradients_only;                // only gradients will be asked for, not the values
  };
  // One each, in x's dtype. Called again where a layer is recomputed, and must then give the same.
  virtual std::vector<at::Tensor> project(const Call& call, const at::Tensor& x) const;

  // How trained tensors become part of a tensor of the base: rows to rows, because not all adapters add a difference.
  // Asked for every tensor that the model has, biases too; none: the tensor stays as it is.
  struct Merge {
    std::vector<std::string> uses;                                         // names of the trained tensors
    std::function<at::Tensor(at::Tensor rows, std::int64_t begin)> apply;  // rows of the base, f32 or f64 -> merged
  };
  virtual std::optional<Merge> merge(std::string_view base_tensor, const FindTrained& trained) const;

  // Whether training draws random numbers.
  virtual bool draws() const;
  // Numbers per token that a layer keeps for its backward on account of the adapter, besides the inputs of the
  // projections whose tensors it trains; for estimates.
  virtual double saved_numbers(std::int64_t layer) const;
};

// What q and k are turned by. C channels serve H heads: head h takes channel h C / H.
struct PositionState {
  at::Tensor query;  // [B|1, N, C, D]: cos, then sin; undefined: nothing is turned
  at::Tensor key;    // the same for keys; undefined: as query
};

struct PositionInput {
  const ModelConfig& config;
  const at::Tensor& positions;  // [B|1, N] int64
  std::int64_t planned_length;  // that the text may reach
  at::ScalarType dtype;         // of the model
  const Training* training;     // null in evaluation
};

struct BiasInput {
  const ModelConfig& config;
  std::int64_t layer;
  std::int64_t length;  // of the longest sequence
  at::TensorOptions options;
};

// How tokens know where they are, and how that changes from layer to layer.
class PositionEncoding {
 public:
  virtual ~PositionEncoding() = default;
  // What the first layer sees.
  virtual PositionState start(const PositionInput& in) const;
  // [H, length]: entry d is added to the scaled score of the key that is d tokens back; undefined: nothing is. Called
  // within the layer, also when that is recomputed, so that it may learn.
  virtual at::Tensor score_bias(const BiasInput& in) const;

  struct Update {
    bool changes = false;  // the layer hands on another state than it got
    bool attends = false;  // the state goes through attention as extra values, and into caches
  };
  virtual Update update_kind(std::int64_t layer) const;
  // attended: the state under the layer's attention weights, [B, N, H, D], where it attends; mlp_output: [B, N,
  // hidden].
  virtual PositionState update(std::int64_t layer, const PositionState& state, const at::Tensor& attended,
                               const at::Tensor& mlp_output) const;
  // A length with the same start for all texts planned to be so long, so that they can be decoded together.
  virtual std::int64_t same_length(const ModelConfig& config, std::int64_t planned) const;

  virtual bool draws() const;                              // as Adapter
  virtual double saved_numbers(std::int64_t layer) const;  // as Adapter

  // Whether a layer needs the trained tensors that are its own by their names, or no layer's.
  virtual bool uses_tensors(std::int64_t layer) const;
  // Whether any layer's state does.
  bool changes(std::int64_t layers) const;
  bool attends(std::int64_t layers) const;
};

struct VisibleInput {
  const ModelConfig& config;
  std::int64_t length;       // of the whole sequence
  const Training* training;  // null in evaluation
};

// Who sees whom. The model adds each layer's own window.
class AttentionPattern {
 public:
  virtual ~AttentionPattern() = default;
  virtual kernels::Visible visible(const VisibleInput& in) const;
};

struct Components {
  std::shared_ptr<const Adapter> adapter = std::make_shared<Adapter>();
  std::shared_ptr<const PositionEncoding> positions = std::make_shared<PositionEncoding>();
  std::shared_ptr<const AttentionPattern> attention = std::make_shared<AttentionPattern>();
  std::vector<Parameter> parameters;  // all that trains
};

}  // namespace tapetune
