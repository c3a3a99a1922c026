// The order of windows: every one once an epoch, mixed by weight, held out for good, and resumed exactly.
#include "data/batches.h"

#include <cmath>
#include <set>

#include "catch.h"
#include "core/json.h"
#include "support.h"
#include "token_files.h"

namespace batches_test {

using namespace tapetune;
using namespace tapetune::test;
using namespace tapetune::test::token_files;
namespace fs = std::filesystem;

TEST_CASE("a permutation is a bijection for every length, and keys give different ones") {
  for (std::uint64_t n = 1; n < 600; ++n) {
    const Permutation order(n, n * 31);
    std::vector<bool> seen(n);
    for (std::uint64_t i = 0; i < n; ++i) {
      const std::uint64_t at = order(i);
      REQUIRE(at < n);
      REQUIRE_FALSE(seen[at]);
      seen[at] = true;
    }
  }
  for (const std::uint64_t n : {std::uint64_t{65536}, std::uint64_t{65537}, std::uint64_t{1'000'003}}) {
    const Permutation order(n, 5);
    std::vector<bool> seen(n);
    for (std::uint64_t i = 0; i < n; ++i) seen[order(i)] = true;
    CHECK(std::ranges::count(seen, true) == static_cast<std::ptrdiff_t>(n));
  }
  const std::uint64_t huge = std::uint64_t{1} << 41;
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 1000; ++i) seen.insert(Permutation(huge, 1)(i));
  CHECK(seen.size() == 1000);
  CHECK(*seen.rbegin() < huge);
  CHECK(*seen.rbegin() > huge / 2);  // they are spread

  // All six orders of three come about equally often.
  std::map<std::array<std::uint64_t, 3>, int> orders;
  for (std::uint64_t key = 0; key < 6000; ++key) {
    const Permutation order(3, key);
    ++orders[{order(0), order(1), order(2)}];
  }
  CHECK(orders.size() == 6);
  for (const auto& [order, count] : orders) CHECK((count > 850 && count < 1150));
}

TEST_CASE("every window comes once an epoch, in another order each time, which the seed decides") {
  const TempFolder folder;
  const TokenFile file = counting_file(folder / "f", 1005);
  const auto order = [&](std::uint64_t seed, std::int64_t from) {
    const Batches batches({{file, {}}}, {.context = 10, .seed = seed});
    REQUIRE(batches.windows() == 100);
    std::vector<std::int64_t> firsts;
    for (std::int64_t i = from; i < from + 100; ++i) {
      const TokenIds window = batches.window(i);
      REQUIRE(window.size() == 11);
      for (std::size_t t = 1; t < window.size(); ++t) REQUIRE(window[t] == window[0] + static_cast<std::int64_t>(t));
      CHECK(batches.place(i).epoch == i / 100);
      firsts.push_back(window[0]);
    }
    return firsts;
  };
  const auto first = order(1, 0), second = order(1, 100);
  CHECK(first != second);
  CHECK(first == order(1, 0));
  CHECK(first != order(2, 0));
  for (std::vector<std::int64_t> sorted : {first, second}) {
    CHECK_FALSE(std::ranges::is_sorted(sorted));
    std::ranges::sort(sorted);
    for (std::int64_t i = 0; i < 100; ++i) CHECK(sorted[static_cast<std::size_t>(i)] == 10 * i);
  }
}

TEST_CASE("files are drawn in proportion to their weights at every moment") {
  const TempFolder folder;
  const TokenFile a = counting_file(folder / "a", 101), b = counting_file(folder / "b", 501, 1000),
                  c = counting_file(folder / "c", 31, 5000);
  for (const std::array<double, 3>& weights : {std::array{0.7, 0.2, 0.1}, std::array{1.0, 1.0, 1.0},
                                               std::array{5.0, 1000.0, 0.5}, std::array{3.0, 1.0, 3.0}}) {
    const Batches batches({{a, weights[0]}, {b, weights[1]}, {c, weights[2]}}, {.context = 10, .seed = 3});
    const double sum = weights[0] + weights[1] + weights[2];
    std::array<std::int64_t, 3> counts{};
    std::array<std::vector<std::int64_t>, 3> windows;
    for (std::int64_t i = 0; i < 5000; ++i) {
      const Batches::Place place = batches.place(i);
      ++counts[place.file];
      windows[place.file].push_back(place.window);
      for (std::size_t f = 0; f < 3; ++f) {
        REQUIRE(std::abs(static_cast<double>(counts[f]) - weights[f] / sum * static_cast<double>(i + 1)) < 1.5);
      }
    }
    // Of each file, all windows come before one comes again.
    for (std::size_t f = 0; f < 3; ++f) {
      const std::size_t n = std::array<std::size_t, 3>{10, 50, 3}[f];
      for (std::size_t begin = 0; begin + n <= windows[f].size(); begin += n) {
        const auto first = windows[f].begin() + static_cast<std::ptrdiff_t>(begin);
        REQUIRE(std::set(first, first + static_cast<std::ptrdiff_t>(n)).size() == n);
      }
    }
    CHECK(batches.place(1'000'000'000'000).window >= 0);  // without those before it
  }
}

