#include "adapters/options.h"

#include <charconv>

#include "adapters/adapter.h"
#include "core/error.h"
#include "core/nearest.h"

namespace tapetune {

namespace {

constexpr std::pair<Projection, std::string_view> projections[] = {
    {Projection::q, "q"},       {Projection::k, "k"},   {Projection::v, "v"},       {Projection::o, "o"},
    {Projection::gate, "gate"}, {Projection::up, "up"}, {Projection::down, "down"}, {Projection::head, "lm_head"}};

template <typename T>
T number(std::string_view key, std::string_view text, T least, T most, std::string_view rule) {
  T value{};
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool readable = error == std::errc() && rest == text.data() + text.size();
  if (std::is_integral_v<T> && readable && value > most) {
    fail("method", "{} must be at most {}, but is \"{}\".", key, most, text);
  }
  if (!readable || !(value >= least && value <= most)) fail("method", "{} must be {}, but is \"{}\".", key, rule, text);
  return value;
}

bool flag(std::string_view key, std::string_view text) {
  if (text == "true" || text == "1" || text == "yes") return true;
  if (text == "false" || text == "0" || text == "no") return false;
  fail("method", "{} must be true or false, but is \"{}\".", key, text);
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(','), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

template <typename Value>
Value one_of(std::string_view key, std::string_view text, std::span<const std::pair<Value, std::string_view>> choices) {
  std::vector<std::string_view> names;
  for (const auto& [value, name] : choices) {
    if (name == text) return value;
    names.push_back(name);
  }
  const std::string meant = nearest(text, names);
  fail("method", "{} cannot be \"{}\"; it takes {}{}.", key, text, fmt::join(names, ", "),
       meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant));
}

void set_targets(MethodOptions& o, std::string_view text) {
  o.targets.clear();
  for (std::string_view name : split(text)) {
    if (name.ends_with("_proj")) name.remove_suffix(5);  // transformers' own names
    const auto which = one_of<Projection>("targets", name, projections);
    if (std::find(o.targets.begin(), o.targets.end(), which) == o.targets.end()) o.targets.push_back(which);
  }
  if (o.targets.empty()) fail("method", "targets is empty; name projections, for example targets=q,k,v,o.");
}

constexpr std::pair<Mix, std::string_view> mixes[] = {{Mix::full, "full"}, {Mix::per_head, "per-head"}};
constexpr std::pair<RopeType, std::string_view> scalings[] = {{RopeType::standard, "none"},
                                                              {RopeType::linear, "linear"},
                                                              {RopeType::dynamic, "dynamic"},
                                                              {RopeType::yarn, "yarn"}};

enum class Part { embeddings, norms, head };
constexpr std::pair<Part, std::string_view> parts[] = {
    {Part::embeddings, "embeddings"}, {Part::norms, "norms"}, {Part::head, "lm_head"}};

void set_train_also(MethodOptions& o, std::string_view text) {
  o.train_embeddings = o.train_norms = o.train_head = false;
  for (const std::string_view name : split(text)) {
    const Part part = one_of<Part>("train_also", name, parts);
    (part == Part::embeddings ? o.train_embeddings : part == Part::norms ? o.train_norms : o.train_head) = true;
  }
}

std::string joined(const std::vector<std::string_view>& names) { return fmt::format("{}", fmt::join(names, ",")); }

constexpr double huge = 1e12;

// In the order in which people read them.
const MethodKey keys[] = {
    {"rank", "rank of the LoRA matrices",
     [](auto& o, auto text) { o.rank = number<std::int64_t>("rank", text, 0, 65536, "an integer >= 1"); },
     [](const auto& o) { return Json(o.rank); }},
    {"alpha", "scale of B A: alpha / rank, with rslora alpha / sqrt(rank)",
     [](auto& o, auto text) { o.alpha = number("alpha", text, 1e-12, huge, "a number above 0"); },
     [](const auto& o) { return Json(o.alpha); }},
    {"dropout", "dropout on the input of the LoRA matrices",
     [](auto& o, auto text) { o.dropout = number("dropout", text, 0.0, 0.999999, "a number from 0 to below 1"); },
     [](const auto& o) { return Json(o.dropout); }},
    {"targets", "projections with LoRA matrices: q,k,v,o,gate,up,down,lm_head", set_targets,
     [](const auto& o) {
       std::vector<std::string_view> names;
       names.reserve(o.targets.size());
       for (const Projection which : o.targets) names.push_back(projection_name(which));
       return Json(joined(names));
     }},
    {"layers_to_transform", "layers with LoRA matrices, as 0,1,2 (default: all; lm_head has none where it is set)",
     [](auto& o, auto text) {
       o.layers.clear();
       for (const std::string_view layer : split(text)) {
         o.layers.push_back(number<std::int64_t>("layers_to_transform", layer, 0, 1 << 20, "a list of layer numbers"));
       }
     },
     [](const auto& o) { return o.layers.empty() ? Json() : Json(fmt::format("{}", fmt::join(o.layers, ","))); }},
    {"exclude_modules", "targets without LoRA matrices, as q_proj or layers.3.self_attn.q_proj",
     [](auto& o, auto text) {
       o.excluded.clear();
       for (const std::string_view module : split(text)) {
         const std::string_view last = module.substr(module.rfind('.') + 1);
         const auto named = [&](const auto& p) {
           return last == (p.first == Projection::head ? std::string(p.second) : fmt::format("{}_proj", p.second));
         };
         if (std::none_of(std::begin(projections), std::end(projections), named)) {
           fail("method", "exclude_modules must be projections, as q_proj or layers.3.self_attn.q_proj, but is \"{}\".",
                module);
         }
         o.excluded.emplace_back(module);
       }
     },
     [](const auto& o) { return o.excluded.empty() ? Json() : Json(fmt::format("{}", fmt::join(o.excluded, ","))); }},
    {"rslora", "rank-stabilized LoRA (rsLoRA)", [](auto& o, auto text) { o.rslora = flag("rslora", text); },
     [](const auto& o) { return Json(o.rslora); }},
    {"dora", "DoRA: magnitude and direction trained separately",
     [](auto& o, auto text) { o.dora = flag("dora", text); }, [](const auto& o) { return Json(o.dora); }},
    {"group", "attention group in training: a share of the sequence, or a number of tokens",
     [](auto& o, auto text) { o.group = number("group", text, 1e-9, huge, "a share below 1 or a number of tokens"); },
     [](const auto& o) { return Json(o.group); }},
    {"mix", "how heads mix in the attention's position update: full or per-head",
     [](auto& o, auto text) { o.mix = one_of<Mix>("mix", text, mixes); },
     [](const auto& o) { return Json(o.mix == Mix::full ? "full" : "per-head"); }},
    {"width", "inner width of the position update, in heads",
     [](auto& o, auto text) { o.width = number<std::int64_t>("width", text, 1, 1024, "an integer >= 1"); },
     [](const auto& o) { return Json(o.width); }},
    {"random_offset", "random position offset for every training sequence",
     [](auto& o, auto text) { o.random_offset = flag("random_offset", text); },
     [](const auto& o) { return Json(o.random_offset); }},
    {"equivariant", "false breaks the equivariance, as an ablation",
     [](auto& o, auto text) { o.equivariant = flag("equivariant", text); },
     [](const auto& o) { return Json(o.equivariant); }},
    {"scaling", "RoPE scaling: none, linear, dynamic or yarn (default: the model's own)",
     [](auto& o, auto text) { o.scaling = one_of<RopeType>("scaling", text, scalings); },
     [](const auto& o) {
       return o.scaling ? Json(*o.scaling == RopeType::standard ? "none" : rope_type_name(*o.scaling)) : Json();
     }},
    {"factor", "scaling factor of the context",
     [](auto& o, auto text) { o.factor = number("factor", text, 1.0, 1e6, "a number from 1 to 1e6"); },
     [](const auto& o) { return o.factor ? Json(*o.factor) : Json(); }},
    {"theta", "rope_theta",
     [](auto& o, auto text) { o.theta = number("theta", text, 1.000001, 1e18, "a number above 1"); },
     [](const auto& o) { return o.theta ? Json(*o.theta) : Json(); }},
    {"train_also", "other trainable parameters: embeddings,norms,lm_head", set_train_also,
     [](const auto& o) {
       std::vector<std::string_view> names;
       if (o.train_embeddings) names.emplace_back("embeddings");
       if (o.train_norms) names.emplace_back("norms");
       if (o.train_head) names.emplace_back("lm_head");
       return Json(joined(names));
     }},
    {"untie", "separate lm_head from the embeddings where they are tied",
     [](auto& o, auto text) { o.untie = flag("untie", text); }, [](const auto& o) { return Json(o.untie); }},
};

const MethodKey& find_key(const Method& method, std::string_view name) {
  std::vector<std::string_view> known;
  for (const MethodKey& key : keys) {
    const bool taken = std::find(method.keys.begin(), method.keys.end(), key.name) != method.keys.end();
    if (taken && key.name == name) return key;
    if (taken) known.push_back(key.name);
  }
  const std::string meant = nearest(name, known);
  fail("method", "{} has no setting \"{}\"; it takes {}{}.", method.name, name, fmt::join(known, ", "),
       meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant));
}

// Settings that mean nothing without LoRA matrices.
bool is_about_lora(std::string_view key) {
  return key == "alpha" || key == "dropout" || key == "targets" || key == "layers_to_transform" ||
         key == "exclude_modules" || key == "rslora" || key == "dora";
}

}  // namespace

