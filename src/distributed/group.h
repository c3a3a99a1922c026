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

  // A collective in flight; after `wait` its tensors may be used. `wait` throws RankLost.
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

  Pending all_reduce(const at::Tensor& t) const;                              // the sum over all processes, in place
  Pending all_gather(const at::Tensor& whole, const at::Tensor& part) const;  // [size * n] <- [n] of each, by rank
  Pending all_to_all(const at::Tensor& to, const at::Tensor& from) const;     // row r of `from` goes to rank r
  Pending broadcast(const at::Tensor& t) const;                               // from rank 0

  // What this process has sent, by the algorithms' formulas: an all-reduce of n bytes sends 2 n (R - 1) / R, an
  // all-gather of parts of n bytes n (R - 1), an all-to-all of n bytes n (R - 1) / R.
  std::uint64_t bytes_sent() const;
  // Whether a collective has failed; what is thrown later is then a consequence.
  bool lost() const;

  // Runs what starts collectives of this group by itself; where one of them fails, throws RankLost.
  void guard(const std::function<void()>& work) const;
  // For c10d's own engines, as the Reducer of DataParallel.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;
  // An all-reduce that they start: its bytes are counted, and it is traced and watched for failures.
  c10::intrusive_ptr<c10::ivalue::Future> all_reduce_future(const at::Tensor& t, const std::string& what) const;

 private:
  struct State;
  Pending all_gather_in_place(const at::Tensor& whole, const at::Tensor& part) const;
  std::shared_ptr<State> state_;
};

}  // namespace tapetune
