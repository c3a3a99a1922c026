#include "plan/plan.h"

#include <unistd.h>

#include <fstream>

#include "checkpoint/dtype.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/memory.h"
#include "data/token_file.h"
#include "distributed/mesh.h"
#include "plan/activations.h"
#include "plan/base.h"
#include "run/disk.h"
#include "run/run_data.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

double bytes_of(const at::Tensor& t) { return static_cast<double>(t.numel()) * static_cast<double>(t.element_size()); }

// Assumed, as none was at hand: CUDA's context with the libraries' kernels and NCCL's buffers, and what LibTorch's
// allocator rounds up and leaves unused.
constexpr double gpu_program_bytes = 1.5e9, gpu_slack = 0.15;

// What this process holds by now: the libraries, which every run has as well.
double resident_bytes() {
  std::ifstream file("/proc/self/statm");
  double total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

std::optional<double> epochs(const Recipe& recipe, const ModelConfig& config) {
  double tokens = 0;
  for (std::size_t i = 0; i < recipe.data.size(); ++i) {
    const fs::path path = token_path(recipe, i);
    std::error_code status;
    if (!fs::exists(path, status)) return std::nullopt;
    const TokenFile file =
        path.extension() == ".bin" ? TokenFile::open_raw(path, config.vocab_size) : TokenFile::open(path);
    tokens += static_cast<double>(file.info().tokens);
  }
  return static_cast<double>(recipe.steps * recipe.batch * recipe.context) / (tokens * (1 - recipe.held_out));
}

}  // namespace

double Plan::peak_memory() const {
  double sum = 0;
  for (const auto& [part, bytes] : memory) sum += bytes;
  return sum;
}

Plan make_plan(const Recipe& recipe, const Machine& machine) {
  const MetaModel base = meta_model(recipe);
  const AdaptedModel adapted = adapt(base.config, base.weights, recipe.method, base.dtype);
  Plan plan;
  double weights = 0, trained = 0;
  for (const auto& [name, tensor] : named_weights(base.config, base.weights)) {
    plan.parameters += tensor.numel();
    weights += bytes_of(tensor);
  }
  for (const Parameter& p : adapted.parameters) {
    plan.trained += p.value.numel();
    plan.trained_by_part[std::string(p.group)] += p.value.numel();
    trained += bytes_of(p.value);
  }
  const std::int64_t rows = share_batch(recipe, machine.ranks).micro_batch;
  const StepMemory step = step_memory(adapted, rows, recipe.context / recipe.sequence_parallel, recipe.checkpointing);
  const bool sharded = recipe.shard == "base" && machine.ranks > 1;
  const auto ranks = static_cast<double>(machine.ranks);
  if (sharded) {
    const double frozen = frozen_bytes(adapted);
    weights += frozen / ranks - frozen + gathered_bytes(adapted);
  }
  // Blocks that come and go with each layer leave holes: jemalloc holds about a quarter of their size besides, glibc's
  // heap twice, in runs of 1024 to 8192 tokens of all methods (tools/bench plan), and libraries have working memory of
  // their own.
  const double holes = heap_is_compact() ? step.moment / 4 : 2 * step.moment;
  plan.memory = {{"program", machine.gpus ? gpu_program_bytes : resident_bytes()},
                 {"weights", weights},
                 {"trained", trained},
                 {"gradients", trained},
                 {"optimizer", 2 * trained / (sharded ? ranks : 1)},
                 {"activations", step.activations},
                 {"loss", step.loss},
                 {"heap", machine.gpus ? gpu_slack * step.activations : holes + 45e6}};
  plan.traffic = step_traffic(adapted, recipe, machine.ranks);
  const RunDisk disk = run_disk(adapted, recipe);
  plan.checkpoint_bytes = disk.checkpoint;
  plan.disk_bytes = disk.most;
  plan.tokens = recipe.steps * recipe.batch * recipe.context;
  plan.epochs = epochs(recipe, base.config);
  plan.step_flops = static_cast<double>(recipe.batch) *
                    step_flops(adapted, recipe.context, recipe.checkpointing).total(adapted.model.config().layers);
  return plan;
}

}  // namespace tapetune
