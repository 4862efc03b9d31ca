#include "cuda/conv/choose.h"

#include <mutex>
#include <unordered_map>

#include "cuda/conv/plan_common.h"
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

/// Plans wgrad/ only if no operand must be copied. With few channels, a copy costs more than the product.
FamilyPlan try_wgrad_without_copies(const ConvProblem& p) {
  return is_half(p.dtype) && p.in_channels_last && p.out_channels_last ? try_plan<plan_wgrad>(p) : FamilyPlan();
}

// The first plan is used. small_channel/ returns no plan if wgmma is faster.
constexpr Planner kFpropDgrad[] = {try_plan<plan_pointwise>, try_plan<plan_small_channel_fprop_dgrad>,
                                   try_plan<plan_fprop_dgrad>, try_plan<plan_mma_sync_fprop_dgrad>};
constexpr Planner kWgrad[] = {try_plan<plan_pointwise>, try_wgrad_without_copies, try_plan<plan_small_channel_wgrad>,
                              try_plan<plan_wgrad>, try_plan<plan_mma_sync_wgrad>};

bool has_plan(const FamilyPlan& plan) { return plan.index() > 0; }

/// Chooses the number of groups to merge (at least 1) with the lowest estimated cost. Leaves `plan` unchanged if no
/// number has a plan.
template <auto plan_family>
void choose_merged_groups(const ConvProblem& problem, ConvPlan& plan) {
  double min_cycles = 0;
  for (int64_t count = 1; may_merge_groups(problem, count); ++count) {
    const ConvProblem p = with_merged_groups(problem, count);
    if (problem.groups % count != 0 || (count < problem.groups && !has_wide_groups(p))) continue;
    const auto found = plan_family(p);
    const double cycles = found ? found->cycles + (count > 1 ? kMergingGroups : 0) : 0;
    if (!found || (has_plan(plan.family) && cycles >= min_cycles)) continue;
    min_cycles = cycles;
    plan = {p, false, count, *found};
  }
}

ConvPlan make_plan(const ConvProblem& p) {
  const bool wgrad = p.pass == ConvPass::wgrad;
  ConvPlan plan;
  if (suits_width_as_channels(p)) {
    plan = {with_width_as_channels(p), true, 1, {}};
    plan.family = (wgrad ? try_plan<plan_wgrad> : try_plan<plan_fprop_dgrad>)(plan.problem);
    if (has_plan(plan.family)) return plan;
  }
  plan = {p, false, 1, try_plan<plan_depthwise>(p)};
  if (has_plan(plan.family)) return plan;
  if (p.groups > 1 && is_channels_last(p))
    (wgrad ? choose_merged_groups<plan_wgrad> : choose_merged_groups<plan_fprop_dgrad>)(p, plan);
  if (has_plan(plan.family)) return plan;
  for (const Planner planner : wgrad ? std::span<const Planner>(kWgrad) : kFpropDgrad)
    if (plan.family = planner(p); has_plan(plan.family)) break;
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
