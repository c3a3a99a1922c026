// LoRA (arXiv 2106.09685): low-rank matrices A and B beside frozen projections; with rsLoRA's scale (2312.03732) and
// DoRA's magnitudes (2402.09353).
#pragma once

#include "adapters/adapter.h"

namespace tapetune {

// What B A is multiplied by before it is added.
double lora_scale(const MethodOptions& options);

// Whether a projection has LoRA matrices; layer: any for the head.
bool is_adapted(const MethodOptions& options, std::int64_t layer, Projection which);

// Whether an entry of exclude_modules leaves out a projection that would have LoRA matrices without it.
bool excludes_target(const MethodOptions& options, std::int64_t layers, const std::string& module);

void check_lora(const MethodOptions& options);
void make_lora(ModelBuilder& model);

}  // namespace tapetune
