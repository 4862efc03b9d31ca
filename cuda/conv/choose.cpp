#include "cuda/conv/choose.h"

#include <mutex>
#include <unordered_map>

#include "cuda/conv/plan_common.h"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {
namespace {

using Planner = FamilyPlan (*)(const ConvProblem&);

template <auto plan>
FamilyPlan ask(const ConvProblem& p) {
  auto found = plan(p);
  return found ? FamilyPlan(std::move(*found)) : FamilyPlan();
}

/// Of few channels, what wgrad/ would copy is the longer part.
FamilyPlan ask_wgrad_without_copies(const ConvProblem& p) {
  return is_half(p.dtype) && p.in_channels_last && p.out_channels_last ? ask<plan_wgrad>(p) : FamilyPlan();
}

// In the order in which they are asked. small_channel/ leaves fprop and dgrad that are quicker by wgmma to the next.
constexpr Planner kFpropDgrad[] = {ask<plan_pointwise>, ask<plan_small_channel_fprop_dgrad>, ask<plan_fprop_dgrad>,
                                   ask<plan_mma_sync_fprop_dgrad>};
constexpr Planner kWgrad[] = {ask<plan_pointwise>, ask_wgrad_without_copies, ask<plan_small_channel_wgrad>,
                              ask<plan_wgrad>, ask<plan_mma_sync_wgrad>};

bool takes_any(const FamilyPlan& plan) { return plan.index() > 0; }

/// The quickest of so many groups as one by wgmma, one included; else none.
template <auto plan_family>
void choose_merged_groups(const ConvProblem& asked, ConvPlan& plan) {
  double least = 0;
  for (int64_t count = 1; may_merge_groups(asked, count); ++count) {
    const ConvProblem p = with_merged_groups(asked, count);
    if (asked.groups % count != 0 || (count < asked.groups && !has_wide_groups(p))) continue;
    const auto found = plan_family(p);
    const double cycles = found ? found->cycles + (count > 1 ? kMergingGroups : 0) : 0;
    if (!found || (takes_any(plan.family) && cycles >= least)) continue;
    least = cycles;
    plan = {p, false, count, *found};
  }
}

ConvPlan make_plan(const ConvProblem& p) {
  const bool wgrad = p.pass == ConvPass::wgrad;
  ConvPlan plan;
  if (suits_width_as_channels(p)) {
    plan = {with_width_as_channels(p), true, 1, {}};
    plan.family = (wgrad ? ask<plan_wgrad> : ask<plan_fprop_dgrad>)(plan.problem);
    if (takes_any(plan.family)) return plan;
  }
  plan = {p, false, 1, {}};
  if (p.groups > 1 && is_channels_last(p))
    (wgrad ? choose_merged_groups<plan_wgrad> : choose_merged_groups<plan_fprop_dgrad>)(p, plan);
  if (takes_any(plan.family)) return plan;
  for (const Planner planner : wgrad ? std::span<const Planner>(kWgrad) : kFpropDgrad)
    if (plan.family = planner(p); takes_any(plan.family)) break;
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
  constexpr size_t kMost = 1024;
  static std::mutex mutex;
  static std::unordered_map<ConvProblem, std::shared_ptr<const ConvPlan>, Hash> known;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(problem); found != known.end()) return found->second;
  }
  auto plan = std::make_shared<const ConvPlan>(make_plan(problem));
  const std::lock_guard lock(mutex);
  if (known.size() >= kMost) known.clear();
  return known.emplace(problem, std::move(plan)).first->second;
}

}  // namespace voxgrad::cuda
