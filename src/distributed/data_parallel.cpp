#include "distributed/data_parallel.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "core/error.h"

namespace tapetune {

namespace {

// All-reduces a bucket. Without a hook of ours the Reducer would divide by the number of ranks, but losses are divided
// by the tokens of all ranks already.
class SumBuckets final : public c10d::CppCommHookInterface<Group> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    return state_.all_reduce_future(bucket.getBuffer(), fmt::format("gradients {}", bucket.getIndex()));
  }
};

// The Reducer warns where it looks for parameters without a gradient and finds none.
struct Unheard final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The backward goes from the head to the embeddings. Buckets are exchanged in their order, so that one whose gradients
// come late would hold up all behind it.
std::vector<at::Tensor> as_gradients_come(std::span<const Parameter> parameters) {
  constexpr std::string_view layers = "model.layers.";
  const auto layer = [&](const Parameter* p) {
    if (p->name == "model.embed_tokens.weight") return -1;
    return p->name.starts_with(layers) ? std::stoi(p->name.substr(layers.size())) : std::numeric_limits<int>::max();
  };
  std::vector<const Parameter*> order;
  for (const Parameter& p : parameters) order.push_back(&p);
  std::stable_sort(order.begin(), order.end(),
                   [&](const Parameter* a, const Parameter* b) { return layer(a) > layer(b); });
  std::vector<at::Tensor> tensors;
  tensors.reserve(order.size());
  for (const Parameter* p : order) tensors.push_back(p->value);
  return tensors;
}

// Eight exchanges or more, so that all but the last go on beside the backward, but none that is all overhead.
std::int64_t bucket_bytes(const std::vector<at::Tensor>& tensors) {
  std::int64_t all = 0;
  for (const at::Tensor& t : tensors) all += static_cast<std::int64_t>(t.nbytes());
  return std::clamp<std::int64_t>(all / 8, 64 << 10, c10d::kDefaultBucketBytesCap);
}

}  // namespace

struct DataParallel::Engine {
  Group group;
  std::unique_ptr<c10d::Reducer> reducer;
};

DataParallel::DataParallel(std::span<const Parameter> parameters, const Group& group) {
  if (group.size() == 1) return;
  const std::vector<at::Tensor> tensors = as_gradients_come(parameters);
  const std::int64_t cap = bucket_bytes(tensors);
  const std::vector<bool> dense(tensors.size(), false);
  const auto buckets =
      std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, {static_cast<std::size_t>(cap)}, dense, {}, {}));
  engine_ = std::make_unique<Engine>();
  engine_->group = group;
  // Looking for parameters without a gradient (TAPE's last layer has some) also keeps the buckets as they are, so that
  // sums are formed in one order from the first step on: a run that goes on equals one that was never stopped.
  engine_->reducer = std::make_unique<c10d::Reducer>(
      tensors, buckets, group.process_group(), dense, cap, /*find_unused_parameters=*/true,
      /*gradient_as_bucket_view=*/true, std::unordered_map<std::size_t, std::string>{}, cap,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false, std::vector<std::int64_t>{});
  engine_->reducer->register_comm_hook(std::make_unique<SumBuckets>(group));
}

DataParallel::~DataParallel() = default;
DataParallel::DataParallel(DataParallel&& other) noexcept = default;

void DataParallel::backward(const at::Tensor& loss) {
  if (!engine_) return loss.backward();
  {
    Unheard unheard;
    const c10::WarningUtils::WarningHandlerGuard quietly(&unheard);
    engine_->reducer->prepare_for_backward({loss});
  }
  // The Reducer all-reduces by itself which parameters have gradients: no call of ours sees that fail.
  engine_->group.guard([&] { loss.backward(); });
}

}  // namespace tapetune
