// Right recipes, and for every key another value than theirs.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "recipe/recipe.h"

namespace tapetune::test::recipes {

// A right recipe of eight lines.
inline constexpr const char* right =
    "model: base\n"
    "data: a.tokens\n"
    "run: runs/x\n"
    "context: 64\n"
    "adapter: {method: lora}\n"
    "steps: 10\n"
    "batch: 4\n"
    "micro_batch: 2\n";

inline constexpr const char* scratch =
    "model: {init: random, hidden: 32, layers: 2, heads: 4, kv_heads: 2, ffn: 64, vocab: 61}\n"
    "data: a.tokens\n"
    "run: runs/x\n"
    "context: 64\n"
    "steps: 10\n";

inline Recipe with(const std::vector<std::string>& words, const std::string& text = right) {
  return parse_recipe(text, "r.yaml", words);
}

// A value for every key that differs from what `right` and `scratch` have.
inline const std::map<std::string, std::string> others{{"model", "other"},
                                                       {"model.init", "random"},
                                                       {"model.hidden", "64"},
                                                       {"model.layers", "3"},
                                                       {"model.heads", "8"},
                                                       {"model.kv_heads", "1"},
                                                       {"model.head_dim", "16"},
                                                       {"model.ffn", "65"},
                                                       {"model.vocab", "62"},
                                                       {"model.norm_eps", "1e-06"},
                                                       {"model.tied", "true"},
                                                       {"model.tokenizer", "somewhere"},
                                                       {"data", "[a.tokens, {path: b c.tokens, weight: 2.5}]"},
                                                       {"model_hash", "blake3-00"},
                                                       {"run", "runs/y"},
                                                       {"context", "128"},
                                                       {"method", "theta-scaling"},
                                                       {"positions.encoding", "rope"},
                                                       {"positions.mix", "per-head"},
                                                       {"positions.width", "2"},
                                                       {"positions.random_offset", "true"},
                                                       {"positions.equivariant", "false"},
                                                       {"positions.scaling", "none"},
                                                       {"positions.factor", "2"},
                                                       {"positions.theta", "500000"},
                                                       {"adapter.type", "none"},
                                                       {"adapter.rank", "16"},
                                                       {"adapter.alpha", "32"},
                                                       {"adapter.dropout", "0.1"},
                                                       {"adapter.targets", "[q, v]"},
                                                       {"adapter.layers_to_transform", "[0, 2]"},
                                                       {"adapter.exclude_modules", "[layers.0.self_attn.q_proj]"},
                                                       {"adapter.rslora", "true"},
                                                       {"adapter.dora", "true"},
                                                       {"attention.pattern", "shifted"},
                                                       {"attention.group", "16"},
                                                       {"attention.window", "none"},
                                                       {"train_also", "[embeddings, lm_head]"},
                                                       {"untie", "true"},
                                                       {"init_from", "adapters/x"},
                                                       {"steps", "11"},
                                                       {"batch", "8"},
                                                       {"micro_batch", "4"},
                                                       {"optimizer.lr", "0.0003"},
                                                       {"optimizer.betas", "[0.8, 0.95]"},
                                                       {"optimizer.eps", "1e-06"},
                                                       {"optimizer.weight_decay", "0.01"},
                                                       {"optimizer.clip", "0"},
                                                       {"schedule.kind", "linear"},
                                                       {"schedule.warmup", "5"},
                                                       {"schedule.min_lr", "1e-06"},
                                                       {"dtype", "bf16"},
                                                       {"checkpointing", "selective"},
                                                       {"shard", "base"},
                                                       {"sequence_parallel", "2"},
                                                       {"save_every", "7"},
                                                       {"keep", "3"},
                                                       {"held_out", "0.25"},
                                                       {"eval_every", "5"},
                                                       {"eval_windows", "6"},
                                                       {"log_every", "10"},
                                                       {"seed", "123456789012345678"}};

// The settings that a key needs to be allowed at all.
inline std::vector<std::string> company(const std::string& key) {
  if (key == "attention.group") return {"method=longlora"};
  if (key == "positions.mix" || key == "positions.width" || key == "positions.random_offset" ||
      key == "positions.equivariant")
    return {"method=tape"};
  if (key == "schedule.min_lr") return {"schedule.kind=cosine"};
  if (key == "eval_every") return {"held_out=0.5"};
  return {};
}

inline const char* base_of(const std::string& key) { return key.rfind("model.", 0) == 0 ? scratch : right; }

}  // namespace tapetune::test::recipes
