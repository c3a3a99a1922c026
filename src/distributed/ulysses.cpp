#include "distributed/ulysses.h"

#include "core/error.h"

namespace tapetune {

namespace {

// Tensors that go together in one all-to-all, because a message costs more than its bytes.
struct Message {
  std::vector<std::size_t> places;
  at::Tensor from, to;  // [S, B, n, h, D]: row r goes to rank r, or comes from it
  Group::Pending pending;
};

// by_rank: [B, …, D] -> [S, B, n, h, D]. shaped: those of its h that are asked for -> the result. Everything is let go
// as soon as it is used: what is in flight may be as large as what a layer keeps.
template <typename ByRank, typename Shaped>
std::vector<at::Tensor> exchanged(const Group& group, std::vector<at::Tensor> all, const ByRank& by_rank,
                                  const Shaped& shaped) {
  std::vector<Message> messages;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all[i].defined()) continue;
    const auto found = std::ranges::find_if(messages, [&](const Message& message) {
      const at::Tensor& other = all[message.places.front()];
      return other.scalar_type() == all[i].scalar_type() && other.size(-1) == all[i].size(-1);
    });
    (found == messages.end() ? messages.emplace_back() : *found).places.push_back(i);
  }
  std::vector<std::int64_t> heads(all.size());
  for (Message& message : messages) {
    std::vector<at::Tensor> views;
    for (const std::size_t place : message.places) {
      views.push_back(by_rank(std::exchange(all[place], {})));
      heads[place] = views.back().size(3);
    }
    message.from = views.size() == 1 ? views.front().contiguous() : at::cat(views, 3);
    message.to = at::empty_like(message.from);
    message.pending = group.all_to_all(message.to, message.from);
  }
  for (Message& message : messages) {
    message.pending.wait();
    message.pending = {};
    message.from.reset();
    const at::Tensor came = std::exchange(message.to, {});
    std::int64_t begin = 0;
    for (const std::size_t place : message.places) {
      all[place] = shaped(came.narrow(3, begin, heads[place]));
      begin += heads[place];
    }
  }
  return all;
}

// [B, n, S h, D] -> [B, S n, h, D]: the other ranks' tokens come, the other ranks' heads go.
std::vector<at::Tensor> to_heads(const Group& group, std::vector<at::Tensor> all) {
  return exchanged(
      group, std::move(all),
      [&](const at::Tensor& t) { return t.unflatten(2, {group.size(), -1}).permute({2, 0, 1, 3, 4}); },
      [](const at::Tensor& came) { return came.permute({1, 0, 2, 3, 4}).flatten(1, 2); });
}

// The way back.
std::vector<at::Tensor> to_tokens(const Group& group, std::vector<at::Tensor> all) {
  return exchanged(
      group, std::move(all),
      [&](const at::Tensor& t) { return t.unflatten(1, {group.size(), -1}).permute({1, 0, 2, 3, 4}); },
      [](const at::Tensor& came) { return came.permute({1, 2, 0, 3, 4}).flatten(2, 3); });
}

}  // namespace

void ulysses(Parallel& parallel, const Group& group, const ModelConfig& config) {
  if (group.size() == 1) return;
  if (config.heads % group.size() != 0) {
    fail("train", "sequence_parallel {} does not divide the model's {} heads; set it to a divisor.", group.size(),
         config.heads);
  }
  parallel.sequence_rank = group.rank();
  parallel.sequence_size = group.size();
  parallel.exchange = std::make_shared<const SequenceExchange>(SequenceExchange{
      group.rank(), group.size(), [group](std::vector<at::Tensor> all) { return to_heads(group, std::move(all)); },
      [group](std::vector<at::Tensor> all) { return to_tokens(group, std::move(all)); }});
}

}  // namespace tapetune
