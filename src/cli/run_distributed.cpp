#include "cli/run_distributed.h"

#include <CLI/CLI.hpp>

#include "cli/exit_code.h"
#include "cli/numbers.h"
#include "cli/options.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "core/trace.h"
#include "distributed/rendezvous.h"
#include "model/device.h"

namespace tapetune::cli {

namespace {

void write_trace(World& world, const std::string& path) {
  const std::vector<std::string> all = world.gather(to_text(trace::events(world.rank())));
  if (!world.is_rank0()) return;
  Json events = Json::array();
  for (std::size_t r = 0; r < all.size(); ++r) {
    for (Json& event : json_of_rank(static_cast<int>(r), all[r])) events.push_back(std::move(event));
  }
  WholeFile file(path, true);
  file.write(to_text(Json{{"traceEvents", std::move(events)}}) + "\n");
  file.commit();
}

// Of an interruption during the rendezvous, rank 0 speaks for all.
std::unique_ptr<World> join_world(const RankInfo& info, std::chrono::seconds timeout, at::Device device) {
  try {
    return std::make_unique<World>(info, timeout, device);
  } catch (const Interrupted&) {
    if (info.rank == 0) throw;
    throw Interrupted("");
  }
}

}  // namespace

void add_distributed(CLI::App& verb, DistributedOptions& options) {
  verb.add_option("--timeout", options.timeout,
                  "Seconds that ranks wait for each other, at startup and in a step (default: 600)")
      ->transform(whole_number(1));
  // The verbs that open a model have it already.
  if (verb.get_option_no_throw("--device") == nullptr) verb.add_option("--device", options.device, device_help);
  verb.add_option("--trace", options.trace,
                  "File for a trace of compute and communication, for chrome://tracing or Perfetto");
}

bool shares_work(const CLI::App& verb) { return verb.get_option_no_throw("--timeout") != nullptr; }

void run_distributed(const DistributedOptions& options, const std::function<void(World& world)>& work) {
  const RankInfo info = rank_info_from_environment();
  const bool asked_quiet = quiet();
  if (info.rank != 0) set_quiet(true);
  if (!options.trace.empty()) trace::begin();
  const at::Device device = open_device(options.device, info.local_rank);
  if (info.rank == 1) set_quiet(asked_quiet);  // it says so when rank 0 does not come
  const std::unique_ptr<World> joined = join_world(info, std::chrono::seconds(options.timeout), device);
  World& world = *joined;
  if (info.rank != 0) set_quiet(true);
  if (world.size() == 1) {
    work(world);
    if (!options.trace.empty()) write_trace(world, options.trace);
    return;
  }
  try {
    work(world);
    if (!options.trace.empty()) write_trace(world, options.trace);
    world.broadcast("done");  // what rank 0 could not write is no success on any rank
    world.shutdown(std::chrono::seconds(options.timeout));
  } catch (...) {
    const ExitMessage message = exit_message(std::current_exception());
    if (message.code == resumable) world.interrupt();
    tell({message.code == resumable ? (world.is_rank0() ? message.text : "") : world.diagnose(message.text),
          message.code});
    std::fflush(stdout);
    std::fflush(stderr);
    if (message.code == resumable) {
      world.shutdown(std::chrono::seconds(10));  // some may have been interrupted where others were not
    } else {
      world.confirm_failure();
    }
    // Connections to ranks that are gone would be waited for on the way out.
    std::_Exit(message.code);
  }
}

}  // namespace tapetune::cli
