// What many tests need: folders that vanish, tiny checkpoints, running the binary, and the optional shared data.
#pragma once

#include <ATen/core/Tensor.h>
#include <linux/filter.h>
#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/config.h"
#include "checkpoint/weights.h"
#include "core/json.h"

namespace tapetune::test {

// A folder of its own, removed at the end.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

// What the Error says that this throws, or "no error".
std::string error_of(const std::function<void()>& work);

void write_file(const std::filesystem::path& path, const std::string& text);
std::string read_file(const std::filesystem::path& path);
// Every file below a folder with its bytes.
std::map<std::string, std::string> contents(const std::filesystem::path& folder);

extern const char* const tapetune_binary;    // what is tested
extern const char* const own_method_binary;  // the program of examples/own-method
extern const char* const source_folder;

struct RunResult {
  int exit = -1;
  std::string out, err;
  std::uint64_t peak_bytes = 0;  // of resident memory
};

// Whether address sanitizer is in this build, whose own memory counts with that of a program, and which address-space
// limits do not leave room for.
bool has_address_sanitizer();

// In a child, before it becomes another program.
void redirect(const std::filesystem::path& file, std::FILE* stream);
// In a child: becomes the tapetune binary, or another, with these words; `before` runs first (limits, namespaces, where
// its output goes).
[[noreturn]] void exec_binary(std::vector<std::string> words, const std::function<void()>& before = {},
                              const char* binary = tapetune_binary);
// Starts it as a child.
pid_t start(const std::vector<std::string>& words, const std::function<void()>& before = {},
            const char* binary = tapetune_binary);
// The same to its end.
RunResult run(const std::vector<std::string>& words, const std::function<void()>& before = {},
              const char* binary = tapetune_binary);

// The same on a pseudoterminal: what it prints there, or nothing where none can be opened.
std::optional<std::string> on_terminal(const std::vector<std::string>& words, const std::function<void()>& before);

// Whether the binary with these words reaches a moment of core/moment.h, as "file:2"; it is killed there.
bool killed_at(const std::string& moment, const std::vector<std::string>& words, const char* binary = tapetune_binary);

// Whether this holds within a minute; it is asked every millisecond.
bool comes_true(const std::function<bool()>& holds);
bool is_stopped(pid_t process);  // by SIGSTOP
bool is_pending(pid_t process, int signal);
std::vector<pid_t> children_of(pid_t process);

// Until a tapetune process has its handler for a signal, which would just end it before.
void wait_for_handler(pid_t process, int signal);

std::filesystem::path data(const std::string& name);  // tests/data
// ../shared/NAME, or nothing where it is not there: the test then returns after this has printed SKIPPED.
std::filesystem::path shared(const std::string& name);

// tests/data's tiny Llama as a checkpoint folder, with one of the rotary settings of tiny-configs.json.
void tiny_checkpoint(const std::filesystem::path& folder, const std::string& variant = "default");
// A tokenizer.json whose tokens are single bytes: ids 3 to 60 are printable characters, "<s>" is 1, "</s>" is 2.
void tiny_tokenizer(const std::filesystem::path& folder);

// A folder with both, and a place for results beside it.
struct TinyModel {
  TinyModel();
  std::filesystem::path operator/(const std::string& name) const { return folder / "m" / name; }
  std::string path() const { return (folder / "m").string(); }
  std::string out() const { return (folder / "out").string(); }
  TempFolder folder;
};

// A token file of that model, of one document of random tokens.
void tiny_tokens(const TinyModel& model, const std::filesystem::path& file, int tokens);

std::vector<std::string> lines_of(const std::string& text);
// metrics.jsonl of a run.
std::vector<Json> metrics(const std::filesystem::path& run);
// What must be the same in every run: everything but times and memory.
std::vector<Json> untimed_metrics(const std::filesystem::path& run);

std::map<std::string, at::Tensor> load_tensors(const std::filesystem::path& file);

// A Llama small enough for finite differences: 3 layers, 4 heads over 2 for keys and values, width 32, vocabulary 61.
ModelConfig random_config(bool tied);
// The same numbers in any dtype.
LlamaWeights random_weights(const ModelConfig& config, at::ScalarType dtype);

// The most bytes that tensors hold at a time meanwhile, on all threads, besides those that were there before.
double most_memory(const std::function<void()>& work);

// Lets system calls of this process fail by the seccomp rules `code`, for ever: for children. All others are allowed.
void filter_calls(std::vector<sock_filter> code);

double largest_difference(const at::Tensor& a, const at::Tensor& b);
// The same as a share of the reference's largest entry.
double relative_difference(const at::Tensor& a, const at::Tensor& reference);

}  // namespace tapetune::test
