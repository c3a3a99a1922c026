#include "model/recompute.h"

namespace tapetune {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Recomputed : torch::autograd::Function<Recomputed> {
  // Autograd takes no undefined tensors: the inputs that exist come first among all tensors, with their places.
  struct Call : torch::CustomClassHolder {
    Call(Recompute given, std::size_t inputs) : run(std::move(given)), count(inputs) {}
    std::vector<at::Tensor> run_with(std::span<const at::Tensor> present, bool again) const {
      std::vector<at::Tensor> inputs(count);
      for (std::size_t i = 0; i < places.size(); ++i) inputs[places[i]] = present[i];
      return run(inputs, again);
    }
    Recompute run;
    std::size_t count;
    std::vector<std::size_t> places;
  };

  static variable_list forward(AutogradContext* ctx, at::TensorList all, const c10::intrusive_ptr<Call>* call) {
    ctx->save_for_backward(all.vec());
    ctx->saved_data["call"] = c10::IValue::make_capsule(*call);
    ctx->set_materialize_grads(false);
    return (*call)->run_with(std::span(all.data(), (*call)->places.size()), false);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    const std::size_t inputs = call->places.size();
    variable_list out(saved.size() + 1), wanted, given, outputs;
    std::vector<std::size_t> places;
    const c10::AutoGradMode with_graph(true);
    std::vector<at::Tensor> leaves;
    for (std::size_t i = 0; i < saved.size(); ++i) {
      const bool wants = ctx->needs_input_grad(i);
      if (i < inputs) {
        leaves.push_back(saved[i].detach());
        if (wants) leaves.back().requires_grad_(true);
      }
      if (!wants) continue;
      wanted.push_back(i < inputs ? leaves[i] : saved[i]);
      places.push_back(i);
    }
    const std::vector<at::Tensor> again = call->run_with(leaves, true);
    for (std::size_t i = 0; i < again.size(); ++i) {
      if (!grads[i].defined() || !again[i].requires_grad()) continue;
      outputs.push_back(again[i]);
      given.push_back(grads[i]);
    }
    if (outputs.empty()) return out;
    const variable_list found = torch::autograd::grad(outputs, wanted, given, /*retain_graph=*/false,
                                                      /*create_graph=*/false, /*allow_unused=*/true);
    for (std::size_t i = 0; i < places.size(); ++i) out[places[i]] = found[i];
    return out;
  }
};

}  // namespace

std::vector<at::Tensor> recomputed(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& trained,
                                   const Recompute& run) {
  const auto call = c10::make_intrusive<Recomputed::Call>(run, inputs.size());
  std::vector<at::Tensor> all;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    all.push_back(inputs[i]);
    call->places.push_back(i);
  }
  all.insert(all.end(), trained.begin(), trained.end());
  return Recomputed::apply(at::TensorList(all), &call);
}

}  // namespace tapetune
