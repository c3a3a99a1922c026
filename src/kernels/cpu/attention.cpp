#include "kernels/attention.h"

#include <ATen/Parallel.h>

#include <atomic>

#include "core/error.h"
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

struct Shape {
  std::int64_t batch, queries, keys, heads, key_heads, width;
  std::int64_t group() const { return heads / key_heads; }
};

Shape shape_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& extra_values) {
  for (const at::Tensor& x : {q, k, v, extra_values}) {
    if (x.defined() && (x.dim() != 4 || !x.is_cpu() || x.scalar_type() != at::kFloat)) {
      fail("attention", "queries, keys and values must be f32 on the CPU with 4 axes.");
    }
  }
  const Shape s{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3)};
  const std::vector<std::int64_t> sizes{s.batch, s.keys, s.key_heads, s.width};
  if (s.keys < s.queries || s.key_heads < 1 || s.heads % s.key_heads != 0 || k.sizes() != sizes || v.sizes() != sizes ||
      (extra_values.defined() && extra_values.sizes() != sizes)) {
    fail("attention", "queries [{}] do not go with keys [{}] and values [{}].", fmt::join(q.sizes(), ", "),
         fmt::join(k.sizes(), ", "), fmt::join(v.sizes(), ", "));
  }
  return s;
}

std::vector<Span> spans_of(const Shape& s, const Cuts& cuts) {
  const auto checked = [&](std::vector<std::int64_t> list) {
    if (list.empty()) list.push_back(0);
    const bool rising = std::is_sorted(list.begin(), list.end(), std::less_equal<>());
    if (list.front() != 0 || !rising || list.back() >= std::max<std::int64_t>(s.queries, 1) ||
        (list.size() > 1 && s.queries != s.keys)) {
      fail("attention", "cuts must begin at 0, increase and lie within {} tokens without past keys; they are {}.",
           s.queries, fmt::join(list, ", "));
    }
    list.push_back(s.keys);
    return list;
  };
  const auto first = checked(cuts.first), second = checked(cuts.second);
  const std::int64_t middle = s.heads / 2;
  std::vector<Span> spans;
  const auto add = [&](const std::vector<std::int64_t>& list, std::int64_t from, std::int64_t to) {
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t h = from; h < to;) {
        const std::int64_t key_head = h / s.group(), next = std::min(to, (key_head + 1) * s.group());
        for (std::size_t i = 0; i + 1 < list.size(); ++i) {
          spans.push_back({b, key_head, h, next, list[i], list[i + 1]});
        }
        h = next;
      }
    }
  };
  if (first == second) {
    add(first, 0, s.heads);
  } else {
    add(first, 0, middle);
    add(second, middle, s.heads);
  }
  return spans;
}

// Of queries with keys and of weights with values.
std::int64_t products_of(const Shape& s) { return 2 * s.batch * s.heads * s.queries * s.keys * s.width; }

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
at::Tensor sum_groups(const at::Tensor& x, const Shape& s) {
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

Attended attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& extra_values, double scale, const Cuts& cuts) {
  const Shape s = shape_of(q, k, v, extra_values);
  const std::vector<Span> spans = spans_of(s, cuts);
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
    const std::int64_t length = span.end - span.begin, past = s.keys - s.queries;
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
    const std::int64_t to = offset[block.span];
    const loops::Rows query = rows(queries, span.batch, block.begin, block.head);
    loops::attention_forward(
        {.q = query.data,
         .q_stride = query.stride,
         .rows = block.count,
         .width = s.width,
         .seen = s.keys - s.queries + block.begin + 1 - span.begin,
         .scale = static_cast<float>(scale),
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

at::Tensor attention_delta(const at::Tensor& result, const at::Tensor& d_result) {
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

AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& extra_values, const Attended& out, const at::Tensor& d_values,
                                      const at::Tensor& d_extra_output, double scale, const Cuts& cuts,
                                      bool need_extra) {
  at::Tensor delta =
      d_values.defined() ? attention_delta(out.values, d_values) : at::zeros(q.sizes().slice(0, 3), q.options());
  if (d_extra_output.defined()) delta.add_(attention_delta(out.extra_output, d_extra_output));
  return attention_backward(q, k, v, extra_values, out.lse, delta, d_values, d_extra_output, scale, cuts, need_extra);
}

AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& extra_values, const at::Tensor& given_lse,
                                      const at::Tensor& delta, const at::Tensor& d_values,
                                      const at::Tensor& d_extra_output, double scale, const Cuts& cuts,
                                      bool need_extra) {
  const Shape s = shape_of(q, k, v, extra_values);
  const std::vector<Span> spans = spans_of(s, cuts);
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
  const std::int64_t past = s.keys - s.queries;
  at::Tensor rest;
  std::vector<Task> tasks;
  std::int64_t longest = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const std::int64_t length = spans[i].end - spans[i].begin;
    longest = std::max(longest, length);
    const bool halve = past == 0 && s.batch * s.heads < 32 && length >= 8 * loops::key_block;
    // The first keys are seen by most queries: 1 - sqrt(1/2) of them are half of the work.
    const std::int64_t middle = halve ? length * 293 / 1000 / loops::key_block * loops::key_block : length;
    if (halve && !rest.defined()) rest = at::empty_like(d.q);
    for (std::int64_t h = spans[i].first_head; h < spans[i].last_head; ++h) {
      tasks.push_back({i, h, 0, middle, &d.q});
      if (halve) tasks.push_back({i, h, middle, length, &rest});
    }
  }
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
               .scale = static_cast<float>(scale),
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
  d.k = sum_groups(d.k, s);
  d.v = sum_groups(d.v, s);
  d.extra_values = sum_groups(d.extra_values, s);
  return d;
}

}  // namespace tapetune::kernels
