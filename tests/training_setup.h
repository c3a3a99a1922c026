// A tiny model, a token file, and a recipe with checkpoints of steps 3, 6, 9 and 12, of which two are kept; for tests
// of what is never lost or written.
#pragma once

#include <fmt/format.h>

#include "catch.h"
#include "support.h"

namespace tapetune::test {

struct TrainingSetup {
  explicit TrainingSetup(const std::string& adapter = "{method: lora, rank: 2}") {
    tiny_tokens(model, data(), 4000);
    write_file(recipe(), fmt::format("# tapetune train mine.yaml\nmodel: {}\ndata: {}\nrun: {}\ncontext: 16\n"
                                     "adapter: {}\nsteps: 12\nbatch: 4\noptimizer: {{lr: 1.0e-3}}\nsave_every: 3\n"
                                     "dtype: f32\n",
                                     model.path(), data(), folder().string(), adapter));
  }
  std::string data() const { return (model.folder / "data.tokens").string(); }
  std::string recipe() const { return (model.folder / "mine.yaml").string(); }
  std::filesystem::path folder(const std::string& name = "run") const { return model.folder / name; }
  std::filesystem::path checkpoint(int step) const { return folder() / fmt::format("checkpoints/step-{:08}", step); }
  RunResult train(std::vector<std::string> words = {}, const std::function<void()>& before = {}) const {
    words.insert(words.begin(), {"train", recipe(), "--threads", "1"});
    return run(words, before);
  }
  RunResult verify() const { return run({"verify", folder().string()}); }
  TinyModel model;
};

// A command ended with one line of error, and that says this.
template <typename Matcher>
void refused_in_a_line(const RunResult& result, const Matcher& matcher) {
  CHECK(result.exit == 1);
  CHECK_THAT(result.err, matcher);
  CHECK(lines_of(result.err).size() == 1);
  CHECK(result.err.rfind("error: [", 0) == 0);
}

}  // namespace tapetune::test
