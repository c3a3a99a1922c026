// What many tests need: folders that vanish, tiny checkpoints, running the binary, and the optional shared data.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/config.h"
#include "model/weights.h"

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

extern const char* const tapetune_binary;  // what is tested
extern const char* const source_folder;

struct RunResult {
  int exit = -1;
  std::string out, err;
};

// The tapetune binary with these words; `before` runs in the child (limits, namespaces).
RunResult run(const std::vector<std::string>& words, const std::function<void()>& before = {});

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

std::map<std::string, at::Tensor> load_tensors(const std::filesystem::path& file);

// A Llama small enough for finite differences: 3 layers, 4 heads over 2 for keys and values, width 32, vocabulary 61.
ModelConfig random_config(bool tied);
// The same numbers in any dtype.
LlamaWeights random_weights(const ModelConfig& config, at::ScalarType dtype);

// The most bytes that tensors hold at a time meanwhile, on all threads, besides those that were there before.
double most_memory(const std::function<void()>& work);

double largest_difference(const at::Tensor& a, const at::Tensor& b);

}  // namespace tapetune::test