std::span<const MethodKey> method_keys() { return keys; }

std::string_view projection_name(Projection which) {
  return std::find_if(std::begin(projections), std::end(projections), [&](const auto& p) { return p.first == which; })
      ->second;
}

MethodOptions parse_method(std::string_view name, std::span<const std::string> overrides) {
  const Method& method = find_method(name);
  MethodOptions options;
  options.method = method.name;
  if (method.defaults != nullptr) method.defaults(options);
  for (const std::string& word : overrides) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) {
      fail("method", "\"{}\" is not a setting; write key=value, for example rank=8.", word);
    }
    find_key(method, word.substr(0, equals)).set(options, std::string_view(word).substr(equals + 1));
  }
  if (method.check != nullptr) method.check(options);
  return options;
}

Json method_json(const MethodOptions& options) {
  const Method& method = find_method(options.method);
  Json json;
  json["method"] = options.method;
  for (const MethodKey& key : keys) {
    if (std::find(method.keys.begin(), method.keys.end(), key.name) == method.keys.end()) continue;
    if (options.rank == 0 && is_about_lora(key.name)) continue;
    if (const Json value = key.get(options); !value.is_null()) json[std::string(key.name)] = value;
  }
  return json;
}

MethodOptions method_from_json(const Json& json, std::string_view where) {
  if (!json.is_object() || !json.contains("method") || !json["method"].is_string()) {
    fail("adapter", "{}: must be an object with a method.", where);
  }
  std::vector<std::string> overrides;
  for (const auto& [key, value] : json.items()) {
    if (key != "method")
      overrides.push_back(key + "=" + (value.is_string() ? value.get<std::string>() : to_text(value)));
  }
  return parse_method(json["method"].get<std::string>(), overrides);
}

}  // namespace tapetune
