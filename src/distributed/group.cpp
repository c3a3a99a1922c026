#include "distributed/group.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>

#include "core/trace.h"
#include "distributed/gloo.h"

namespace tapetune {

struct Group::State {
  std::string name;
  c10::intrusive_ptr<c10d::Backend> backend;  // null: alone
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::atomic<std::uint64_t> sent = 0;
  std::atomic<bool> lost = false;
  int gathers = 0;  // numbers their messages
};

namespace {

std::uint64_t bytes_of(const at::Tensor& t) { return static_cast<std::uint64_t>(t.numel()) * t.element_size(); }

}  // namespace

Group::Group() : state_(std::make_shared<State>()) {}

Group::Group(std::string name, c10::intrusive_ptr<c10d::Backend> backend, at::DeviceType device) : Group() {
  state_->name = std::move(name);
  state_->backend = std::move(backend);
  const int rank = state_->backend->getRank(), size = state_->backend->getSize();
  state_->group = c10::make_intrusive<c10d::ProcessGroup>(rank, size);
  const auto kind = device == at::kCUDA ? c10d::ProcessGroup::NCCL : c10d::ProcessGroup::GLOO;
  state_->group->setBackend(device, kind, state_->backend);
  if (device != at::kCPU) state_->group->setBackend(at::kCPU, kind, state_->backend);
  state_->group->setDefaultBackend(kind);
}

int Group::rank() const { return state_->backend ? state_->backend->getRank() : 0; }
int Group::size() const { return state_->backend ? state_->backend->getSize() : 1; }
std::uint64_t Group::bytes_sent() const { return state_->sent; }
bool Group::lost() const { return state_->lost; }

void Group::guard(const std::function<void()>& work) const {
  try {
    work();
  } catch (const c10::DistError& error) {  // of NCCL
    state_->lost = true;
    throw RankLost(error.what_without_backtrace());
  } catch (const std::exception& error) {
    if (!is_gloo_error(error)) throw;
    state_->lost = true;
    throw RankLost(error.what());
  }
}

c10::intrusive_ptr<c10d::ProcessGroup> Group::process_group() const { return state_->group; }

namespace {

// Starts a collective through `post`; its end is recorded whoever waits for it.
template <typename State, typename Post>
c10::intrusive_ptr<c10d::Work> started(const std::shared_ptr<State>& state, const std::string& what,
                                       std::uint64_t bytes, const Post& post) {
  const double begin = trace::now();
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = post();
  } catch (const std::exception& error) {
    state->lost = true;
    throw RankLost(error.what());
  }
  state->sent += bytes;
  const auto future = work->getFuture();
  if (future) {
    future->addCallback([state, what, begin, bytes](c10::ivalue::Future& done) {
      if (done.hasError()) state->lost = true;
      trace::add(fmt::format("{} {} B", what, bytes), "exchange", begin, trace::now());
    });
  }
  return work;
}

template <typename State>
Group::Pending pending(const std::shared_ptr<State>& state, c10::intrusive_ptr<c10d::Work> work) {
  return Group::Pending([state, work = std::move(work)] {
    try {
      work->wait();
    } catch (const std::exception& error) {
      state->lost = true;
      throw RankLost(error.what());
    }
  });
}

}  // namespace

Group::Pending Group::all_reduce(const at::Tensor& t) const {
  if (size() == 1) return {};
  const auto ranks = static_cast<std::uint64_t>(size());
  return pending(state_, started(state_, "sum", 2 * bytes_of(t) * (ranks - 1) / ranks, [&] {
                   std::vector<at::Tensor> tensors{t};
                   return state_->backend->allreduce(tensors);
                 }));
}

c10::intrusive_ptr<c10::ivalue::Future> Group::all_reduce_future(const at::Tensor& t, const std::string& what) const {
  const auto ranks = static_cast<std::uint64_t>(size());
  std::vector<at::Tensor> tensors{t};
  return started(state_, what, 2 * bytes_of(t) * (ranks - 1) / ranks,
                 [&] { return state_->backend->allreduce(tensors); })
      ->getFuture();
}

Group::Pending Group::all_gather(const at::Tensor& whole, const at::Tensor& part) const {
  if (size() == 1) {
    whole.copy_(part);
    return {};
  }
  const auto ranks = static_cast<std::uint64_t>(size());
  if (whole.is_cpu()) return all_gather_in_place(whole, part);
  return pending(state_, started(state_, "gather", bytes_of(part) * (ranks - 1), [&] {
                   at::Tensor to = whole, from = part;
                   return state_->backend->_allgather_base(to, from);
                 }));
}

// Each sends its part to all: as many bytes as in a ring, straight to where they belong. Gloo's own all-gather would
// bring them to a second buffer as large as the whole first.
Group::Pending Group::all_gather_in_place(const at::Tensor& whole, const at::Tensor& part) const {
  const std::int64_t count = part.numel();
  const int tag = state_->gathers++ & 0xFFFF;
  const double begin = trace::now();
  const auto bytes = bytes_of(part) * static_cast<std::uint64_t>(size() - 1);
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  try {
    for (int step = 1; step < size(); ++step) {
      const int to = (rank() + step) % size(), from = (rank() + size() - step) % size();
      std::vector<at::Tensor> out{part}, in{whole.narrow(0, from * count, count)};
      works.push_back(state_->backend->send(out, to, tag));
      works.push_back(state_->backend->recv(in, from, tag));
    }
  } catch (const std::exception& error) {
    state_->lost = true;
    throw RankLost(error.what());
  }
  whole.narrow(0, rank() * count, count).copy_(part);
  state_->sent += bytes;
  return Pending([state = state_, works, begin, bytes] {
    try {
      for (const auto& work : works) work->wait();
    } catch (const std::exception& error) {
      state->lost = true;
      throw RankLost(error.what());
    }
    // Until it was needed: when it came, nobody saw.
    trace::add(fmt::format("gather {} B", bytes), "exchange", begin, trace::now());
  });
}

Group::Pending Group::all_to_all(const at::Tensor& to, const at::Tensor& from) const {
  if (size() == 1) {
    to.copy_(from);
    return {};
  }
  const auto ranks = static_cast<std::uint64_t>(size());
  return pending(state_, started(state_, "exchange", bytes_of(from) * (ranks - 1) / ranks, [&] {
                   at::Tensor target = to, source = from;
                   std::vector<std::int64_t> even;
                   return state_->backend->alltoall_base(target, source, even, even);
                 }));
}

Group::Pending Group::broadcast(const at::Tensor& t) const {
  if (size() == 1) return {};
  return pending(state_, started(state_, "broadcast", rank() == 0 ? bytes_of(t) : 0, [&] {
                   std::vector<at::Tensor> tensors{t};
                   return state_->backend->broadcast(tensors);
                 }));
}

}  // namespace tapetune
