// Measures the time, the memory and the losses of training steps on a volume that is divided among all ranks. For
// comparison, also measures the same steps with the whole volume on each rank.
#include "ops/spatial.h"
#include "bench/scaling/stepper.h"
#include "core/random.h"
#include "ops/create.h"

namespace scaling {
namespace vg = voxgrad;
namespace {

/// Creates a random volume that is the same on all ranks. Returns the whole volume or, if `shared` is true, this rank's
/// slab: the part of the volume, divided along D, that belongs to this rank.
vg::Tensor volume_of(const Bench& bench, bool shared) {
  const int64_t size = bench.options.size, depth = bench.options.depth > 0 ? bench.options.depth : size;
  vg::Generator random(1);
  const vg::Tensor whole = vg::randn({bench.options.batch, 1, depth, size, size}, {.device = bench.device()}, &random);
  return shared ? vg::distributed::SpatialParallel(bench.world).slab(whole) : whole;
}

void measure(const Bench& bench, const std::string& mode, bool shared, bool graph) {
  ordered_json row{{"mode", mode}, {"graph", graph}, {"shared", shared}, {"depth", bench.options.depth}};
  try {
    // The constructor of Stepper creates a patch and runs a step on it; a small patch is enough. set_volumes() then
    // replaces the patch by the volume.
    Options small = bench.options;
    small.batch = 1;
    small.size = 64;
    Stepper stepper({small, bench.world, {}}, bench.world, mode, shared ? "ddp" : "none");
    set_volumes(*stepper.training, volume_of(bench, shared));
    vg::memory::empty_cache(bench.device());
    vg::memory::reset_peak(bench.device());
    ordered_json losses = ordered_json::array();
    const auto step = [&] {
      std::optional<vg::distributed::SpatialParallel> spatial;
      if (shared) spatial.emplace(bench.world);
      stepper.step();
    };
    for (int i = 0; i < 3; ++i) {
      step();
      losses.push_back(stepper.training->loss.item());
    }
    Execution execution(bench, graph, step);
    const Times times = time_rounds(bench, bench.options.steps, execution);
    const std::vector<double> peaks = bench.gather(static_cast<double>(vg::memory::stats(bench.device()).peak));
    row.update(
        {{"ms", times.slowest}, {"peak_gb", *std::max_element(peaks.begin(), peaks.end()) / 1e9}, {"losses", losses}});
  } catch (const vg::OutOfMemoryError& error) {
    if (shared) throw;  // otherwise, ranks with enough memory would wait forever for this rank
    row["error"] = "does not fit on one GPU";
  }
  bench.report("spatial", row);
}

}  // namespace

void measure_spatial(const Bench& bench) {
  for (const std::string& mode : bench.options.modes)
    for (const bool shared : {false, true})
      each_execution(bench, [&](bool graph) { measure(bench, mode, shared, graph); });
}

}  // namespace scaling
