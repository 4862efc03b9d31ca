// Chooses the kernel family and the plan of a convolution.
#include "cuda/conv/plan/choose.h"

#include <algorithm>
#include <mutex>
#include <span>
#include <unordered_map>

#include "cuda/conv/plan/common.h"

namespace voxgrad::cuda {
namespace {

using Planner = FamilyPlan (*)(const ConvProblem&);

/// Returns the plan of one family, or no plan if the family does not support the problem.
template <auto plan>
FamilyPlan try_plan(const ConvProblem& p) {
  auto found = plan(p);
  return found ? FamilyPlan(std::move(*found)) : FamilyPlan();
}

/// Converts the clocks of a family's own model to measured clocks:
/// max(model * clocks of the model, memory * clocks of memory that transfers the operands once) + start.
/// The constants were fitted to 6,700 measurements of 2,589 passes on an H200, so that the planner selects the family
/// that is fastest there. Those of fprop_dgrad, wgrad and the weight gradient of small_channel were fitted again later.
struct Cost {
  double model;
  double memory;
  double start;
};

/// A rewrite of the problem, and a family that computes the rewritten problem.
struct Candidate {
  ConvRewrite rewrite;
  ConvKernel kernel;
  Planner plan;
  Cost cost;
};

constexpr Cost kFewInputs{1, 1.3, 12000}, kFewInputsWgrad{1.25, 1.6, 30000}, kFewOutputs{1.4, 1.3, 6000},
    kDepthwise{0.5, 1.3, 23000}, kDepthwiseWgrad{0.55, 1.45, 17500}, kPointwise{2.1, 1.1, 15000},
    kPointwiseWgrad{2, 1, 15000}, kSmallChannel{0.85, 1.8, 12000}, kSmallChannelWgrad{0.56, 1.4, 18000},
    kMultistage{0.9, 1.05, 9500}, kWgmma{0.9, 0.48, 14000}, kWidth{0.8, 0.48, 12500}, kMerged{1, 0.48, 17000},
    kWgmmaWgrad{1.1, 1.25, 7500}, kWidthWgrad{1.2, 1.25, 7500}, kMergedWgrad{1.2, 1.25, 15000},
    kMmaSync{2.4, 4.9, 30000}, kMmaSyncWgrad{2.4, 5.4, 48000};

constexpr Candidate kFpropDgrad[] = {
    {ConvRewrite::none, ConvKernel::few_inputs, try_plan<plan_few_inputs>, kFewInputs},         // fprop only
    {ConvRewrite::mirrored, ConvKernel::few_inputs, try_plan<plan_few_inputs>, kFewInputs},     // dgrad as fprop
    {ConvRewrite::none, ConvKernel::few_outputs, try_plan<plan_few_outputs>, kFewOutputs},      // dgrad only
    {ConvRewrite::mirrored, ConvKernel::few_outputs, try_plan<plan_few_outputs>, kFewOutputs},  // fprop as dgrad
    {ConvRewrite::none, ConvKernel::depthwise, try_plan<plan_depthwise>, kDepthwise},
    {ConvRewrite::none, ConvKernel::pointwise, try_plan<plan_pointwise>, kPointwise},
    {ConvRewrite::none, ConvKernel::small_channel, try_plan<plan_small_channel_fprop_dgrad>, kSmallChannel},
    {ConvRewrite::none, ConvKernel::fprop_dgrad, try_plan<plan_fprop_dgrad>, kWgmma},
    {ConvRewrite::width_as_channels, ConvKernel::fprop_dgrad, try_plan<plan_fprop_dgrad>, kWidth},
    {ConvRewrite::phases_as_channels, ConvKernel::fprop_dgrad, try_plan<plan_fprop_dgrad>, kWgmma},  // dgrad only
    {ConvRewrite::merged_groups, ConvKernel::fprop_dgrad, try_plan<plan_fprop_dgrad>, kMerged},
    {ConvRewrite::none, ConvKernel::mma_sync, try_plan<plan_mma_sync_fprop_dgrad>, kMmaSync},
};
constexpr Candidate kWgrad[] = {
    {ConvRewrite::none, ConvKernel::few_inputs, try_plan<plan_few_inputs>, kFewInputsWgrad},
    {ConvRewrite::mirrored, ConvKernel::few_inputs, try_plan<plan_few_inputs>, kFewInputsWgrad},
    {ConvRewrite::none, ConvKernel::depthwise, try_plan<plan_depthwise>, kDepthwiseWgrad},
    {ConvRewrite::none, ConvKernel::pointwise, try_plan<plan_pointwise>, kPointwiseWgrad},
    {ConvRewrite::none, ConvKernel::small_channel, try_plan<plan_small_channel_wgrad>, kSmallChannelWgrad},
    {ConvRewrite::none, ConvKernel::multistage_wgrad, try_plan<plan_multistage_wgrad>, kMultistage},
    {ConvRewrite::none, ConvKernel::wgrad, try_plan<plan_wgrad>, kWgmmaWgrad},
    {ConvRewrite::width_as_channels, ConvKernel::wgrad, try_plan<plan_wgrad>, kWidthWgrad},
    {ConvRewrite::merged_groups, ConvKernel::wgrad, try_plan<plan_wgrad>, kMergedWgrad},
    {ConvRewrite::none, ConvKernel::mma_sync, try_plan<plan_mma_sync_wgrad>, kMmaSyncWgrad},
};

/// Returns whether the overrides of a problem allow a candidate. Without a family, overrides concern the tiles of
/// sm90/.
bool is_allowed(const ConvChoice& choice, const Candidate& candidate) {
  const ConvKernel kernel = candidate.kernel;
  if (choice.kernel != ConvKernel::any && kernel != choice.kernel) return false;
  if (choice.copies > 0) return choice.copies == 3 && candidate.rewrite == ConvRewrite::phases_as_channels;
  if (choice.kernel != ConvKernel::any) return true;
  return choice == ConvChoice{} || kernel == ConvKernel::fprop_dgrad || kernel == ConvKernel::wgrad;
}

bool has_plan(const ConvPlan& plan) { return plan.copies || !std::holds_alternative<std::monostate>(plan.family); }

/// Returns the estimated clocks of a family's plan.
double cycles_of(const FamilyPlan& plan, const Cost& cost, const ConvProblem& p) {
  const double model = std::visit(
      [](const auto& family) {
        if constexpr (requires { family.cycles; }) return family.cycles;
        return 0.0;
      },
      plan);
  const double memory = memory_cycles(static_cast<double>(p.batch * sample_bytes(p)));
  return std::max(cost.model * model, cost.memory * memory) + cost.start;
}

/// Returns the plan with the lowest estimated cost among the problems that the rewrite of a candidate yields, for one
/// launch for all samples.
ConvPlan plan_launch(const Candidate& candidate, const ConvProblem& problem) {
  ConvPlan best;
  for (const auto& [rewrite, rewritten, merged_groups, copies] : rewritten_problems(candidate.rewrite, problem)) {
    ConvPlan plan{rewrite, rewritten, merged_groups, problem.batch, candidate.plan(rewritten)};
    if (!has_plan(plan)) continue;
    plan.cycles = cycles_of(plan.family, candidate.cost, rewritten) + copies;
    if (!has_plan(best) || plan.cycles < best.cycles) best = std::move(plan);
  }
  return best;
}

/// Returns the plan of a candidate for launches of as many samples as may be copied at a time.
ConvPlan plan_candidate(const Candidate& candidate, const ConvProblem& problem) {
  ConvProblem p = problem;
  for (;;) {
    ConvPlan plan = plan_launch(candidate, p);
    if (!has_plan(plan)) return plan;
    const bool copies = p.batch > 1 && candidate.kernel == ConvKernel::fprop_dgrad;
    const int64_t samples = copies ? samples_to_copy(p, copied_bytes(plan.problem) / p.batch) : p.batch;
    if (samples == p.batch) {
      plan.cycles *= static_cast<double>(problem.batch) / static_cast<double>(p.batch);
      return plan;
    }
    p.batch = samples;
  }
}

ConvPlan best_plan(const ConvProblem& p);
ConvPlan make_plan(const ConvProblem& p);

/// Returns the plan of a rewrite whose problem has its own plan, which `plan` returns, or no plan if the rewrite or
/// `plan` does not apply.
template <auto plan>
ConvPlan plan_copies(ConvRewrite rewrite, const ConvProblem& p) {
  ConvPlan result;
  for (RewrittenProblem& rewritten : rewritten_problems(rewrite, p)) {
    rewritten.problem.choice.copies = 0;
    ConvPlan copies = plan(rewritten.problem);
    if (plan == best_plan && !has_plan(copies)) continue;
    result = {.rewrite = rewrite, .problem = rewritten.problem, .samples = p.batch};
    result.cycles = copies.cycles + rewritten.cycles;
    result.copies = std::make_shared<const ConvPlan>(std::move(copies));
  }
  return result;
}

/// Returns the candidate with the lowest estimated cost, or no plan if none supports the problem.
ConvPlan best_plan(const ConvProblem& p) {
  ConvPlan best;
  const auto consider = [&](ConvPlan plan) {
    if (has_plan(plan) && (!has_plan(best) || plan.cycles < best.cycles)) best = std::move(plan);
  };
  const bool wgrad = p.pass == ConvPass::wgrad;
  for (const Candidate& candidate : wgrad ? std::span<const Candidate>(kWgrad) : kFpropDgrad)
    if (is_allowed(p.choice, candidate)) consider(plan_candidate(candidate, p));
  if (p.choice == ConvChoice{} || p.choice.copies == 1)
    consider(plan_copies<best_plan>(ConvRewrite::patches_as_channels, p));
  if (p.choice == ConvChoice{} || p.choice.copies == 2)
    consider(plan_copies<best_plan>(ConvRewrite::channels_last_copies, p));
  if (has_plan(best) && best.samples < p.batch && p.batch % best.samples != 0) {
    ConvProblem rest = p;
    rest.batch %= best.samples;
    best.rest = std::make_shared<const ConvPlan>(make_plan(rest));
  }
  return best;
}

/// Returns the best plan. If there is none, ignores the overrides, then uses float32 copies or the plain kernels.
ConvPlan make_plan(const ConvProblem& p) {
  if (p.batch == 0) return {.problem = p, .samples = 0};
  ConvPlan plan = best_plan(p);
  if (has_plan(plan)) return plan;
  if (p.choice != ConvChoice{} && p.choice.kernel != ConvKernel::plain) {
    ConvProblem unforced = p;
    unforced.choice = {};
    return *choose(unforced);
  }
  plan = plan_copies<make_plan>(ConvRewrite::float32_copies, p);
  return has_plan(plan) ? plan : ConvPlan{.problem = p, .samples = p.batch};
}

struct Hash {
  size_t operator()(const ConvProblem& p) const {
    uint64_t hash = 0;
    const auto add = [&](std::initializer_list<int64_t> values) {
      for (const int64_t value : values) {
        hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15;
        hash ^= hash >> 32;
      }
    };
    const ConvGeometry& g = p.geometry;
    add({static_cast<int64_t>(p.pass), static_cast<int64_t>(p.dtype), static_cast<int64_t>(p.precision), p.batch,
         p.groups, p.in_channels, p.out_channels, p.in_channels_last, p.out_channels_last, p.in_dense, p.out_dense,
         p.in_planes, p.out_planes, p.choice.width, static_cast<int64_t>(p.choice.kernel)});
    for (int a = 0; a < 3; ++a)
      add({p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a], g.dilation[a], p.in_stride[a],
           p.out_stride[a]});
    return hash;
  }
};

}  // namespace

std::shared_ptr<const ConvPlan> choose(const ConvProblem& problem) {
  constexpr size_t kMaxPlans = 1024;
  static std::mutex mutex;
  static std::unordered_map<ConvProblem, std::shared_ptr<const ConvPlan>, Hash> known;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(problem); found != known.end()) return found->second;
  }
  auto plan = std::make_shared<const ConvPlan>(make_plan(problem));
  const std::lock_guard lock(mutex);
  if (known.size() >= kMaxPlans) known.clear();
  return known.emplace(problem, std::move(plan)).first->second;
}

}  // namespace voxgrad::cuda
