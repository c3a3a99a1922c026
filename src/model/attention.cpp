#include "model/attention.h"

#include "kernels/decode_attention.h"
#include "kernels/pointwise.h"

namespace tapetune {

namespace {

at::Tensor flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                 bool causal, double scale) {
  return at::scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale, /*enable_gqa=*/q.size(1) != k.size(1));
}

// New tokens behind a past: [H, N, D] over [K, P + N, D]. The mask goes a block of queries at a time, never N x N.
at::Tensor after_past(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  constexpr std::int64_t block = 256;
  const std::int64_t tokens = q.size(1), past = k.size(1) - tokens;
  std::vector<at::Tensor> parts;
  for (std::int64_t begin = 0; begin < tokens; begin += block) {
    const std::int64_t count = std::min(block, tokens - begin), seen = past + begin + count;
    const at::Tensor rows = at::arange(past + begin, seen, q.options().dtype(at::kLong)).unsqueeze(1);
    const at::Tensor hidden = at::arange(seen, q.options().dtype(at::kLong)) > rows;  // [count, seen]
    const at::Tensor mask = at::zeros({count, seen}, q.options()).masked_fill_(hidden, -INFINITY);
    parts.push_back(flash(q.narrow(1, begin, count).unsqueeze(0), k.narrow(1, 0, seen).unsqueeze(0),
                          v.narrow(1, 0, seen).unsqueeze(0), mask, false, scale)
                        .squeeze(0));
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts, 1);
}

at::Tensor row_with_cache(const at::Tensor& q, const SequenceCache::View& all, double scale) {
  const std::int64_t tokens = q.size(1), length = all.k.size(1);
  if (tokens == 1 && kernels::fused(q)) {
    return kernels::decode_attention(q.squeeze(1), all.k, all.v, length, scale).unsqueeze(1);
  }
  if (tokens < length && tokens > 1) return after_past(q, all.k, all.v, scale);
  // A single token sees everything, and without a past the flash kernel's own causal form fits.
  return flash(q.unsqueeze(0), all.k.unsqueeze(0), all.v.unsqueeze(0), std::nullopt, tokens > 1, scale).squeeze(0);
}

}  // namespace

at::Tensor causal_attention(const AttentionInput& in) {
  const std::int64_t batch = in.q.size(0), tokens = in.q.size(2);
  const bool padded = std::any_of(in.spans.begin(), in.spans.end(),
                                  [&](const RowSpan& span) { return span.begin != 0 || span.end != tokens; });
  if (in.caches.empty() && !padded) return flash(in.q, in.k, in.v, std::nullopt, true, in.scale);

  std::vector<at::Tensor> rows;
  for (std::int64_t b = 0; b < batch; ++b) {
    const RowSpan span = padded ? in.spans[static_cast<std::size_t>(b)] : RowSpan{0, tokens};
    const std::int64_t count = span.end - span.begin;
    // Tokens of a row are contiguous, so a row without its padding is plain causal attention.
    const at::Tensor q = in.q[b].narrow(1, span.begin, count), k = in.k[b].narrow(1, span.begin, count),
                     v = in.v[b].narrow(1, span.begin, count);
    at::Tensor out;
    if (in.caches.empty()) {
      out = flash(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), std::nullopt, true, in.scale).squeeze(0);
    } else {
      out = row_with_cache(q, in.caches[static_cast<std::size_t>(b)]->append(in.layer, k, v), in.scale);
    }
    if (count != tokens) out = at::constant_pad_nd(out, {0, 0, span.begin, tokens - span.end});
    rows.push_back(out);
  }
  return rows.size() == 1 ? rows.front().unsqueeze(0) : at::stack(rows);
}

}  // namespace tapetune
