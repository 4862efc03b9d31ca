// Chooses the kernel family and the plan of a convolution.
#include "cuda/conv/plan/choose.h"

#include <mutex>
#include <span>
#include <unordered_map>

#include "cuda/conv/plan/common.h"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {
namespace {

using Planner = FamilyPlan (*)(const ConvProblem&);

/// Returns the plan of one family, or no plan if the family does not support the problem.
template <auto plan>
FamilyPlan try_plan(const ConvProblem& p) {
  auto found = plan(p);
  return found ? FamilyPlan(std::move(*found)) : FamilyPlan();
}

/// Plans sm90/wgrad only if no operand must be copied. With few channels, a copy costs more than the product.
FamilyPlan try_wgrad_without_copies(const ConvProblem& p) {
  return is_half(p.dtype) && p.in_channels_last && p.out_channels_last ? try_plan<plan_wgrad>(p) : FamilyPlan();
}

/// Returns the estimated clocks of the scaled copies that sm90/wgrad makes of float32 operands: both operands are read
/// twice, and their copies are written. The kernels move 2350 bytes per clock. 35,000 clocks are the fixed time by
/// which the model of sm90/wgrad was too low in measurements on an H200.
double wgrad_copy_cycles(const ConvProblem& p) {
  const double elements = static_cast<double>(p.batch * sample_bytes(p)) / sizeof(float);
  return (8 + 2.0 * parts(p)) * elements / 2350 + 35000;
}

/// Plans sm80/multistage_wgrad if it is forced, or if each group has several channels and the estimated time is less
/// than that of sm90/wgrad with its copies.
FamilyPlan try_multistage_wgrad(const ConvProblem& p) {
  const auto multistage = plan_multistage_wgrad(p);
  if (!multistage) return {};
  if (p.choice.multistage) return *multistage;
  if (p.choice != ConvChoice{} || std::min(p.in_channels, p.out_channels) < 16 || plan_pointwise(p)) return {};
  const auto wgmma = plan_wgrad(p);
  if (wgmma && multistage->cycles > wgmma->cycles + wgrad_copy_cycles(p)) return {};
  return *multistage;
}

/// Plans direct/small_channel unless sm90/fprop_dgrad supports the problem and is faster. For channels-last tensors,
/// sm90/fprop_dgrad is always faster. It must copy other tensors, and is faster if its estimated time with the copy is
/// less. The factor 1.5 corrects the model of sm90/fprop_dgrad, which underestimates the cost of strided results and
/// small tiles.
FamilyPlan try_small_channel(const ConvProblem& p) {
  const auto small = plan_small_channel_fprop_dgrad(p);
  if (!small) return {};
  if (const auto wgmma = plan_fprop_dgrad(p)) {
    if (is_channels_last(p)) return {};
    const double copy = 2.0 * static_cast<double>(copied_bytes(p)) / 2350;  // reads and writes 2350 bytes per clock
    if (1.5 * (wgmma->cycles + copy) < small->cycles) return {};
  }
  return *small;
}

/// A rewrite of the problem, and a family that computes the rewritten problem.
struct Candidate {
  ConvRewrite rewrite;
  Planner plan;
};

// The first candidate with a plan is used.
constexpr Candidate kFpropDgrad[] = {
    {ConvRewrite::none, try_plan<plan_few_inputs>},       // fprop only
    {ConvRewrite::mirrored, try_plan<plan_few_inputs>},   // dgrad as fprop
    {ConvRewrite::none, try_plan<plan_few_outputs>},      // dgrad only
    {ConvRewrite::mirrored, try_plan<plan_few_outputs>},  // fprop as dgrad
    {ConvRewrite::width_as_channels, try_plan<plan_fprop_dgrad>},
    {ConvRewrite::none, try_plan<plan_depthwise>},
    {ConvRewrite::merged_groups, try_plan<plan_fprop_dgrad>},
    {ConvRewrite::none, try_plan<plan_pointwise>},
    {ConvRewrite::none, try_small_channel},
    {ConvRewrite::none, try_plan<plan_fprop_dgrad>},
    {ConvRewrite::none, try_plan<plan_mma_sync_fprop_dgrad>},
};
constexpr Candidate kWgrad[] = {
    {ConvRewrite::none, try_plan<plan_few_inputs>},
    {ConvRewrite::mirrored, try_plan<plan_few_inputs>},
    {ConvRewrite::none, try_multistage_wgrad},
    {ConvRewrite::width_as_channels, try_plan<plan_wgrad>},
    {ConvRewrite::none, try_plan<plan_depthwise>},
    {ConvRewrite::merged_groups, try_plan<plan_wgrad>},
    {ConvRewrite::none, try_plan<plan_pointwise>},
    {ConvRewrite::none, try_wgrad_without_copies},
    {ConvRewrite::none, try_plan<plan_small_channel_wgrad>},
    {ConvRewrite::none, try_plan<plan_wgrad>},
    {ConvRewrite::none, try_plan<plan_mma_sync_wgrad>},
};

bool has_plan(const FamilyPlan& plan) { return !std::holds_alternative<std::monostate>(plan); }

/// Returns the estimated clocks of a plan; 0 if its family has no model.
double cycles_of(const FamilyPlan& plan) {
  return std::visit(
      [](const auto& family) {
        if constexpr (requires { family.cycles; }) return static_cast<double>(family.cycles);
        return 0.0;
      },
      plan);
}

/// Returns the plan with the lowest estimated cost among the problems that the rewrite of a candidate yields, for one
/// launch for all samples.
ConvPlan plan_launch(const Candidate& candidate, const ConvProblem& problem) {
  ConvPlan best;
  double min_cycles = 0;
  for (const auto& [rewrite, rewritten, merged_groups, cost] : rewritten_problems(candidate.rewrite, problem)) {
    FamilyPlan family = candidate.plan(rewritten);
    const double cycles = cycles_of(family) + cost;
    if (!has_plan(family) || (has_plan(best.family) && cycles >= min_cycles)) continue;
    min_cycles = cycles;
    best = {rewrite, rewritten, merged_groups, problem.batch, std::move(family), {}, {}};
  }
  return best;
}

/// Returns the plan of a candidate for launches of as many samples as may be copied at a time.
ConvPlan plan_candidate(const Candidate& candidate, ConvProblem p) {
  for (;;) {
    ConvPlan plan = plan_launch(candidate, p);
    if (p.batch <= 1 || !std::holds_alternative<FpropDgradPlan>(plan.family)) return plan;
    const int64_t samples = samples_to_copy(p, copied_bytes(plan.problem) / p.batch);
    if (samples == p.batch) return plan;
    p.batch = samples;
  }
}

ConvPlan make_plan(const ConvProblem& p);

/// Returns the plan of a rewrite whose problem has its own plan, or nothing if the rewrite does not apply.
std::optional<ConvPlan> plan_copies(ConvRewrite rewrite, const ConvProblem& p) {
  for (const RewrittenProblem& rewritten : rewritten_problems(rewrite, p)) {
    ConvPlan plan;
    plan.rewrite = rewrite;
    plan.problem = rewritten.problem;
    plan.samples = p.batch;
    plan.copies = std::make_shared<const ConvPlan>(make_plan(rewritten.problem));
    return plan;
  }
  return std::nullopt;
}

ConvPlan make_plan(const ConvProblem& p) {
  if (const auto plan = plan_copies(ConvRewrite::patches_as_channels, p)) return *plan;
  const bool wgrad = p.pass == ConvPass::wgrad;
  for (const Candidate& candidate : wgrad ? std::span<const Candidate>(kWgrad) : kFpropDgrad) {
    ConvPlan plan = plan_candidate(candidate, p);
    if (!has_plan(plan.family)) continue;
    if (plan.samples < p.batch && p.batch % plan.samples != 0) {
      ConvProblem rest = p;
      rest.batch %= plan.samples;
      plan.rest = std::make_shared<const ConvPlan>(make_plan(rest));
    }
    return plan;
  }
  if (const auto plan = plan_copies(ConvRewrite::float32_copies, p)) return *plan;
  ConvPlan plan;
  plan.problem = p;
  plan.samples = p.batch;
  return plan;
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
         p.choice.width});
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
