// Processes that exchange tensors. One interface over Gloo (CPU memory) and NCCL (GPUs); a group of one does nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace c10d {
class Backend;
class ProcessGroup;
}  // namespace c10d

namespace tapetune {

// Another process did not answer, or closed the connection. World knows which.
class RankLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Group {
 public:
  Group();  // of this process alone
  Group(std::string name, c10::intrusive_ptr<c10d::Backend> backend, at::DeviceType device);

  int rank() const;
  int size() const;

  // An exchange that goes on by itself; `wait` is where its tensors may be used, and throws RankLost.
  class Pending {
   public:
    Pending() = default;
    explicit Pending(std::function<void()> wait) : wait_(std::move(wait)) {}
    void wait() const {
      if (wait_) wait_();
    }

   private:
    std::function<void()> wait_;
  };

  Pending sum(const at::Tensor& t) const;                                 // in place, over all processes
  Pending gather(const at::Tensor& whole, const at::Tensor& part) const;  // [size * n] <- [n] of each, by rank
  Pending exchange(const at::Tensor& to, const at::Tensor& from) const;   // row r of `from` goes to rank r
  Pending broadcast(const at::Tensor& t) const;                           // from rank 0

  // What this process has sent, by the algorithms' formulas: a sum of n bytes sends 2 n (R - 1) / R, a gather of parts
  // of n bytes n (R - 1), an exchange of n bytes n (R - 1) / R.
  std::uint64_t bytes_sent() const;
  // Whether an exchange has failed; what is thrown later is then a consequence.
  bool lost() const;

  // For c10d's own engines; what they send is entered with `count`.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;
  // A sum of this tensor that they start: entered, traced and watched.
  c10::intrusive_ptr<c10::ivalue::Future> sum_future(const at::Tensor& t, const std::string& what) const;

 private:
  struct State;
  Pending gather_in_place(const at::Tensor& whole, const at::Tensor& part) const;
  std::shared_ptr<State> state_;
};

}  // namespace tapetune
