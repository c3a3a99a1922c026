// The components that a recipe may pick by name: adapters, position encodings and attention patterns. A new one is a
// folder with a table entry; a program of one's own adds it to the registry before it calls run_cli (cli/run.h).
#pragma once

#include <algorithm>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "adapters/build_model.h"
#include "adapters/settings.h"
#include "checkpoint/checkpoint.h"
#include "core/error.h"
#include "core/nearest.h"
#include "model/components.h"

namespace tapetune {

// What is known of a recipe before its model is opened; 0: not known yet.
struct RecipeFacts {
  std::int64_t context = 0;
  std::int64_t heads = 0;
  bool base_trains = false;  // all of the base's weights
};
// What is wrong, and with which key; an empty key: with the component.
struct Problem {
  std::string key, text;
};

// Files by name that a merged model carries beside its weights.
using Files = std::map<std::string, std::string>;

template <typename T>
struct Component {
  std::string_view name;
  std::string_view summary;
  std::vector<Key> keys;
  // What a key alone cannot say; null: nothing.
  std::vector<Problem> (*check)(const Settings& settings, const RecipeFacts& facts) = nullptr;
  std::shared_ptr<const T> (*make)(const Settings& settings, ModelBuilder& model) = nullptr;
};

struct AdapterComponent : Component<Adapter> {
  // Giving this key chooses the component where a method has no adapter; without it, what to say of the other keys.
  std::string_view chosen_by, not_chosen;
  // Settings from PEFT's adapter_config.json and the adapter's tensors, as words for parse_method; null: PEFT has none.
  std::string_view peft_type;
  std::vector<std::string> (*from_peft)(const Json& config, const StoredTensors& stored, const ModelConfig& model,
                                        const std::string& where) = nullptr;
  // The way back: what adapter_config.json says of the adapter itself.
  Json (*to_peft)(const Settings& settings) = nullptr;
  bool peft_ties = false;  // PEFT's config has ensure_weight_tying, for embeddings that train and stay tied
  // Settings that earlier versions wrote and a new adapter may not have; null: none.
  void (*mend_earlier)(Settings& settings, const ModelConfig& model) = nullptr;
  // Drops what names single layers, for estimates on a model with fewer; null: nothing does.
  void (*for_all_layers)(Settings& settings) = nullptr;
};

struct PositionComponent : Component<PositionEncoding> {
  bool rotates = false;       // takes RoPE's settings
  std::string_view title;     // as papers write it: TAPE
  std::string_view ablation;  // key=value that breaks its invariance to shifts; empty: there is none such
  std::string_view ablated;   // what it then is called: TAPE without equivariance
  // Whether a checkpoint's tensor belongs to it; null: it has none.
  bool (*owns)(const ModelConfig& config, std::string_view tensor) = nullptr;
  // The settings that a checkpoint has; null: it has none of its own.
  Settings (*recognise)(const Checkpoint& checkpoint) = nullptr;
  // What a merged model needs besides its weights for others to run it, or to refuse it: config.json names the
  // encoding. `tokenizer`: the folder that the tokenizer comes from. null: it is a plain Llama.
  void (*export_files)(const Settings& settings, const ModelConfig& config, const std::filesystem::path& tokenizer,
                       Files& files) = nullptr;
  std::vector<std::string_view> exported;  // names of these files
  std::string_view card;                   // what a model card says of it
};

using PatternComponent = Component<AttentionPattern>;

template <typename C>
class Registry {
 public:
  Registry(std::string_view kind, std::vector<C> built_in) : kind_(kind), all_(built_in.begin(), built_in.end()) {}

  // Later ones follow the built-in ones. Fails where the name is taken, where it cannot be made, and where a key has
  // another type than another component's key of that name: a recipe has one table of keys.
  void add(C component) {
    if (get(component.name) != nullptr) {
      fail("component", "there is already {} \"{}\"; choose another name.", kind_, component.name);
    }
    if (component.make == nullptr) fail("component", "{} \"{}\" has no make; set it.", kind_, component.name);
    for (const C& other : all_) {
      for (const Key& key : component.keys) {
        if (has_other_type(key, other.keys)) {
          fail("component", "{} \"{}\": key {} is of another type than that of \"{}\"; choose another name.", kind_,
               component.name, key.name, other.name);
        }
      }
    }
    all_.push_back(std::move(component));
  }
  const C* get(std::string_view name) const {
    for (const C& each : all_) {
      if (each.name == name) return &each;
    }
    return nullptr;
  }
  // Fails with the nearest name where there is none such.
  const C& find(std::string_view name) const {
    if (const C* found = get(name)) return *found;
    const std::string meant = did_you_mean(name, names());
    fail("method", "there is no {} \"{}\"; there are {}{}.", kind_, name, fmt::join(names(), ", "),
         meant.empty() ? "; if another program brings it, use that one" : meant);
  }
  std::vector<std::string_view> names() const {
    std::vector<std::string_view> names;
    names.reserve(all_.size());
    for (const C& each : all_) names.push_back(each.name);
    return names;
  }
  const std::deque<C>& all() const { return all_; }

 private:
  std::string_view kind_;
  std::deque<C> all_;  // whose elements stay where they are
};

Registry<AdapterComponent>& adapter_components();
Registry<PositionComponent>& position_components();
Registry<PatternComponent>& pattern_components();

}  // namespace tapetune
