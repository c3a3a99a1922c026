#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>

#include "kernels/attention_paths.h"
#include "kernels/cpu/attention_loops.h"
#include "kernels/cpu/loops.h"
#include "kernels/grain.h"

namespace tapetune::kernels {

namespace {

// Keys [begin, end) of one key head that belong together, and the query heads that look at them.
struct Span {
  std::int64_t batch, key_head, first_head, last_head;
  std::int64_t begin, end;
};

std::vector<Span> spans_of(const AttentionShape& s, const Visible& visible) {
  std::vector<Span> spans;
  for (const Visible::Piece& piece : visible.pieces(s.batch, s.heads, s.keys)) {
    for (std::int64_t b = piece.row; b < piece.row + piece.rows; ++b) {
      for (std::int64_t h = piece.head, end = piece.head + piece.heads; h < end;) {
        const std::int64_t key_head = h / s.group(), next = std::min(end, (key_head + 1) * s.group());
        spans.push_back({b, key_head, h, next, piece.begin, piece.end});
        h = next;
      }
    }
  }
  return spans;
}

// Keys that a query of the span sees at most.
std::int64_t reach_of(const Span& span, const Visible& visible) {
  const std::int64_t length = span.end - span.begin;
  return visible.window == 0 ? length : std::min(length, visible.window);
}

// Numbers by distance for the loops, a row each: the distances from the largest down to 0, with room on both sides for
// what whole tiles touch.
struct DistanceRows {
  at::Tensor rows;  // [rows, room + M + room]; undefined: there are none
  static constexpr std::int64_t room = loops::bias_room;

  static DistanceRows zeros(std::int64_t count, const AttentionShape& s) {
    return {at::zeros({count, room + s.keys + room}, at::kFloat)};
  }
  static DistanceRows of_bias(const at::Tensor& bias, const AttentionShape& s) {
    if (!bias.defined()) return {};
    DistanceRows all = zeros(s.heads, s);
    all.inner(s).copy_(bias.narrow(1, 0, s.keys).flip(1)).mul_(loops::log2_e);
    return all;
  }
  at::Tensor inner(const AttentionShape& s) const { return rows.narrow(1, room, s.keys); }
  // Where a row has distance 0.
  float* zero(std::int64_t row) const {
    return rows.defined() ? rows.mutable_data_ptr<float>() + (row + 1) * rows.size(1) - room - 1 : nullptr;
  }
};

// The key before which half of a span's work lies: the first keys are seen by most queries, each by as many as a window
// lets. Without one, 1 - sqrt(1/2) of the keys are half of the work.
std::int64_t half_of(std::int64_t length, std::int64_t reach) {
  const auto all = static_cast<double>(length), seen = static_cast<double>(reach);
  const double middle = 3 * reach <= 2 * length ? all / 2 - seen / 4 : all - std::sqrt(seen * all - seen * seen / 2);
  const std::int64_t keys = reach == length ? length * 293 / 1000 : static_cast<std::int64_t>(middle);
  return keys / loops::key_block * loops::key_block;
}

// Of queries with keys and of weights with values.
std::int64_t products_of(const AttentionShape& s) { return 2 * s.batch * s.heads * s.queries * s.keys * s.width; }

at::Tensor readable(const at::Tensor& x) { return !x.defined() || x.stride(-1) == 1 ? x : x.contiguous(); }

// Row `token` of a head: x is [B, tokens, heads, D].
loops::Rows rows(const at::Tensor& x, std::int64_t batch, std::int64_t token, std::int64_t head) {
  if (!x.defined()) return {nullptr, 0};
  return {x.const_data_ptr<float>() + batch * x.stride(0) + token * x.stride(1) + head * x.stride(2), x.stride(1)};
}

float* place(const at::Tensor& x, std::int64_t batch, std::int64_t token, std::int64_t head) {
  if (!x.defined()) return nullptr;
  return x.mutable_data_ptr<float>() + batch * x.stride(0) + token * x.stride(1) + head * x.stride(2);
}

// The tasks differ in size, so that each thread takes the next as it gets free. Every task writes numbers of its own:
// who does it changes no bit. All tasks together touch this many `numbers`: few are not worth other threads.
template <typename Work>
void share(std::size_t tasks, std::int64_t numbers, std::int64_t scratch, const Work& work) {
  if (tasks == 0) return;
  std::atomic<std::size_t> next{0};
  const auto count = static_cast<std::int64_t>(tasks), grain = grain_of(numbers / count);
  const auto threads = std::min<std::int64_t>(at::get_num_threads(), (count + grain - 1) / grain);
  at::parallel_for(0, threads, 1, [&](std::int64_t, std::int64_t) {
    const at::Tensor room = at::empty({scratch}, at::kFloat);
    for (std::size_t task = next++; task < tasks; task = next++) work(task, room.mutable_data_ptr<float>());
  });
}

// [B, M, H, D] -> [B, M, K, D], always in the order of the heads.
at::Tensor sum_groups(const at::Tensor& x, const AttentionShape& s) {
  if (!x.defined() || s.group() == 1) return x;
  at::Tensor out = at::empty({s.batch, s.keys, s.key_heads, s.width}, x.options());
  const auto* from = x.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  const std::int64_t group = s.group(), width = s.width;
  at::parallel_for(0, s.batch * s.keys * s.key_heads, grain_of(group * width),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t r = begin; r < end; ++r) {
                       const float* in = from + r * group * width;
                       float* sum = to + r * width;
                       std::copy_n(in, width, sum);
                       for (std::int64_t g = 1; g < group; ++g) {
                         for (std::int64_t i = 0; i < width; ++i) sum[i] += in[g * width + i];
                       }
                     }
                   });
  return out;
}

}  // namespace

