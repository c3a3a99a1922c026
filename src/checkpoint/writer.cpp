#include "checkpoint/writer.h"

#include <charconv>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "checkpoint/carry.h"
#include "checkpoint/dtype.h"
#include "checkpoint/finite.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/moment.h"
#include "core/progress.h"
#include "core/signals.h"
#include "hf/safetensors.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

const std::map<std::string, std::string> metadata{{"format", "pt"}};
constexpr std::int64_t piece_bytes = std::int64_t{16} << 20;  // converted and written at once

std::uint64_t planned_bytes(const PlannedTensor& tensor) {
  std::uint64_t bytes = c10::elementSize(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) bytes *= static_cast<std::uint64_t>(extent);
  return bytes;
}

// Fills a shard until the next tensor would pass the limit; a tensor larger than the limit gets one of its own.
std::vector<std::vector<PlannedTensor>> split(const std::vector<PlannedTensor>& plan, std::uint64_t limit) {
  std::vector<std::vector<PlannedTensor>> shards;
  std::uint64_t filled = 0;
  for (const PlannedTensor& tensor : plan) {
    const std::uint64_t bytes = planned_bytes(tensor);
    if (shards.empty() || filled + bytes > limit) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(tensor);
    filled += bytes;
  }
  return shards;
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), static_cast<std::size_t>(tensor.nbytes())};
}

// Writes in a thread of its own while the caller prepares the next tensor: a job is taken when the last is done. What a
// job throws comes out of the call after it.
class BackgroundWriter {
 public:
  BackgroundWriter() : thread_([this] { work(); }) {}
  ~BackgroundWriter() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  void run(std::function<void()> job) {
    std::unique_lock lock(mutex_);
    wait(lock);
    job_ = std::move(job);
    changed_.notify_all();
  }
  void finish() {
    std::unique_lock lock(mutex_);
    wait(lock);
  }

 private:
  void wait(std::unique_lock<std::mutex>& lock) {
    changed_.wait(lock, [this] { return !job_; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return job_ || ended_; });
      if (!job_) return;
      lock.unlock();
      std::exception_ptr error;
      try {
        job_();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      job_ = nullptr;  // and with it the tensor that it wrote
      error_ = error;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> job_;
  std::exception_ptr error_;
  bool ended_ = false;
  std::thread thread_;  // the last: it uses the others
};

// One planned tensor on its way into a file.
class TensorWriter {
 public:
  // finite: the numbers are known to be.
  TensorWriter(const PlannedTensor& planned, std::shared_ptr<OutputFile> out, BackgroundWriter& background,
               Progress& progress, bool finite)
      : planned_(planned), out_(std::move(out)), background_(background), progress_(progress), finite_(finite) {}

  void put(const at::Tensor& rows) {
    std::vector<std::int64_t> fitting = planned_.shape;
    if (!fitting.empty() && rows.dim() > 0) fitting[0] = rows.size(0);
    if (rows.sizes() != at::IntArrayRef(fitting)) refuse(rows.sizes().vec());
    if (rows.dim() == 0) return write(rows);
    const std::int64_t count = rows.size(0);
    const auto bytes = static_cast<std::int64_t>(planned_bytes({planned_.name, planned_.dtype, fitting}));
    const std::int64_t at_once = std::max<std::int64_t>(1, piece_bytes * count / std::max<std::int64_t>(1, bytes));
    for (std::int64_t begin = 0; begin < count; begin += at_once) {
      write(rows.narrow(0, begin, std::min(at_once, count - begin)));
    }
  }
  void end() const {
    if (written_ == planned_bytes(planned_)) return;
    std::vector<std::int64_t> shape = planned_.shape;
    if (!shape.empty()) shape[0] = rows_;
    refuse(shape);
  }

 private:
  [[noreturn]] void refuse(const std::vector<std::int64_t>& given) const {
    fail("writer", "{}: planned as {}, but given as {}.", planned_.name, shape_text(planned_.shape), shape_text(given));
  }
  void write(const at::Tensor& rows) {
    check_interrupted();
    const at::Tensor piece = rows.to(at::kCPU).to(planned_.dtype).contiguous();
    if (!finite_ && !all_finite(piece)) {
      fail("writer", "{}: has NaN or Inf{}; nothing was written.", planned_.name,
           !all_finite(rows)             ? ": the model is damaged, download or copy it again"
           : planned_.dtype == at::kHalf ? " in f16, whose largest number is 65504; use --dtype bf16"
                                         : " in the dtype that it is written in; use --dtype f32");
    }
    written_ += piece.nbytes();
    rows_ += piece.dim() > 0 ? piece.size(0) : 0;
    if (written_ > planned_bytes(planned_)) end();
    background_.run([out = out_, piece] { out->write(bytes_of(piece)); });
    progress_.advance(piece.nbytes());
  }

  const PlannedTensor& planned_;
  std::shared_ptr<OutputFile> out_;
  BackgroundWriter& background_;
  Progress& progress_;
  bool finite_;
  std::uint64_t written_ = 0;
  std::int64_t rows_ = 0;
};

}  // namespace

bool is_checkpoint_file(std::string_view name) {
  if (name == "config.json" || name == "model.safetensors" || name == "model.safetensors.index.json") return true;
  // model-00001-of-00003.safetensors
  if (name.starts_with("model-") && name.ends_with(".safetensors") && name.find("-of-") != std::string_view::npos) {
    return true;
  }
  return is_carried(name);
}

void write_checkpoint(const fs::path& folder, const ModelConfig& config, const std::vector<PlannedTensor>& plan,
                      const std::function<at::Tensor(const std::string& name)>& load, const WriteOptions& options) {
  stream_checkpoint(
      folder, config, plan, [&](const std::string& name, const PutRows& put) { put(load(name)); }, options);
}

void stream_checkpoint(const fs::path& folder, const ModelConfig& config, const std::vector<PlannedTensor>& plan,
                       const StreamTensor& stream, const WriteOptions& options) {
  if (plan.empty()) fail("writer", "{}: there are no tensors to write.", folder.string());
  if (options.shard_bytes == 0) fail("writer", "the shard size must be greater than 0.");
  const std::vector<std::string> carried =
      options.carry_from.empty() ? std::vector<std::string>() : files_to_carry(options.carry_from);
  const std::vector<std::vector<PlannedTensor>> shards = split(plan, options.shard_bytes);
  std::uint64_t total = 0, parameters = 0;
  std::map<std::string, std::uint64_t> by_dtype;
  for (const PlannedTensor& tensor : plan) {
    total += planned_bytes(tensor);
    parameters += planned_bytes(tensor) / c10::elementSize(tensor.dtype);
    by_dtype[dtype_to_transformers(tensor.dtype)] += planned_bytes(tensor);
  }

  StagedFolder staged(folder, options.replace, options.writes);
  require_space(staged.path(), total);
  Progress progress("writing", total, "B");
  std::map<std::string, std::string> weight_map;
  {
    BackgroundWriter background;  // ends, with what it does, before the folder goes
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const std::string name = shards.size() == 1
                                   ? "model.safetensors"
                                   : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
      std::vector<TensorEntry> entries;
      std::map<std::string, const PlannedTensor*> planned;
      for (const PlannedTensor& tensor : shards[i]) {
        entries.push_back({tensor.name, dtype_to_safetensors(tensor.dtype), tensor.shape});
        planned[tensor.name] = &tensor;
        weight_map[tensor.name] = name;
      }
      const auto out = std::make_shared<OutputFile>(staged.path() / name);
      const std::string head = lay_out_safetensors(entries, metadata);
      background.run([out, head] { out->write(head); });
      for (const TensorEntry& entry : entries) {
        at_moment("tensor");
        TensorWriter writer(*planned[entry.name], out, background, progress, options.finite);
        stream(entry.name, [&](const at::Tensor& rows) { writer.put(rows); });
        writer.end();
      }
      background.run([out] { out->finish(); });
    }
    background.finish();
  }

