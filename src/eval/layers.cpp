#include "eval/layers.h"

#include "kernels/pointwise.h"

namespace tapetune {

LayerViews::LayerViews(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t first_position,
                       std::int64_t from)
    : model_(model), from_(from), kept_(static_cast<std::int64_t>(tokens.size()) - from) {
  const auto length = static_cast<std::int64_t>(tokens.size());
  ForwardInput in;
  in.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
  in.positions = at::arange(first_position, first_position + length).unsqueeze(0);
  in.planned_length = length;  // the same frequencies wherever the text stands
  in.all_hidden = in.all_positions = true;
  out_ = model.forward(in);
}

LayerView LayerViews::layer(std::int64_t index) const {
  const ModelConfig& config = model_.config();
  const auto at_layer = static_cast<std::size_t>(index);
  const LayerWeights& w = model_.weights().layers[at_layer];
  const at::Tensor normed = kernels::rms_norm(out_.hidden[at_layer], w.input_norm, config.rms_norm_eps);
  const Projection which[] = {Projection::q, Projection::k};
  const Linear frozen[] = {w.q, w.k};
  const auto qk = model_.components().adapter->project({index, which, frozen, nullptr, false}, normed);
  const at::Tensor& position = out_.positions[at_layer];  // [1, N, C, D]
  const auto rotated = [&](const at::Tensor& x) {
    const at::Tensor heads = x.view({1, from_ + kept_, -1, config.head_dim});
    return kernels::rotate(heads, position)[0].narrow(0, from_, kept_).transpose(0, 1).to(at::kDouble);  // [H, n, D]
  };
  const at::Tensor q = rotated(qk[0]), k = rotated(qk[1]).repeat_interleave(config.heads / config.kv_heads, 0);
  const at::Tensor scores = at::matmul(q, k.transpose(1, 2)) / std::sqrt(static_cast<double>(config.head_dim));
  const at::Tensor later = at::ones({kept_, kept_}, out_.last.options().dtype(at::kBool)).triu(1);
  const at::Tensor e = position[0].narrow(0, from_, kept_).transpose(0, 1).to(at::kDouble);  // [C, n, D]
  return {at::softmax(scores.masked_fill(later, -INFINITY), -1),
          at::matmul(e, e.transpose(1, 2)) * (2.0 / static_cast<double>(config.head_dim))};
}

at::Tensor LayerViews::logits() const { return model_.logits(out_.last[0]).narrow(0, from_, kept_).to(at::kDouble); }

std::vector<LayerPicture> picture_layers(const Llama& model, const std::vector<std::int64_t>& tokens,
                                         const std::vector<std::int64_t>& places) {
  const c10::NoGradGuard looking;
  const LayerViews views(model, tokens);
  const at::Tensor at = at::arange(static_cast<std::int64_t>(tokens.size()), at::kDouble);
  const at::Tensor back = (at.unsqueeze(1) - at.unsqueeze(0)).clamp_min(0);  // [n, n]
  const at::Tensor chosen = at::tensor(places, at::kLong);
  std::vector<LayerPicture> pictures;
  for (std::int64_t i = 0; i < model.config().layers; ++i) {
    const LayerView view = views.layer(i);
    LayerPicture picture;
    picture.distance = (view.attention * back).sum(-1).mean().item<double>();
    const at::Tensor dots = view.position.mean(0).index_select(0, chosen).index_select(1, chosen).contiguous();
    for (std::int64_t row = 0; row < dots.size(0); ++row) {
      const double* values = dots[row].const_data_ptr<double>();
      picture.position.emplace_back(values, values + dots.size(1));
    }
    pictures.push_back(std::move(picture));
  }
  return pictures;
}

}  // namespace tapetune
