// Perplexity: each protocol against its definition, and sums that are resumed from.
#include "eval/perplexity.h"

#include "catch.h"
#include "hf/tokenizer.h"
#include "support.h"
#include "token_text.h"

namespace perplexity_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A model in f64, whose losses do not depend on how many windows are computed together, and a text.
struct Text {
  explicit Text(std::int64_t count, unsigned seed = 7)
      : file(write_tokens(folder / "text.tokens", random_tokens(count, seed))) {}
  TokenRange all() const { return {file, 0, file.size()}; }
  TokenRange part(std::int64_t begin, std::int64_t size) const { return {file, begin, size}; }

  // -log p(token t | tokens [begin, t)), for all t of the window of `length` tokens after its first.
  std::vector<double> losses(std::int64_t begin, std::int64_t length) const {
    const c10::NoGradGuard evaluation;
    TokenIds ids(static_cast<std::size_t>(length));
    file.read(begin, ids);
    const at::Tensor row = at::tensor(ids, at::kLong);
    ForwardInput in;
    in.tokens = row.unsqueeze(0);
    const at::Tensor likely = at::log_softmax(model.logits(model.forward(in).last[0]), -1);  // [length, vocabulary]
    std::vector<double> found;
    for (std::int64_t t = 1; t < length; ++t) found.push_back(-likely[t - 1][row[t]].item<double>());
    return found;
  }

  TempFolder folder;
  TokenFile file;
  Llama model{random_config(false), random_weights(random_config(false), at::kDouble), at::kDouble};
};

PerplexityOptions options_for(Protocol protocol, std::int64_t context, std::int64_t stride = -1) {
  PerplexityOptions options;
  options.protocol = protocol;
  options.contexts = {context};
  options.stride = stride;
  return options;
}

ContextPerplexity only(const Text& text, const PerplexityOptions& options, std::optional<TokenRange> range = {}) {
  PerplexityRun run(text.model, range.value_or(text.all()), options);
  return finish(run).at(0);
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

void check_equal(const ContextPerplexity& found, const std::vector<double>& losses, std::int64_t windows) {
  CHECK(found.tokens == static_cast<std::int64_t>(losses.size()));
  CHECK(found.windows == windows);
  CHECK(std::abs(found.loss - mean(losses)) < 1e-12);
  CHECK(std::abs(found.perplexity - std::exp(mean(losses))) < 1e-9);
}

// Bit for bit.
void check_same(const std::vector<ContextPerplexity>& a, const std::vector<ContextPerplexity>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i].context == b[i].context);
    CHECK(a[i].windows == b[i].windows);
    CHECK(a[i].tokens == b[i].tokens);
    CHECK(a[i].loss == b[i].loss);
    REQUIRE(a[i].buckets.size() == b[i].buckets.size());
    for (std::size_t k = 0; k < a[i].buckets.size(); ++k) {
      CHECK(a[i].buckets[k].loss == b[i].buckets[k].loss);
      CHECK(a[i].buckets[k].tokens == b[i].buckets[k].tokens);
    }
  }
}

}  // namespace

TEST_CASE("perplexity: blocks are windows of `context` targets side by side") {
  for (const std::int64_t size : {25, 48, 49, 101}) {
    const Text text(size);
    INFO(size);
    std::vector<double> losses;
    const std::int64_t windows = (size - 1) / 24;
    for (std::int64_t i = 0; i < windows; ++i) {
      const auto own = text.losses(i * 24, 25);
      losses.insert(losses.end(), own.begin(), own.end());
    }
    check_equal(only(text, options_for(Protocol::blocks, 24)), losses, windows);
  }
}

TEST_CASE("perplexity: longlora scores all targets of windows that begin every `stride` tokens") {
  for (const std::int64_t stride : {1, 7, 24}) {
    const Text text(101);
    INFO(stride);
    std::vector<double> losses;
    std::int64_t windows = 0;
    for (std::int64_t begin = 0; begin < 101 - 24; begin += stride, ++windows) {
      const auto own = text.losses(begin, 24);
      losses.insert(losses.end(), own.begin(), own.end());
    }
    check_equal(only(text, options_for(Protocol::longlora, 24, stride)), losses, windows);
  }
}

TEST_CASE("perplexity: sliding scores each token once, with `context` - `stride` others before it or more") {
  for (const std::int64_t size : {25, 26, 49, 101, 102}) {
    for (const std::int64_t stride : {1, 7, 12, 24}) {
      const Text text(size);
      INFO(size << " tokens, stride " << stride);
      std::vector<double> losses;
      std::int64_t windows = 0;
      for (std::int64_t token = 1, begin = 0; token < size; ++token) {
        if (token == 1 || token > begin + 24) {  // past the window's last target: the next one
          if (token > 1) begin = std::min(begin + stride, size - 25);
          ++windows;
        }
        if (token > 24) CHECK(token - begin >= 24 - stride);
        losses.push_back(text.losses(begin, 25).at(static_cast<std::size_t>(token - begin - 1)));
      }
      check_equal(only(text, options_for(Protocol::sliding, 24, stride)), losses, windows);
    }
  }
}