Attended forward_in_tiles(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& extra_values, const Scores& scores) {
  const std::vector<Span> spans = spans_of(s, scores.visible);
  const DistanceRows bias = DistanceRows::of_bias(scores.bias, s);
  const at::Tensor queries = readable(q), keys = readable(k), values = readable(v), more = readable(extra_values);
  Attended out;
  out.values = at::empty({s.batch, s.queries, s.heads, s.width}, q.options());
  if (extra_values.defined()) out.extra_output = at::empty_like(out.values);
  out.lse = at::empty({s.batch, s.heads, s.queries}, q.options());

  // Every block of queries reads all keys before it: they are put in the order of the products once.
  constexpr std::int64_t chunk = 8 * loops::lane;
  struct Packing {
    std::size_t span;
    std::int64_t begin, count;
  };
  struct Block {
    std::size_t span;
    std::int64_t head, begin, count;  // queries, counted from the first of the N
  };
  std::vector<Packing> packings;
  std::vector<Block> blocks;
  std::vector<std::int64_t> offset;  // rows of the packed keys before a span's
  std::int64_t total = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const Span& span = spans[i];
    const std::int64_t length = span.end - span.begin, past = s.past();
    offset.push_back(total);
    total += (length + loops::lane - 1) / loops::lane * loops::lane;
    for (std::int64_t at = 0; at < length; at += chunk) packings.push_back({i, at, std::min(chunk, length - at)});
    const std::int64_t from = std::max<std::int64_t>(0, span.begin - past), count = span.end - past - from;
    for (std::int64_t h = span.first_head; h < span.last_head; ++h) {
      // The dearest first, so that the threads end together.
      for (std::int64_t n = (count + loops::query_block - 1) / loops::query_block - 1; n >= 0; --n) {
        const std::int64_t at = n * loops::query_block;
        blocks.push_back({i, h, from + at, std::min(loops::query_block, count - at)});
      }
    }
  }
  const std::int64_t stride = loops::row_stride(s.width);
  const at::Tensor key_panels = at::empty({total * s.width}, q.options());
  const at::Tensor value_rows = at::empty({total * stride}, q.options());
  const at::Tensor extra_rows = extra_values.defined() ? at::empty({total * stride}, q.options()) : at::Tensor();
  auto* panels = key_panels.mutable_data_ptr<float>();
  auto* first = value_rows.mutable_data_ptr<float>();
  auto* second = extra_values.defined() ? extra_rows.mutable_data_ptr<float>() : nullptr;

  share(packings.size(), total * s.width * (extra_values.defined() ? 3 : 2), 0, [&](std::size_t task, float*) {
    const Packing& p = packings[task];
    const Span& span = spans[p.span];
    const std::int64_t token = span.begin + p.begin, to = offset[p.span] + p.begin;
    const loops::Rows key = rows(keys, span.batch, token, span.key_head);
    loops::copy_panels(key.data, key.stride, p.count, s.width, panels + to * s.width);
    const loops::Rows value = rows(values, span.batch, token, span.key_head);
    loops::copy_rows(value.data, value.stride, p.count, s.width, first + to * stride);
    if (second != nullptr) {
      const loops::Rows extra = rows(more, span.batch, token, span.key_head);
      loops::copy_rows(extra.data, extra.stride, p.count, s.width, second + to * stride);
    }
  });
  share(blocks.size(), products_of(s), loops::forward_scratch(s.width), [&](std::size_t task, float* scratch) {
    const Block& block = blocks[task];
    const Span& span = spans[block.span];
    const std::int64_t all = s.past() + block.begin + 1 - span.begin, hidden = all - reach_of(span, scores.visible);
    // Keys that no query of the block sees are left out, in whole panels.
    const std::int64_t skipped = std::max<std::int64_t>(0, hidden) / loops::lane * loops::lane;
    const std::int64_t to = offset[block.span] + skipped;
    const loops::Rows query = rows(queries, span.batch, block.begin, block.head);
    loops::attention_forward(
        {.q = query.data,
         .q_stride = query.stride,
         .rows = block.count,
         .width = s.width,
         .seen = all - skipped,
         .hidden = hidden - skipped,
         .scale = static_cast<float>(scores.scale),
         .bias = bias.zero(block.head),
         .keys = panels + to * s.width,
         .values = first + to * stride,
         .extra_values = second == nullptr ? nullptr : second + to * stride,
         .out = place(out.values, span.batch, block.begin, block.head),
         .extra_output = place(out.extra_output, span.batch, block.begin, block.head),
         .out_stride = s.heads * s.width,
         .lse = out.lse.mutable_data_ptr<float>() + (span.batch * s.heads + block.head) * s.queries + block.begin,
         .scratch = scratch});
  });
  return out;
}