  std::map<std::string, std::string> files = options.files;
  if (shards.size() > 1) {
    Json index;
    index["metadata"] = {{"total_parameters", parameters}, {"total_size", total}};
    index["weight_map"] = weight_map;
    files["model.safetensors.index.json"] = to_text(index, 2) + "\n";
  }
  const auto most = std::max_element(by_dtype.begin(), by_dtype.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  files["config.json"] = write_config(config, most->first);
  if (options.complete) options.complete(files);
  for (const std::string& name : carried) {
    if (!files.contains(name)) files[name] = read_text(options.carry_from / name);
  }
  drop_foreign_code(files);
  for (const auto& [name, text] : files) {
    OutputFile out(staged.path() / name);
    out.write(text);
    out.finish();
  }
  check_interrupted();
  staged.commit();
}

void save_safetensors(const fs::path& path, const std::map<std::string, at::Tensor>& tensors, bool replace,
                      const std::map<std::string, std::string>& file_metadata) {
  std::vector<TensorEntry> entries;
  entries.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    entries.push_back({name, dtype_to_safetensors(tensor.scalar_type()), tensor.sizes().vec()});
  }
  const std::string head = lay_out_safetensors(entries, file_metadata);
  WholeFile file(path, replace);
  file.write(head);
  for (const TensorEntry& entry : entries) file.write(bytes_of(tensors.at(entry.name).to(at::kCPU).contiguous()));
  file.commit();
}

std::uint64_t parse_size(std::string_view text) {
  std::uint64_t value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  const std::uint64_t scale = unit.empty() || unit == "B" ? 1
                              : unit == "KB"              ? 1'000
                              : unit == "MB"              ? 1'000'000
                              : unit == "GB"              ? 1'000'000'000
                              : unit == "TB"              ? 1'000'000'000'000
                                                          : 0;
  if (error != std::errc() || value == 0 || scale == 0 || value > UINT64_MAX / scale) {
    fail("size", "\"{}\" is not a size; give a number with B, KB, MB, GB or TB, for example 5GB.", text);
  }
  return value * scale;
}

}  // namespace tapetune