TEST_CASE("perplexity: sliding by whole windows is blocks, and strides have defaults") {
  const Text text(24 * 4 + 1);
  check_same({only(text, options_for(Protocol::sliding, 24, 24))}, {only(text, options_for(Protocol::blocks, 24))});
  CHECK(only(text, options_for(Protocol::sliding, 24)).stride == 12);
  CHECK(only(text, options_for(Protocol::longlora, 24)).stride == 24);
  const Text longer(300);
  CHECK(only(longer, options_for(Protocol::longlora, 280)).stride == 256);
  CHECK(only(longer, options_for(Protocol::longlora, 280)).windows == 1);
}

TEST_CASE("perplexity: windows that are computed together give what they give alone") {
  const Text text(150);
  for (const Protocol protocol : {Protocol::blocks, Protocol::longlora, Protocol::sliding}) {
    INFO(protocol_name(protocol));
    PerplexityOptions options = options_for(protocol, 16, protocol == Protocol::blocks ? -1 : 5);
    options.tokens_at_once = 1;
    const ContextPerplexity alone = only(text, options);
    for (const std::int64_t together : {40, 100000}) {
      options.tokens_at_once = together;
      CHECK(std::abs(only(text, options).loss - alone.loss) < 1e-12);
    }
  }
}

TEST_CASE("perplexity: buckets are places in the window, and average back to the whole") {
  const Text text(101);
  for (const Protocol protocol : {Protocol::blocks, Protocol::longlora, Protocol::sliding}) {
    for (const std::int64_t buckets : {1, 5, 8}) {
      INFO(protocol_name(protocol) << ", " << buckets);
      PerplexityOptions options = options_for(protocol, 24, protocol == Protocol::blocks ? -1 : 7);
      options.buckets = buckets;
      const ContextPerplexity found = only(text, options);
      REQUIRE(found.buckets.size() == static_cast<std::size_t>(buckets));
      CHECK(found.buckets.front().begin == 0);
      CHECK(found.buckets.back().end == (protocol == Protocol::longlora ? 23 : 24));
      double sum = 0;
      std::int64_t tokens = 0;
      for (std::size_t b = 0; b < found.buckets.size(); ++b) {
        if (b > 0) CHECK(found.buckets[b].begin == found.buckets[b - 1].end);
        sum += found.buckets[b].loss * static_cast<double>(found.buckets[b].tokens);
        tokens += found.buckets[b].tokens;
      }
      CHECK(tokens == found.tokens);
      CHECK(std::abs(sum / static_cast<double>(tokens) - found.loss) < 1e-12);
    }
  }
  PerplexityOptions options = options_for(Protocol::blocks, 24);
  options.buckets = 3;
  std::vector<double> second;  // places 8 to 15 of the four windows
  for (std::int64_t i = 0; i < 4; ++i) {
    const auto own = text.losses(i * 24, 25);
    second.insert(second.end(), own.begin() + 8, own.begin() + 16);
  }
  const BucketLoss middle = only(text, options).buckets.at(1);
  CHECK(middle.begin == 8);
  CHECK(middle.end == 16);
  CHECK(middle.tokens == 32);
  CHECK(std::abs(middle.loss - mean(second)) < 1e-12);
}

TEST_CASE("perplexity: a part of a text is that part alone") {
  const Text text(150);
  const Text beginning(60);  // the same seed, so the same first tokens
  const PerplexityOptions options = options_for(Protocol::sliding, 16, 5);
  CHECK(only(text, options, text.part(0, 60)).loss == only(beginning, options).loss);
  CHECK(only(text, options, text.part(90, 60)).loss != only(beginning, options).loss);
  // 149 targets, of which the last 15; or 9 windows of 16, of which the last.
  CHECK(held_out_begin(text.file, 0.1) == 134);
  CHECK(held_out_begin(text.file, 0.1, 16) == 128);
  CHECK(held_out_begin(text.file, 0.001, 16) == 128);
}

TEST_CASE("perplexity: sums that are saved at any moment and resumed from end bit for bit the same") {
  const Text text(101);
  for (const Protocol protocol : {Protocol::blocks, Protocol::longlora, Protocol::sliding}) {
    INFO(protocol_name(protocol));
    PerplexityOptions options = options_for(protocol, 16);
    options.contexts = {16, 32};
    options.buckets = 4;
    options.tokens_at_once = 40;
    PerplexityRun whole(text.model, text.all(), options);
    const auto expected = finish(whole);
    CHECK(whole.done() == whole.total());
    for (int steps = 0;; ++steps) {
      PerplexityRun cut(text.model, text.all(), options);
      for (int i = 0; i < steps; ++i) cut.take(cut.score(0));
      const std::string saved = to_text(cut.state());
      PerplexityRun again(text.model, text.all(), options);
      again.restore(from_text(saved));
      CHECK(again.done() == cut.done());
      check_same(finish(again), expected);
      if (cut.done() == cut.total()) break;
    }
  }
}

