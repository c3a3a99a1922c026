#include "eval/resume.h"

#include "checkpoint/finite.h"
#include "core/file.h"
#include "model/loss.h"

namespace tapetune {

namespace fs = std::filesystem;

Json read_resume_file(const fs::path& path, std::string_view kind, std::string_view who) {
  require_writable(path, /*replace=*/true);
  std::error_code status;
  if (!fs::exists(path, status)) return {};
  const Json json = parse_json(read_text(path), "eval", path.string());
  if (!json.is_object() || json.value("tapetune", Json()) != fmt::format("eval {}", kind)) {
    fail("eval", "{}: does not hold results of eval {}; give --resume another file.", path.string(), kind);
  }
  if (const auto before = resume_value<std::string>(json, "model"); before != who) {
    fail("eval", "{}: holds results of {}, but this is {}; give --resume another file.", path.string(), before, who);
  }
  return resume_value<Json>(json, std::string(kind).c_str());
}

void write_resume_file(const fs::path& path, std::string_view kind, std::string_view who, const Json& state) {
  WholeFile file(path, /*replace=*/true);
  file.write(to_text(Json{{"tapetune", fmt::format("eval {}", kind)}, {"model", who}, {kind, state}}, 2) + "\n");
  file.commit();
}

void fail_unfit(std::size_t rank) {
  fail("ranks",
       "rank {} sent results that do not fit this evaluation; check that no other program uses the ranks' port.", rank);
}

void fail_damaged() { fail("eval", "the saved results are damaged; remove the --resume file, or give another."); }

double fingerprint(const Llama& model, const std::vector<std::int64_t>& tokens) {
  const c10::NoGradGuard evaluation;
  const at::Tensor row = at::tensor(tokens, at::kLong);
  const std::int64_t targets = row.size(0) - 1;
  ForwardInput in;
  in.tokens = row.narrow(0, 0, targets).unsqueeze(0);
  return token_losses(model, model.forward(in).last[0], row.narrow(0, 1, targets)).to(at::kDouble).sum().item<double>();
}

void require_finite_fingerprint(double fingerprint) {
  if (std::isfinite(fingerprint)) return;
  throw_not_finite("eval", "the loss is NaN or Inf; the model's weights or its dtype are broken (try --dtype f32).");
}

void check_fingerprint(double before, double now) {
  if (std::abs(now - before) <= same_model * std::abs(before)) return;
  fail("eval",
       "the saved results are of another model: its first losses sum to {}, now to {}; give --resume another file.",
       before, now);
}

void require_same_work(World& world, const Json& settings, double fingerprint) {
  if (world.size() > 1) require_finite_fingerprint(fingerprint);  // NaN cannot be told to the others
  const std::string remedy = "start all ranks with the same command, on the same files";
  world.require_same("an evaluation", to_text(settings), remedy);
  const std::vector<std::string> losses = world.all_gather(to_text(Json(fingerprint)));
  const auto loss_of = [&](std::size_t r) {
    const Json loss = json_of_rank(static_cast<int>(r), losses[r]);
    return loss.is_number() ? loss.get<double>() : std::nan("");
  };
  const double first = loss_of(0);
  for (std::size_t r = 1; r < losses.size(); ++r) {
    if (std::abs(loss_of(r) - first) <= same_model * std::abs(first)) continue;
    fail("launch", "rank {} has a model different from rank 0's: its first losses sum to {}, not {}; {}.", r,
         excerpt(losses[r]), excerpt(losses.front()), remedy);
  }
}

std::vector<Json> share_found(World& world, const Json& found) {
  std::vector<Json> all;
  bool stop = false;
  const std::vector<std::string> texts = world.all_gather(to_text(Json{{"found", found}, {"stop", interrupted()}}));
  for (std::size_t r = 0; r < texts.size(); ++r) {
    Json said = json_of_rank(static_cast<int>(r), texts[r]);
    const bool fits = said.is_object() && said.contains("found") && said.contains("stop") && said["stop"].is_boolean();
    if (!fits) fail_unfit(r);
    stop = stop || said["stop"].get<bool>();
    all.push_back(std::move(said["found"]));
  }
  if (stop) throw Interrupted("interrupted");
  return all;
}

}  // namespace tapetune
