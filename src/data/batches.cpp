#include "data/batches.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "hf/hash.h"

namespace tapetune {

namespace {

__extension__ using Wide = unsigned __int128;

// The finaliser of splitmix64: every bit of the input reaches every bit of the output.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

std::uint64_t mix(std::initializer_list<std::uint64_t> numbers) {
  std::uint64_t key = 0;
  for (const std::uint64_t number : numbers) key = mix(key ^ number);
  return key;
}

constexpr std::uint64_t scatter_key = 0x68656c642d6f7574;  // not the seed's: a held-out window is so in every run

}  // namespace

// A Feistel network is a bijection of 2^k numbers whatever its round function; walking on from a result that is not
// below n until one is makes it a bijection of n.
Permutation::Permutation(std::uint64_t n, std::uint64_t key)
    // Few bits would leave few different orders, so that short lists have some to spare.
    : n_(n), half_bits_(std::max(4, (static_cast<int>(std::bit_width(n > 0 ? n - 1 : 0)) + 1) / 2)), round_keys_{} {
  for (std::uint64_t& round_key : round_keys_) round_key = key = mix(key);
}

std::uint64_t Permutation::operator()(std::uint64_t i) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  do {
    std::uint64_t left = i >> half_bits_, right = i & mask;
    for (const std::uint64_t round_key : round_keys_) {
      left = std::exchange(right, left ^ (mix(right ^ round_key) & mask));
    }
    i = left << half_bits_ | right;
  } while (i >= n_);
  return i;
}

Batches::Batches(std::vector<DataFile> files, const BatchSettings& settings) : settings_(settings) {
  if (files.empty()) fail("data", "there is no token file; give one or several.");
  if (settings.context < 1) fail("data", "the context is {}, but must be 1 or more.", settings.context);
  if (!(settings.held_out >= 0 && settings.held_out < 1))
    fail("data", "the held-out share is {}, but must be at least 0 and below 1.", settings.held_out);
  double weights = 0;
  for (const DataFile& file : files) {
    if (file.weight.has_value() != files[0].weight.has_value())
      fail("data", "some token files have a weight and some have none; give all of them one.");
    if (file.weight && !(std::isfinite(*file.weight) && *file.weight > 0))
      fail("data", "{}: its weight is {}, but must be above 0.", file.file.path().string(), *file.weight);
    weights += file.weight.value_or(0);
  }
  for (DataFile& file : files) {
    const std::int64_t tokens = file.file.size(), windows = (tokens - 1) / settings.context;
    if (windows < 1) {
      fail("data",
           "{}: has {} tokens, but one window of context {} needs {}; pack more text or give a context of at most {}.",
           file.file.path().string(), tokens, settings.context, settings.context + 1, tokens - 1);
    }
    std::int64_t held_out = std::llround(settings.held_out * static_cast<double>(windows));
    if (settings.held_out > 0) held_out = std::max<std::int64_t>(held_out, 1);
    if (held_out >= windows) {
      fail("data",
           "{}: has {} windows of context {}, and holding out {} of them leaves none to train on; pack more text, or "
           "lower the context or the held-out share ({}).",
           file.file.path().string(), windows, settings.context, held_out, settings.held_out);
    }
    const std::int64_t trained = windows - held_out;
    // Shares of 2^32: exact for all that people write, and small enough for the products in place().
    const std::uint64_t weight =
        file.weight ? std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::ldexp(*file.weight / weights, 32)))
                    : static_cast<std::uint64_t>(trained);
    total_weight_ += weight;
    parts_.push_back({std::move(file.file), trained, held_out, weight});
  }
}

std::int64_t Batches::windows() const {
  return std::accumulate(parts_.begin(), parts_.end(), std::int64_t{0},
                         [](std::int64_t sum, const Part& part) { return sum + part.trained; });
}

std::int64_t Batches::held_out() const {
  return std::accumulate(parts_.begin(), parts_.end(), std::int64_t{0},
                         [](std::int64_t sum, const Part& part) { return sum + part.held_out; });
}

std::int64_t Batches::window_of(const Part& part, std::int64_t n, bool held_out) const {
  const std::int64_t place = held_out ? part.trained + n : n;
  if (settings_.held_out_from == HeldOut::last || part.held_out == 0) return place;
  const auto windows = static_cast<std::uint64_t>(part.trained + part.held_out);
  return static_cast<std::int64_t>(Permutation(windows, scatter_key)(static_cast<std::uint64_t>(place)));
}

Batches::Place Batches::drawn(std::size_t part, std::uint64_t n) const {
  const auto windows = static_cast<std::uint64_t>(parts_[part].trained);
  const std::uint64_t epoch = n / windows;
  const Permutation order(windows, mix({settings_.seed, part, epoch}));
  const auto chosen = static_cast<std::int64_t>(order(n % windows));
  return {part, window_of(parts_[part], chosen, false), static_cast<std::int64_t>(epoch)};
}