TEST_CASE("perplexity: saved sums serve other contexts of the same text, and forget none") {
  const Text text(101);
  PerplexityOptions first = options_for(Protocol::blocks, 16), second = options_for(Protocol::blocks, 32);
  second.contexts = {32, 8};
  PerplexityRun before(text.model, text.all(), first), after(text.model, text.all(), second);
  finish(before);
  after.restore(before.state());
  CHECK(after.done() == 0);
  const auto found = finish(after);
  CHECK(found[0].loss == only(text, options_for(Protocol::blocks, 32)).loss);
  PerplexityRun again(text.model, text.all(), first);
  again.restore(after.state());
  CHECK(again.done() == again.total());
}

TEST_CASE("perplexity: sums of another text, model or protocol are refused") {
  const Text text(101), other(101, 8);
  const PerplexityOptions options = options_for(Protocol::sliding, 16, 5);
  PerplexityRun before(text.model, text.all(), options);
  before.take(before.score(0));
  const auto refusal = [&](const Llama& model, const TokenRange& data, const PerplexityOptions& settings) {
    PerplexityRun run(model, data, settings);
    return error_of([&] { run.restore(before.state()); });
  };
  CHECK(refusal(text.model, text.all(), options) == "no error");
  CHECK_THAT(refusal(text.model, other.all(), options), Contains("tokens_hash"));
  CHECK_THAT(refusal(text.model, text.part(0, 100), options), Contains("tokens was 101, now 100"));
  CHECK_THAT(refusal(text.model, text.all(), options_for(Protocol::longlora, 16, 5)), Contains("protocol"));
  CHECK_THAT(refusal(text.model, text.all(), options_for(Protocol::sliding, 16, 6)), Contains("stride of 5"));
  LlamaWeights changed = random_weights(random_config(false), at::kDouble);
  changed.norm = changed.norm * 1.01;
  const Llama model(random_config(false), changed, at::kDouble);
  CHECK_THAT(refusal(model, text.all(), options), Contains("another model"));
  for (const char* key : {"windows", "tokens", "loss_sum", "first_loss_sum", "bucket_loss_sums", "context"}) {
    INFO(key);
    Json state = before.state();
    state["contexts"][0].erase(key);
    PerplexityRun run(text.model, text.all(), options);
    CHECK_THAT(error_of([&] { run.restore(state); }), Contains("damaged"));
    state = before.state();
    state["contexts"][0][key] = "a word";
    CHECK_THAT(error_of([&] { run.restore(state); }), Contains("damaged"));
    CHECK(run.done() == 0);
  }
}

TEST_CASE("perplexity: settings that allow no window are refused before any work") {
  const Text text(50);
  const auto refusal = [&](const PerplexityOptions& options) {
    return error_of([&] { PerplexityRun(text.model, text.all(), options); });
  };
  CHECK_THAT(refusal(options_for(Protocol::sliding, 16, 0)), Contains("stride is 0"));
  CHECK_THAT(refusal(options_for(Protocol::longlora, 16, 17)), Contains("larger than the context of 16"));
  CHECK_THAT(refusal(options_for(Protocol::blocks, 16, 16)), Contains("no stride"));
  CHECK_THAT(refusal(options_for(Protocol::blocks, 1)), Contains("must be 2 or more"));
  CHECK_THAT(refusal(options_for(Protocol::blocks, 50)), Contains("needs 51") && Contains("at most 49"));
  CHECK(refusal(options_for(Protocol::longlora, 49)) == "no error");
  PerplexityOptions options = options_for(Protocol::blocks, 16);
  options.buckets = 16;
  CHECK_THAT(refusal(options), Contains("16 buckets"));
  options = options_for(Protocol::blocks, 16);
  options.contexts = {16, 8, 16};
  CHECK_THAT(refusal(options), Contains("twice"));
  options.contexts = {};
  CHECK_THAT(refusal(options), Contains("no context"));
  CHECK_THAT(error_of([] { parse_protocol("slidding"); }), Contains("did you mean sliding?"));
  CHECK_THAT(error_of([&] { held_out_begin(text.file, 1.0); }), Contains("below 1"));
}

TEST_CASE("perplexity: a model whose losses are NaN is reported") {
  const Text text(50);
  for (const double factor : {NAN, INFINITY}) {
    LlamaWeights broken = random_weights(random_config(false), at::kFloat);
    broken.norm = broken.norm * factor;
    const Llama model(random_config(false), broken, at::kFloat);
    PerplexityRun run(model, text.all(), options_for(Protocol::blocks, 16));
    CHECK_THAT(error_of([&] { run.take(run.score(0)); }), Contains("is NaN or Inf"));
    CHECK(run.done() == 0);
  }
}

}  // namespace perplexity_test
