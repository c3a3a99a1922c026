#include "support.h"

#include <c10/core/CPUAllocator.h>
#include <linux/seccomp.h>
#include <pty.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>

#include "checkpoint/checkpoint.h"
#include "core/error.h"
#include "core/file.h"
#include "data/token_file.h"
#include "data/vocabulary.h"

namespace tapetune::test {
namespace fs = std::filesystem;

const char* const tapetune_binary = TAPETUNE_BINARY;
const char* const own_method_binary = TAPETUNE_OWN_METHOD;
const char* const source_folder = TAPETUNE_SOURCE;

TempFolder::TempFolder() {
  std::string pattern = (fs::temp_directory_path() / "tapetune-test-XXXXXX").string();
  path_ = ::mkdtemp(pattern.data());
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void write_file(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
std::string read_file(const fs::path& path) { return read_text(path, std::uint64_t{8} << 30); }

std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    files[entry.path().lexically_relative(folder).string()] = entry.is_regular_file() ? read_file(entry.path()) : "";
  }
  return files;
}

void redirect(const fs::path& file, std::FILE* stream) {
  if (std::freopen(file.c_str(), "w", stream) == nullptr) ::_exit(126);
}

void exec_binary(std::vector<std::string> words, const std::function<void()>& before, const char* binary) {
#ifndef TAPETUNE_CUDA
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);  // else a note about a GPU that this build cannot use
#endif
  if (before) before();
  std::vector<char*> argv{const_cast<char*>(binary)};
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execv(binary, argv.data());
  ::_exit(127);
}

pid_t start(const std::vector<std::string>& words, const std::function<void()>& before, const char* binary) {
  const pid_t child = ::fork();
  if (child == 0) exec_binary(words, before, binary);
  return child;
}

std::optional<std::string> on_terminal(const std::vector<std::string>& words, const std::function<void()>& before) {
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child < 0) return std::nullopt;
  if (child == 0) exec_binary(words, before);
  std::string text;
  char bytes[256];
  for (ssize_t count = 0; (count = ::read(terminal, bytes, sizeof bytes)) > 0;) {
    text.append(bytes, static_cast<std::size_t>(count));
  }
  ::waitpid(child, nullptr, 0);
  ::close(terminal);
  return text;
}

RunResult run(const std::vector<std::string>& words, const std::function<void()>& before, const char* binary) {
  const TempFolder folder;
  const fs::path out = folder / "out", err = folder / "err";
  const pid_t child = start(
      words,
      [&] {
        if (before) before();
        redirect(out, stdout);
        redirect(err, stderr);
      },
      binary);
  int status = 0;
  rusage used{};
  ::wait4(child, &status, 0, &used);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out), read_file(err),
          static_cast<std::uint64_t>(used.ru_maxrss) << 10};
}

bool has_address_sanitizer() {
#ifdef __SANITIZE_ADDRESS__
  return true;
#else
  return false;
#endif
}

bool killed_at(const std::string& moment, const std::vector<std::string>& words, const char* binary) {
  const pid_t child = start(
      words,
      [&] {
        ::setenv("TAPETUNE_STOP_AT", moment.c_str(), 1);
        redirect("/dev/null", stdout);
      },
      binary);
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  if (!WIFSTOPPED(status)) return false;
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return true;
}

bool comes_true(const std::function<bool()>& holds) {
  for (int i = 0; i < 60'000; ++i) {
    if (holds()) return true;
    ::usleep(1000);
  }
  return false;
}

bool is_stopped(pid_t process) {
  std::ifstream stat(fmt::format("/proc/{}/stat", process));
  std::string line;
  return std::getline(stat, line) && line.find(") T ") != std::string::npos;
}

bool is_pending(pid_t process, int signal) {
  std::ifstream status(fmt::format("/proc/{}/status", process));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("ShdPnd:")) return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
  }
  return false;
}

std::vector<pid_t> children_of(pid_t process) {
  std::ifstream list(fmt::format("/proc/{}/task/{}/children", process, process));
  std::vector<pid_t> all;
  for (pid_t child = 0; list >> child;) all.push_back(child);
  return all;
}

void wait_for_handler(pid_t process, int signal) {
  const auto stands = [&] {
    std::error_code error;
    if (fs::read_symlink(fmt::format("/proc/{}/exe", process), error) != tapetune_binary) return false;
    std::ifstream status(fmt::format("/proc/{}/status", process));
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("SigCgt:")) return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
    }
    return false;
  };
  for (int i = 0; i < 60'000 && !stands(); ++i) ::usleep(1000);
}

fs::path data(const std::string& name) { return fs::path(source_folder) / "tests" / "data" / name; }

fs::path shared(const std::string& name) {
  const char* given = std::getenv("TAPETUNE_SHARED");
  const fs::path path = (given != nullptr ? fs::path(given) : fs::path(source_folder) / ".." / "shared") / name;
  std::error_code status;
  if (fs::exists(path, status)) return path;
  fmt::print("SKIPPED: {} is not there\n", path.string());
  return {};
}

void tiny_checkpoint(const fs::path& folder, const std::string& variant) {
  fs::create_directories(folder);
  fs::copy_file(data("tiny-model.safetensors"), folder / "model.safetensors", fs::copy_options::overwrite_existing);
  write_file(folder / "config.json", to_text(from_text(read_file(data("tiny-configs.json")))[variant], 2));
}