// Draw n of a file with share w has its turn at time (n + 1/2) / w, and turns come in the order of time: the counts
// follow the shares as closely as whole numbers can (Webster's method), and the state at any index is found without
// those before it. With shares that are numbers of windows, each epoch ends with every window drawn once.
Batches::Place Batches::place(std::int64_t index) const {
  if (index < 0) fail("data", "window {} is asked for.", index);
  if (parts_.size() == 1) return drawn(0, static_cast<std::uint64_t>(index));
  const auto target = static_cast<std::uint64_t>(index);
  // At time t file i had its share t * w rounded, all of which sum to `target`; so t is off by half a draw a file at
  // most, and these counts are never too high. The draws that are missing are made in order.
  const std::uint64_t slack = parts_.size() / 2 + 2;
  std::vector<std::uint64_t> counts;
  std::uint64_t drawn_before = 0;
  for (const Part& part : parts_) {
    const auto even = static_cast<std::uint64_t>(static_cast<Wide>(target) * part.weight / total_weight_);
    counts.push_back(even > slack ? even - slack : 0);
    drawn_before += counts.back();
  }
  const auto due = [&] {
    std::size_t first = 0;
    for (std::size_t i = 1; i < parts_.size(); ++i) {
      if (static_cast<Wide>(2 * counts[i] + 1) * parts_[first].weight <
          static_cast<Wide>(2 * counts[first] + 1) * parts_[i].weight)
        first = i;
    }
    return first;
  };
  for (; drawn_before < target; ++drawn_before) ++counts[due()];
  const std::size_t part = due();
  return drawn(part, counts[part]);
}

Batches::Place Batches::held_out_place(std::int64_t index) const {
  std::int64_t left = index;
  for (std::size_t i = 0; i < parts_.size() && left >= 0; ++i) {
    if (left < parts_[i].held_out) return {i, window_of(parts_[i], left, true), 0};
    left -= parts_[i].held_out;
  }
  fail("data", "held-out window {} is asked for, but there are {}.", index, held_out());
}

TokenIds Batches::read(const Place& place) const {
  TokenIds ids(static_cast<std::size_t>(settings_.context + 1));
  parts_[place.file].file.read(place.window * settings_.context, ids);
  return ids;
}

TokenIds Batches::window(std::int64_t index) const { return read(place(index)); }

TokenIds Batches::held_out_window(std::int64_t index) const { return read(held_out_place(index)); }

TokenIds Batches::next() { return window(position_++); }

std::string Batches::sample_hash() const {
  constexpr std::int64_t tokens = 1 << 16, fewest = 64;
  const std::int64_t samples = std::max(fewest, tokens / settings_.context);
  Hasher hasher;
  const auto add = [&](const TokenIds& ids) { hasher.add(std::as_bytes(std::span(ids))); };
  const auto spread = [&](std::int64_t windows, std::int64_t most, const auto& window) {
    const std::int64_t count = std::min(windows, most);
    for (std::int64_t i = 0; i < count; ++i) add(window(windows * i / count));
  };
  spread(windows(), samples, [&](std::int64_t i) { return window(i); });
  spread(held_out(), samples / 4, [&](std::int64_t i) { return held_out_window(i); });
  return hasher.hex();
}

Json Batches::state() const {
  Json state;
  state["position"] = position_;
  state["seed"] = settings_.seed;
  state["context"] = settings_.context;
  state["held_out_from"] = settings_.held_out_from == HeldOut::last ? "last" : "scattered";
  for (const char* key : {"tokens", "trained", "weights", "vocabularies"}) state[key] = Json::array();
  for (const Part& part : parts_) {
    state["tokens"].push_back(part.file.size());
    state["trained"].push_back(part.trained);
    state["weights"].push_back(part.weight);
    state["vocabularies"].push_back(fmt::format("{:016x}", part.file.info().vocabulary_hash));
  }
  return state;
}

void Batches::restore(const Json& saved) {
  const Json own = state();
  if (!saved.is_object() || !saved.contains("position") || !saved["position"].is_number_integer() ||
      saved["position"].get<std::int64_t>() < 0) {
    fail("data", "the saved position in the data is damaged; start a new run, or remove this checkpoint.");
  }
  for (const auto& [key, value] : own.items()) {
    if (key == "position") continue;
    const auto found = saved.find(key);
    if (found == saved.end() || *found != value) {
      fail("data", "the saved position belongs to other data: {} was {}, and is {}; give the same data and settings.",
           key, found == saved.end() ? "not there" : to_text(*found), to_text(value));
    }
  }
  position_ = saved["position"].get<std::int64_t>();
}

}  // namespace tapetune