at::Tensor delta_in_rows(const at::Tensor& result, const at::Tensor& d_result) {
  const at::Tensor x = result.contiguous(), y = d_result.contiguous();
  const std::int64_t width = x.size(3);
  at::Tensor out = at::empty({x.size(0), x.size(1), x.size(2)}, x.options());
  const auto *from = x.const_data_ptr<float>(), *other = y.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, out.numel(), grain_of(width), [&](std::int64_t begin, std::int64_t end) {
    loops::row_dots(from + begin * width, other + begin * width, to + begin, end - begin, width);
  });
  return out;
}

AttentionGradients backward_in_tiles(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const at::Tensor& extra_values, const at::Tensor& given_lse,
                                     const at::Tensor& delta, const at::Tensor& d_values,
                                     const at::Tensor& d_extra_output, const Scores& scores, bool need_extra,
                                     bool need_bias) {
  const std::vector<Span> spans = spans_of(s, scores.visible);
  const DistanceRows bias = DistanceRows::of_bias(scores.bias, s);
  const at::Tensor queries = readable(q), keys = readable(k), values = readable(v), more = readable(extra_values);
  const at::Tensor zero = d_values.defined() ? at::Tensor() : at::zeros({1, 1, 1, s.width}, q.options());
  const at::Tensor d_first = d_values.defined() ? readable(d_values) : zero.expand_as(q);
  const at::Tensor d_second = extra_values.defined() ? readable(d_extra_output) : at::Tensor();
  const at::Tensor lse = given_lse.contiguous(), deltas = delta.contiguous();

  // Heads that share keys get gradients of their own first: then any head is a task.
  const std::vector<std::int64_t> sizes{s.batch, s.keys, s.heads, s.width};
  AttentionGradients d;
  d.q = at::empty({s.batch, s.queries, s.heads, s.width}, q.options());
  d.k = at::empty(sizes, q.options());
  d.v = at::empty(sizes, q.options());
  if (need_extra && extra_values.defined()) d.extra_values = at::empty(sizes, q.options());

  // Few long spans are halved, so that the threads end together. The second half has the queries' gradients apart.
  struct Task {
    std::size_t span;
    std::int64_t head, begin, end;  // keys, counted from the span's first
    const at::Tensor* d_q;
  };
  const std::int64_t past = s.past();
  at::Tensor rest;
  std::vector<Task> tasks;
  std::int64_t longest = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const std::int64_t length = spans[i].end - spans[i].begin;
    longest = std::max(longest, length);
    const bool halve = past == 0 && s.batch * s.heads < 32 && length >= 8 * loops::key_block;
    const std::int64_t middle = halve ? half_of(length, reach_of(spans[i], scores.visible)) : length;
    if (halve && !rest.defined()) rest = at::empty_like(d.q);
    for (std::int64_t h = spans[i].first_head; h < spans[i].last_head; ++h) {
      tasks.push_back({i, h, 0, middle, &d.q});
      if (halve) tasks.push_back({i, h, middle, length, &rest});
    }
  }
  DistanceRows d_bias;  // a row for each task: the order of the sum is always that of the tasks
  if (need_bias && bias.rows.defined()) d_bias = DistanceRows::zeros(static_cast<std::int64_t>(tasks.size()), s);
  share(tasks.size(), 2 * products_of(s), loops::backward_scratch(std::min(longest, s.queries), s.width),
        [&](std::size_t index, float* scratch) {
          const Task& task = tasks[index];
          const Span& span = spans[task.span];
          const std::int64_t b = span.batch, h = task.head, key = span.begin + task.begin;
          const std::int64_t query = std::max<std::int64_t>(0, key - past);
          loops::attention_backward(
              {.q = rows(queries, b, query, h),
               .k = rows(keys, b, key, span.key_head),
               .v = rows(values, b, key, span.key_head),
               .extra_values = rows(more, b, key, span.key_head),
               .d_values = rows(d_first, b, query, h),
               .d_extra_output = rows(d_second, b, query, h),
               .lse = lse.const_data_ptr<float>() + (b * s.heads + h) * s.queries + query,
               .delta = {deltas.const_data_ptr<float>() + (b * s.queries + query) * s.heads + h, s.heads},
               .queries = span.end - past - query,
               .keys = task.end - task.begin,
               .width = s.width,
               .past = past + query - key,
               .reach = reach_of(span, scores.visible),
               .scale = static_cast<float>(scores.scale),
               .bias = bias.zero(h),
               .d_bias = d_bias.zero(static_cast<std::int64_t>(index)),
               .d_q = place(*task.d_q, b, query, h),
               .d_k = place(d.k, b, key, h),
               .d_v = place(d.v, b, key, h),
               .d_extra_values = place(d.extra_values, b, key, h),
               .gradient_stride = s.heads * s.width,
               .scratch = scratch});
        });
  share(rest.defined() ? tasks.size() : 0, d.q.numel(), 0, [&](std::size_t index, float*) {
    const Task& task = tasks[index];
    const Span& span = spans[task.span];
    if (task.begin == 0) return;
    for (std::int64_t n = span.begin + task.begin; n < span.end; ++n) {
      const float* more_q = rows(rest, span.batch, n, task.head).data;
      float* d_q = place(d.q, span.batch, n, task.head);
      for (std::int64_t i = 0; i < s.width; ++i) d_q[i] += more_q[i];
    }
  });
  if (d_bias.rows.defined()) {
    d.bias = at::zeros(scores.bias.sizes(), q.options());
    const at::Tensor own = d_bias.inner(s).flip(1);  // [tasks, M]
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      d.bias.select(0, tasks[i].head).narrow(0, 0, s.keys).add_(own.select(0, static_cast<std::int64_t>(i)));
    }
  }
  d.k = sum_groups(d.k, s);
  d.v = sum_groups(d.v, s);
  d.extra_values = sum_groups(d.extra_values, s);
  return d;
}

}  // namespace tapetune::kernels
