#include "distributed/sharded_base.h"

#include "core/trace.h"

namespace tapetune {

namespace {

at::Tensor as_bytes(const at::Tensor& t) { return t.flatten().view(at::kByte); }

// Buffers for gathered layers: one that a layer has left serves the next one, so that there are no more buffers than
// layers in use at once, and none is allocated again and again.
class BufferPool {
 public:
  at::Tensor take(std::int64_t bytes, const at::TensorOptions& options) {
    largest_ = std::max(largest_, bytes);
    for (at::Tensor& buffer : buffers_) {
      if (buffer.storage().use_count() > 1) continue;  // a layer, or a graph, still uses it
      if (buffer.numel() < bytes) buffer = at::empty({largest_}, options);
      return buffer.narrow(0, 0, bytes);
    }
    buffers_.push_back(at::empty({largest_}, options));
    return buffers_.back().narrow(0, 0, bytes);
  }
  void expect(std::int64_t bytes) { largest_ = std::max(largest_, bytes); }

 private:
  std::vector<at::Tensor> buffers_;
  std::int64_t largest_ = 0;
};

// Tensors that are all-gathered together: their bytes one behind the other, in shards of equal size.
class ShardedTensors {
 public:
  // Takes the frozen ones of these.
  ShardedTensors(std::vector<at::Tensor> tensors, const Group& group, std::shared_ptr<BufferPool> pool,
                 at::Device device)
      : group_(group), pool_(std::move(pool)), slots_(tensors.size()) {
    constexpr std::int64_t alignment = 64;  // of each, so that it can be computed with where it lies
    std::int64_t all = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& t = tensors[i];
      if (!t.defined() || t.requires_grad()) continue;
      pieces_.push_back({i, all, static_cast<std::int64_t>(t.nbytes()), t.scalar_type(), t.sizes().vec()});
      all += (pieces_.back().bytes + alignment - 1) / alignment * alignment;
    }
    if (pieces_.empty()) return;
    const std::int64_t each = (all / alignment + group.size() - 1) / group.size() * alignment;
    const std::int64_t begin = each * group.rank(), end = begin + each;
    pool_->expect(each * group.size());
    part_ = at::zeros({each}, at::TensorOptions().dtype(at::kByte).device(device));
    for (const Piece& p : pieces_) {
      const std::int64_t from = std::max(begin, p.begin), to = std::min(end, p.begin + p.bytes);
      if (from >= to) continue;
      part_.narrow(0, from - begin, to - from).copy_(as_bytes(tensors[p.slot]).narrow(0, from - p.begin, to - from));
    }
  }

  bool empty() const { return pieces_.empty(); }

  // Starts the all-gather, unless it is in flight.
  void fetch() {
    if (empty() || whole_.defined()) return;
    whole_ = pool_->take(part_.numel() * group_.size(), part_.options());
    pending_ = group_.all_gather(whole_, part_);
  }

  // All of them, in the order in which they were given; their memory serves others when the last of them is gone.
  std::vector<at::Tensor> take() {
    std::vector<at::Tensor> tensors(slots_);
    fetch();
    pending_.wait();
    for (const Piece& p : pieces_) {
      tensors[p.slot] = whole_.narrow(0, p.begin, p.bytes).view(p.dtype).view(p.shape);
    }
    whole_.reset();
    pending_ = {};
    return tensors;
  }

 private:
  struct Piece {
    std::size_t slot;
    std::int64_t begin, bytes;
    at::ScalarType dtype;
    std::vector<std::int64_t> shape;
  };
  Group group_;
  std::shared_ptr<BufferPool> pool_;
  std::size_t slots_;
  std::vector<Piece> pieces_;
  at::Tensor part_;   // [bytes / ranks]
  at::Tensor whole_;  // [bytes], while it is gathered
  Group::Pending pending_;
};

std::vector<at::Tensor*> matrices(LayerWeights& layer) {
  std::vector<at::Tensor*> all;
  for (Linear* linear : linears(layer)) all.insert(all.end(), {&linear->weight, &linear->bias});
  return all;
}

// Moves the frozen ones of `from` into shards: what trains stays.
ShardedTensors take_away(const std::vector<at::Tensor*>& from, const Group& group,
                         const std::shared_ptr<BufferPool>& pool, at::Device device) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(from.size());
  for (const at::Tensor* t : from) tensors.push_back(*t);
  ShardedTensors sharded(tensors, group, pool, device);
  for (at::Tensor* t : from) {
    if (t->defined() && !t->requires_grad()) t->reset();
  }
  return sharded;
}

struct Shards {
  LlamaWeights kept;  // what is whole everywhere
  std::vector<ShardedTensors> layers;
  std::vector<ShardedTensors> ends;  // the embedding; and the head, where it is another
};

}  // namespace

void shard_base(LlamaWeights& weights, const Group& group, Parallel& parallel, at::Device device) {
  if (group.size() == 1) return;
  const auto shards = std::make_shared<Shards>();
  const auto pool = std::make_shared<BufferPool>();
  const bool tied = weights.head.weight.is_same(weights.embedding);
  for (LayerWeights& layer : weights.layers) {
    shards->layers.push_back(take_away(matrices(layer), group, pool, device));
    // The mapping of a checkpoint stays while anything of it is used, with all its pages that were read.
    for (at::Tensor* norm : {&layer.input_norm, &layer.q_norm, &layer.k_norm, &layer.post_attention_norm}) {
      if (norm->defined() && !norm->requires_grad())
        *norm = norm->to(device, norm->scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  }
  if (!weights.norm.requires_grad())
    weights.norm = weights.norm.to(device, weights.norm.scalar_type(), false, /*copy=*/true);
  shards->ends.push_back(take_away({&weights.embedding}, group, pool, device));
  if (tied) {
    weights.head.weight = weights.embedding;
  } else {
    shards->ends.push_back(take_away({&weights.head.weight, &weights.head.bias}, group, pool, device));
  }
  shards->kept = weights;

  parallel.layer = [shards](std::int64_t i, bool again) {
    const std::int64_t next = again ? i - 1 : i + 1, count = static_cast<std::int64_t>(shards->layers.size());
    shards->layers[static_cast<std::size_t>(i)].fetch();
    if (next >= 0 && next < count) shards->layers[static_cast<std::size_t>(next)].fetch();
    if (next == count) shards->ends.back().fetch();
    const trace::Span waiting("weights", i);
    LayerWeights layer = shards->kept.layers[static_cast<std::size_t>(i)];
    const std::vector<at::Tensor> came = shards->layers[static_cast<std::size_t>(i)].take();
    const std::vector<at::Tensor*> places = matrices(layer);
    for (std::size_t p = 0; p < places.size(); ++p) {
      if (came[p].defined()) *places[p] = came[p];
    }
    return layer;
  };
  parallel.embedding = [shards] {
    shards->ends.front().fetch();
    shards->layers.front().fetch();
    const at::Tensor came = shards->ends.front().take()[0];
    return came.defined() ? came : shards->kept.embedding;
  };
  parallel.head = [shards] {
    shards->ends.back().fetch();
    // The backward begins with the last layer.
    if (c10::GradMode::is_enabled()) shards->layers.back().fetch();
    const std::vector<at::Tensor> came = shards->ends.back().take();
    Linear head = shards->kept.head;
    if (came[0].defined()) head.weight = came[0];
    if (came.size() > 1 && came[1].defined()) head.bias = came[1];
    return head;
  };
}

}  // namespace tapetune
