// stories260K, a real pretrained Llama, against reference numbers made elsewhere.
#include <c10/core/InferenceMode.h>

#include "catch.h"
#include "core/json.h"
#include "hf/tokenizer.h"
#include "model/generate.h"
#include "model/loss.h"
#include "support.h"

namespace golden_test {

using namespace tapetune;
using namespace tapetune::test;

TEST_CASE("stories260K: logits equal the reference to 1e-4") {
  const auto folder = shared("data/stories260K"), numbers = shared("golden/stories260K/stories260K_golden.safetensors");
  if (folder.empty() || numbers.empty()) return;
  const c10::InferenceMode inference;
  const Llama model = Llama::open(Checkpoint::open(folder), at::kFloat);
  auto golden = load_tensors(numbers);
  ForwardInput in;
  in.tokens = golden.at("ids_128").unsqueeze(0);
  CHECK(largest_difference(model.logits(model.forward(in).last)[0], golden.at("logits_128")) <= 1e-4);

  // 2048 tokens are four times its context, where angles are largest and errors would show.
  const at::Tensor ids = golden.at("ids_2048");
  in.tokens = ids.narrow(0, 0, 2047).unsqueeze(0);
  const at::Tensor losses = token_losses(model, model.forward(in).last[0], ids.narrow(0, 1, 2047));
  CHECK(largest_difference(losses, golden.at("nll_2048")) <= 1e-3);
  CHECK(std::abs(losses.mean().item<double>() - golden.at("nll_2048").mean().item<double>()) <= 1e-5);
}

TEST_CASE("stories260K: 200 greedy tokens equal the reference, and their text run.c's") {
  const auto folder = shared("data/stories260K"), ids = shared("golden/stories260K/stories260K_greedy.json"),
             text = shared("golden/stories260K/run_c_greedy200.txt");
  if (folder.empty() || ids.empty() || text.empty()) return;
  const c10::InferenceMode inference;
  const Llama model = Llama::open(Checkpoint::open(folder), at::kFloat);
  auto expected = from_text(read_file(ids))["greedy_ids_from_bos_200"].get<std::vector<std::int64_t>>();
  GenerateOptions options;
  options.max_new_tokens = static_cast<std::int64_t>(expected.size()) - 1;
  std::vector<std::int64_t> tokens{expected.front()};
  const Generated generated = generate(model, {tokens}, options)[0];
  tokens.insert(tokens.end(), generated.tokens.begin(), generated.tokens.end());
  CHECK(tokens == expected);
  const std::string decoded = Tokenizer::open(folder).decode(tokens);
  const std::string written = read_file(text);
  CHECK(written.substr(0, decoded.size()) == decoded);
  CHECK(decoded.size() > 400);
}

TEST_CASE("stories260K: perplexity per story is 3.61") {
  const auto folder = shared("data/stories260K"), text = shared("data/tinystories/stories.txt");
  if (folder.empty() || text.empty()) return;
  const c10::InferenceMode inference;
  const Llama model = Llama::open(Checkpoint::open(folder), at::kFloat);
  const Tokenizer tokenizer = Tokenizer::open(folder);
  const std::string stories = read_file(text), mark = "<|endoftext|>";
  // Each story counts the same, whatever its length: the mean over stories of the mean over tokens.
  double sum = 0;
  std::int64_t count = 0;
  for (std::size_t begin = 0, end = 0; (end = stories.find(mark, begin)) != std::string::npos;
       begin = end + mark.size()) {
    const std::size_t first = stories.find_first_not_of(" \n", begin), last = stories.find_last_not_of(" \n", end - 1);
    if (first >= end) continue;
    TokenIds ids = tokenizer.encode(stories.substr(first, last + 1 - first));
    ids.resize(std::min<std::size_t>(ids.size(), 512));
    const at::Tensor tokens = at::tensor(ids, at::kLong);
    ForwardInput in;
    in.tokens = tokens.narrow(0, 0, tokens.size(0) - 1).unsqueeze(0);
    const at::Tensor losses = token_losses(model, model.forward(in).last[0], tokens.narrow(0, 1, tokens.size(0) - 1));
    sum += losses.mean().item<double>();
    ++count;
  }
  CHECK(count == 1727);  // the text after the last mark is not counted
  const double perplexity = std::exp(sum / static_cast<double>(count));
  INFO(perplexity);
  CHECK(std::abs(perplexity - 3.61) < 0.005);
}

}  // namespace golden_test