TEST_CASE("files without weights are mixed evenly, and each window comes once an epoch") {
  const TempFolder folder;
  const Batches batches({{counting_file(folder / "a", 101), {}}, {counting_file(folder / "b", 501, 1000), {}}},
                        {.context = 10});
  REQUIRE(batches.windows() == 60);
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<std::int64_t> seen;
    for (std::int64_t i = 0; i < 60; ++i) seen.insert(batches.window(60 * epoch + i)[0]);
    CHECK(seen.size() == 60);
  }
  const TokenFile a = TokenFile::open(folder / "a");
  CHECK_THROWS_WITH(Batches({{a, 1.0}, {a, {}}}, {.context = 10}), Contains("some have none"));
  CHECK_THROWS_WITH(Batches({{a, 0.0}}, {.context = 10}), Contains("its weight is 0, but must be above 0"));
}

TEST_CASE("held-out windows are never trained on, and no seed changes which they are") {
  const TempFolder folder;
  const TokenFile a = counting_file(folder / "a", 1001), b = counting_file(folder / "b", 301, 5000);
  for (const HeldOut from : {HeldOut::last, HeldOut::scattered}) {
    std::set<std::int64_t> kept[2];
    for (const std::uint64_t seed : {1, 2}) {
      const Batches batches({{a, {}}, {b, {}}}, {.context = 10, .seed = seed, .held_out = 0.1, .held_out_from = from});
      REQUIRE(batches.held_out() == 13);
      REQUIRE(batches.windows() == 117);
      std::set<std::int64_t> targets, trained;
      for (std::int64_t i = 0; i < 13; ++i) {
        const TokenIds window = batches.held_out_window(i);
        kept[seed - 1].insert(window[0]);
        targets.insert(window.begin() + 1, window.end());
      }
      CHECK(kept[seed - 1].size() == 13);
      for (std::int64_t i = 0; i < 3 * 117; ++i) {
        const TokenIds window = batches.window(i);
        trained.insert(window[0]);
        for (std::size_t t = 1; t < window.size(); ++t) REQUIRE_FALSE(targets.contains(window[t]));
      }
      CHECK(trained.size() == 117);
      CHECK_THROWS_WITH(batches.held_out_window(13), Contains("held-out window 13 is asked for, but there are 13"));
    }
    CHECK(kept[0] == kept[1]);
    CHECK(kept[0].contains(900) == (from == HeldOut::last));
  }
  CHECK_THROWS_WITH(Batches({{a, {}}}, {.context = 1000, .held_out = 0.1}), Contains("leaves none to train on"));
  CHECK_THROWS_WITH(Batches({{a, {}}}, {.context = 10, .held_out = 1.0}), Contains("must be at least 0 and below 1"));
}

TEST_CASE("a restored position goes on exactly, and that of other data is refused") {
  const TempFolder folder;
  const TokenFile a = counting_file(folder / "a", 1001), b = counting_file(folder / "b", 501, 5000);
  const BatchSettings settings{.context = 10, .seed = 4, .held_out = 0.05};
  Batches whole({{a, 2.0}, {b, 1.0}}, settings);
  std::vector<TokenIds> windows;
  for (int i = 0; i < 400; ++i) windows.push_back(whole.next());
  for (const std::size_t stop : {0U, 1U, 57U, 144U, 399U}) {
    Batches before({{a, 2.0}, {b, 1.0}}, settings);
    before.skip(static_cast<std::int64_t>(stop));
    const Json state = from_text(to_text(before.state()));
    Batches after({{a, 2.0}, {b, 1.0}}, settings);
    after.restore(state);
    CHECK(after.position() == static_cast<std::int64_t>(stop));
    for (std::size_t i = stop; i < windows.size(); ++i) REQUIRE(after.next() == windows[i]);
  }
  const Json state = whole.state();
  CHECK_THROWS_WITH(Batches({{a, 1.0}, {b, 1.0}}, settings).restore(state), Contains("other data: weights"));
  CHECK_THROWS_WITH(Batches({{b, 2.0}, {a, 1.0}}, settings).restore(state), Contains("other data: tokens"));
  CHECK_THROWS_WITH(Batches({{a, 2.0}, {b, 1.0}}, {.context = 10, .seed = 5, .held_out = 0.05}).restore(state),
                    Contains("other data: seed was 4, and is 5"));
  CHECK_THROWS_WITH(whole.restore(from_text(R"({"position": -1})")), Contains("is damaged"));
  CHECK_THROWS_WITH(whole.restore(from_text("[]")), Contains("is damaged"));
}

TEST_CASE("a context that is longer than the data is refused with the numbers") {
  const TempFolder folder;
  const TokenFile file = counting_file(folder / "f", 100);
  CHECK(Batches({{file, {}}}, {.context = 99}).windows() == 1);
  CHECK_THROWS_WITH(Batches({{file, {}}}, {.context = 100}),
                    Contains("has 100 tokens, but one window of context 100 needs 101") && Contains("at most 99"));
  CHECK_THROWS_WITH(Batches({{file, {}}}, {.context = 0}), Contains("the context is 0"));
  CHECK_THROWS_WITH(Batches({}, {.context = 1}), Contains("there is no token file"));
}

}  // namespace batches_test
