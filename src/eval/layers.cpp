#include "eval/layers.h"

namespace tapetune {

LayerViews::LayerViews(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t first_position,
                       std::int64_t from)
    : model_(model), from_(from), kept_(static_cast<std::int64_t>(tokens.size()) - from) {
  const auto length = static_cast<std::int64_t>(tokens.size());
  ForwardInput in;
  in.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
  in.positions = at::arange(first_position, first_position + length).unsqueeze(0);
  in.planned_length = length;  // the same frequencies wherever the text stands
  in.all_positions = true;
  in.watch = [this](const AttentionInput& seen) { attention_.push_back({seen.q, seen.k, seen.scores}); };
  out_ = model.forward(in);
}

LayerView LayerViews::layer(std::int64_t index) const {
  const auto at_layer = static_cast<std::size_t>(index);
  const Scored& seen = attention_[at_layer];
  LayerView view;
  // Within the text alone, what it sees of the tokens before it left out.
  const at::Tensor all = kernels::attention_weights(seen.q.to(at::kDouble), seen.k.to(at::kDouble), seen.scores)[0];
  const at::Tensor own = all.narrow(1, from_, kept_).narrow(2, from_, kept_);  // [H, n, n]
  view.attention = own / own.sum(-1, true);
  if (const at::Tensor& position = out_.positions[at_layer]; position.defined()) {             // [1, N, C, D]
    const at::Tensor e = position[0].narrow(0, from_, kept_).transpose(0, 1).to(at::kDouble);  // [C, n, D]
    view.position = at::matmul(e, e.transpose(1, 2)) * (2.0 / static_cast<double>(e.size(2)));
  }
  return view;
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
    const at::Tensor dots = view.position.defined()
                                ? view.position.mean(0).index_select(0, chosen).index_select(1, chosen).contiguous()
                                : at::empty({0, 0}, at::kDouble);
    for (std::int64_t row = 0; row < dots.size(0); ++row) {
      const double* values = dots[row].const_data_ptr<double>();
      picture.position.emplace_back(values, values + dots.size(1));
    }
    pictures.push_back(std::move(picture));
  }
  return pictures;
}

}  // namespace tapetune
