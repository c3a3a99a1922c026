#include "kernels/attention_paths.h"

namespace tapetune::kernels {

namespace {

constexpr std::int64_t queries_at_a_time = 256;

at::ScalarType computed_in(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// Some queries of a piece and the keys that one of them sees, counted from the first of the sequence's.
struct Block {
  Visible::Piece piece;
  std::int64_t query, queries, key, keys;  // the first and how many
};

std::vector<Block> blocks_of(const AttentionShape& s, const Visible& visible, std::int64_t at_a_time) {
  std::vector<Block> blocks;
  for (const Visible::Piece& piece : visible.pieces(s.batch, s.heads, s.keys)) {
    for (std::int64_t at = std::max(piece.begin, s.past()); at < piece.end; at += at_a_time) {
      const std::int64_t count = std::min(at_a_time, piece.end - at);
      const std::int64_t key = visible.window == 0 ? piece.begin : std::max(piece.begin, at - visible.window + 1);
      blocks.push_back({piece, at - s.past(), count, key, at + count - key});
    }
  }
  return blocks;
}

// One block's operands by head, and the scores that they give.
class Operands {
 public:
  Operands(const AttentionShape& s, const Block& block, const Scores& scores, const at::TensorOptions& options)
      : s_(s), block_(block), scores_(scores) {
    const Visible::Piece& piece = block.piece;
    const auto indices = options.dtype(at::kLong);
    key_head_ = at::arange(piece.head, piece.head + piece.heads, indices).floor_divide(s.group());
    const at::Tensor query = at::arange(block.query + s.past(), block.query + s.past() + block.queries, indices);
    distance = query.unsqueeze(1) - at::arange(block.key, block.key + block.keys, indices);  // [n, m]
    hidden = distance < 0;
    if (scores.visible.window > 0) hidden.logical_or_(distance >= scores.visible.window);
    distance.clamp_min_(0);
  }

  // Of [B, N, H, D], these rows, heads and queries: [R, h, n, D].
  at::Tensor queries(const at::Tensor& x) const {
    const Visible::Piece& piece = block_.piece;
    return x.narrow(0, piece.row, piece.rows)
        .narrow(1, block_.query, block_.queries)
        .narrow(2, piece.head, piece.heads)
        .transpose(1, 2);
  }
  // Of [B, M, K, D], these rows and keys, a copy for each head: [R, h, m, D].
  at::Tensor keys(const at::Tensor& x) const {
    const at::Tensor own = x.narrow(0, block_.piece.row, block_.piece.rows).narrow(1, block_.key, block_.keys);
    return (s_.group() == 1 ? own.narrow(2, block_.piece.head, block_.piece.heads) : own.index_select(2, key_head_))
        .transpose(1, 2)
        .to(computed_in(x));
  }
  // What was made for keys(x) goes to its places in [B, M, K, D], where other heads add theirs.
  void add_keys(const at::Tensor& to, const at::Tensor& x) const {
    to.narrow(0, block_.piece.row, block_.piece.rows)
        .narrow(1, block_.key, block_.keys)
        .index_add_(2, key_head_, x.transpose(1, 2));
  }
  // lse and delta, [B, H, N]: [R, h, n, 1].
  at::Tensor numbers(const at::Tensor& x) const {
    const Visible::Piece& piece = block_.piece;
    return x.narrow(0, piece.row, piece.rows)
        .narrow(1, piece.head, piece.heads)
        .narrow(2, block_.query, block_.queries)
        .unsqueeze(-1);
  }
  at::Tensor scores(const at::Tensor& q, const at::Tensor& k) const {  // [R, h, n, D], [R, h, m, D] -> [R, h, n, m]
    at::Tensor all = at::matmul(q, k.transpose(2, 3)).mul_(scores_.scale);
    if (scores_.bias.defined()) {
      const at::Tensor table = scores_.bias.narrow(0, block_.piece.head, block_.piece.heads);
      all.add_(table.index_select(1, distance.flatten()).unflatten(1, distance.sizes()));
    }
    return all.masked_fill_(hidden, -INFINITY);
  }

  at::Tensor distance, hidden;  // [n, m]

 private:
  const AttentionShape& s_;
  const Block& block_;
  const Scores& scores_;
  at::Tensor key_head_;  // [h]
};

}  // namespace

Attended forward_in_blocks(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& extra_values, const Scores& scores) {
  const auto dtype = computed_in(q);
  Attended out;
  out.values = at::empty({s.batch, s.queries, s.heads, s.width}, q.options());
  if (extra_values.defined()) out.extra_output = at::empty_like(out.values);
  out.lse = at::empty({s.batch, s.heads, s.queries}, q.options().dtype(dtype));
  for (const Block& block : blocks_of(s, scores.visible, queries_at_a_time)) {
    const Operands own(s, block, scores, q.options());
    const at::Tensor weights = own.scores(own.queries(q).to(dtype), own.keys(k));  // [R, h, n, m]
    const at::Tensor lse = weights.logsumexp(-1, true);
    own.numbers(out.lse).copy_(lse);
    weights.sub_(lse).exp_();
    own.queries(out.values).copy_(at::matmul(weights, own.keys(v)));
    if (extra_values.defined()) own.queries(out.extra_output).copy_(at::matmul(weights, own.keys(extra_values)));
  }
  return out;
}

AttentionGradients backward_in_blocks(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const at::Tensor& extra_values, const at::Tensor& lse,
                                      const at::Tensor& delta, const at::Tensor& d_values,
                                      const at::Tensor& d_extra_output, const Scores& scores, bool need_extra,
                                      bool need_bias) {
  const auto dtype = computed_in(q);
  const at::TensorOptions options = q.options().dtype(dtype);
  const std::vector<std::int64_t> key_sizes{s.batch, s.keys, s.key_heads, s.width};
  AttentionGradients d;
  d.q = at::empty({s.batch, s.queries, s.heads, s.width}, q.options());
  d.k = at::zeros(key_sizes, options);
  d.v = at::zeros(key_sizes, options);
  if (need_extra && extra_values.defined()) d.extra_values = at::zeros(key_sizes, options);
  if (need_bias && scores.bias.defined()) d.bias = at::zeros(scores.bias.sizes(), options);
  const at::Tensor deltas = delta.transpose(1, 2);  // [B, H, N]
  for (const Block& block : blocks_of(s, scores.visible, queries_at_a_time)) {
    const Operands own(s, block, scores, q.options());
    const at::Tensor query = own.queries(q).to(dtype), key = own.keys(k);
    const at::Tensor weights = own.scores(query, key).sub_(own.numbers(lse)).exp_();  // [R, h, n, m]
    at::Tensor d_scores = own.numbers(deltas).neg().to(dtype).expand_as(weights).contiguous();
    const auto through = [&](const at::Tensor& d_result, const at::Tensor& x, const at::Tensor& d_x) {
      if (!d_result.defined()) return;
      const at::Tensor d_own = own.queries(d_result).to(dtype);
      d_scores.add_(at::matmul(d_own, own.keys(x).transpose(2, 3)));
      if (d_x.defined()) own.add_keys(d_x, at::matmul(weights.transpose(2, 3), d_own));
    };
    through(d_values, v, d.v);
    through(extra_values.defined() ? d_extra_output : at::Tensor(), extra_values, d.extra_values);
    d_scores.mul_(weights);
    own.queries(d.q).copy_(at::matmul(d_scores, key).mul_(scores.scale));
    own.add_keys(d.k, at::matmul(d_scores.transpose(2, 3), query).mul_(scores.scale));
    if (d.bias.defined()) {
      d.bias.narrow(0, block.piece.head, block.piece.heads)
          .index_add_(1, own.distance.flatten(), d_scores.sum(0).flatten(1));
    }
  }
  d.k = d.k.to(q.scalar_type());
  d.v = d.v.to(q.scalar_type());
  if (d.extra_values.defined()) d.extra_values = d.extra_values.to(q.scalar_type());
  if (d.bias.defined()) d.bias = d.bias.to(scores.bias.scalar_type());
  return d;
}

at::Tensor dense_weights(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k, const Scores& scores) {
  at::Tensor all = at::zeros({s.batch, s.heads, s.queries, s.keys}, q.options());
  for (const Block& block : blocks_of(s, scores.visible, s.queries)) {
    const Operands own(s, block, scores, q.options());
    const Visible::Piece& piece = block.piece;
    all.narrow(0, piece.row, piece.rows)
        .narrow(1, piece.head, piece.heads)
        .narrow(2, block.query, block.queries)
        .narrow(3, block.key, block.keys)
        .copy_(own.scores(own.queries(q), own.keys(k)).softmax(-1));
  }
  return all;
}

}  // namespace tapetune::kernels