void tiny_tokenizer(const fs::path& folder) {
  Json vocab;
  vocab["<unk>"] = 0;
  vocab["<s>"] = 1;
  vocab["</s>"] = 2;
  // The bytes of "é" and "€" in the byte-level alphabet come first, then letters, the space and digits.
  const std::vector<std::string> bytes{"Ã", "©", "â", "Ĥ", "¬"};
  for (const std::string& byte : bytes) vocab[byte] = vocab.size();
  for (char c = 'a'; c <= 'z'; ++c) vocab[std::string(1, c)] = vocab.size();
  vocab["Ġ"] = vocab.size();
  for (char c = '0'; c <= '9'; ++c) vocab[std::string(1, c)] = vocab.size();
  while (vocab.size() < 61) vocab[fmt::format("[{}]", vocab.size())] = vocab.size();
  Json tokenizer;
  const auto special = [](int id, const char* text) {
    return Json{{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", true}};
  };
  tokenizer["version"] = "1.0";
  tokenizer["added_tokens"] = {special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")};
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  tokenizer["pre_tokenizer"] = byte_level;
  tokenizer["decoder"] = byte_level;
  tokenizer["model"] = {{"type", "BPE"}, {"unk_token", "<unk>"}, {"vocab", vocab}, {"merges", Json::array()}};
  write_file(folder / "tokenizer.json", to_text(tokenizer));
  write_file(
      folder / "tokenizer_config.json",
      R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true, "add_eos_token": false})");
}

TinyModel::TinyModel() {
  tiny_checkpoint(folder / "m");
  tiny_tokenizer(folder / "m");
}

void tiny_tokens(const TinyModel& model, const fs::path& file, int tokens) {
  TokenFileInfo info;
  info.vocabulary_hash = read_vocabulary(model.folder / "m").hash;
  info.vocabulary_size = 61;
  TokenFileWriter writer(file, false, info);
  std::mt19937 random(4);
  for (int i = 0; i < tokens; ++i) writer.append(random() % 58 + 3);
  writer.end_document();
  writer.commit();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<Json> metrics(const fs::path& run) {
  std::vector<Json> all;
  for (const std::string& line : lines_of(read_file(run / "metrics.jsonl"))) all.push_back(from_text(line));
  return all;
}

std::vector<Json> untimed_metrics(const fs::path& run) {
  std::vector<Json> all = metrics(run);
  for (Json& line : all) {
    for (const char* key : {"tokens_per_s", "peak_mb", "time"}) line.erase(key);
  }
  return all;
}

std::map<std::string, at::Tensor> load_tensors(const fs::path& file) {
  StoredTensors stored;
  map_safetensors(file, stored);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : stored) tensors[name] = tensor_from(tensor);
  return tensors;
}

ModelConfig random_config(bool tied) {
  ModelConfig config;
  config.vocab_size = 61;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.layers = 3;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.context = 64;
  config.tied_embeddings = tied;
  return config;
}

LlamaWeights random_weights(const ModelConfig& config, at::ScalarType dtype) {
  at::manual_seed(2);
  const auto normal = [&](std::vector<std::int64_t> shape, double spread) {
    return (at::randn(shape, at::kDouble) * spread).to(dtype);
  };
  return make_weights(config, [&](const TensorSpec& tensor) {
    if (tensor.shape.size() == 1) return normal(tensor.shape, 0.1) + 1;
    return normal(tensor.shape, tensor.name == "model.embed_tokens.weight" ? 1.0 : 0.2);
  });
}

namespace {

// LibTorch's own allocator, counted. It stays for good, because tensors outlive the work that made them.
class CountingAllocator : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* real) : real_(real) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    auto block = std::make_unique<Block>(Block{real_->allocate(bytes), static_cast<std::int64_t>(bytes), this});
    void* data = block->data.get();
    const std::int64_t now = held_ += block->bytes;
    std::int64_t most = most_;
    while (now > most && !most_.compare_exchange_weak(most, now)) {
    }
    return {data, block.release(), &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { real_->copy_data(to, from, bytes); }

  void start() { most_ = before_ = held_.load(); }
  double most() const { return static_cast<double>(most_ - before_); }

 private:
  struct Block {
    c10::DataPtr data;
    std::int64_t bytes;
    CountingAllocator* counter;
  };
  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->counter->held_ -= block->bytes;
  }
  c10::Allocator* real_;
  std::atomic<std::int64_t> held_{0}, most_{0};
  std::int64_t before_ = 0;
};

}  // namespace

double most_memory(const std::function<void()>& work) {
  static CountingAllocator counter(c10::GetCPUAllocator());
  c10::SetCPUAllocator(&counter, /*priority=*/1);
  counter.start();
  work();
  return counter.most();
}

void filter_calls(std::vector<sock_filter> code) {
  code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    ::_exit(3);
  }
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return INFINITY;
  const double difference = (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
  return std::isnan(difference) ? INFINITY : difference;
}

double relative_difference(const at::Tensor& a, const at::Tensor& reference) {
  const at::Tensor exact = reference.to(at::kDouble);
  return largest_difference(a.to(at::kDouble), exact) / std::max(exact.abs().max().item<double>(), 1e-12);
}

}  // namespace tapetune::test
