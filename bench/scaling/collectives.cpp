// Measurements of all-reduces while no other work runs. Times voxgrad's all-reduce, NCCL's all-reduce without voxgrad,
// and all the reductions of a training step.
#include "bench/scaling/observed.h"
#include "bench/scaling/raw_nccl.h"
#include "bench/scaling/stepper.h"
#include "ops/create.h"

namespace scaling {
namespace vg = voxgrad;
namespace {

/// Returns the bus bandwidth of an all-reduce in GB/s. In an optimal ring, each rank sends 2 (n - 1) / n times `bytes`.
double bus_gb_s(const Bench& bench, double bytes, double ms) {
  const double n = bench.world.size();
  return 2 * (n - 1) / n * bytes / ms * 1e-6;
}

vg::Tensor buffer(const Bench& bench, int64_t bytes, vg::DType dtype) {
  return vg::zeros({bytes / vg::item_size(dtype)}, {.dtype = dtype, .device = bench.device()});
}

Times time_voxgrad(const Bench& bench, const vg::Tensor& values, int calls) {
  const auto call = [&] { bench.world.all_reduce_async(values)->wait(); };
  call();
  return time_rounds(bench, calls, call);
}

void measure(const Bench& bench, RawNccl* raw, int64_t bytes, vg::DType dtype) {
  constexpr int kCalls = 20;
  const vg::Tensor values = buffer(bench, bytes, dtype), copy = buffer(bench, bytes, dtype);
  const double ms = time_voxgrad(bench, values, kCalls).slowest, size = static_cast<double>(bytes);
  ordered_json row{{"dtype", vg::name(dtype)}, {"bytes", bytes}, {"ms", ms}, {"alg_gb_s", size / ms * 1e-6}};
  row["bus_gb_s"] = bus_gb_s(bench, size, ms);
  if (raw) {
    const auto time = [&](const vg::Tensor& to) {
      raw->all_reduce(values, to);
      return time_rounds(bench, kCalls, [&] { raw->all_reduce(values, to); }).slowest;
    };
    const double in_place = time(values), out_of_place = time(copy);
    row["raw_bus_gb_s"] = bus_gb_s(bench, size, in_place);
    row["raw_out_of_place_bus_gb_s"] = bus_gb_s(bench, size, out_of_place);
    row["ratio"] = in_place / ms;
  }
  bench.report("allreduce", row);
}

}  // namespace

// Runs a training step on a small patch and records its reductions.
vg::Tensors make_buckets(const Bench& bench) {
  Options small = bench.options;
  small.batch = 1;
  small.size = 64;
  const Bench quick{small, bench.world, {}};
  ObservedCommunicator world(bench.world);
  Stepper stepper(quick, world, "bf16", "ddp");
  stepper.step();
  vg::Tensors buckets;
  for (const auto& reduction : world.take())
    buckets.push_back(buffer(bench, reduction.numel * vg::item_size(reduction.dtype), reduction.dtype));
  return buckets;
}

Times time_buckets(const Bench& bench, const vg::Tensors& buckets) {
  const auto reduce = [&] {
    std::vector<std::unique_ptr<vg::distributed::Work>> works;
    for (const vg::Tensor& bucket : buckets) works.push_back(bench.world.all_reduce_async(bucket));
    for (const auto& work : works) work->wait();
  };
  reduce();
  return time_rounds(bench, bench.options.steps, reduce);
}

void measure_all_reduce(const Bench& bench) {
  if (bench.world.size() == 1) return bench.report("allreduce", {{"skipped", "a single rank has no reductions"}});
  int64_t parameters = 0, bytes = 0;
  const vg::Tensors buckets = make_buckets(bench);
  for (const vg::Tensor& bucket : buckets) {
    parameters += bucket.numel();
    bytes += bucket.numel() * vg::item_size(bucket.dtype());
  }
  const double ms = time_buckets(bench, buckets).slowest;
  bench.report("allreduce_buckets", {{"wire", bench.options.wire},
                                     {"buckets", buckets.size()},
                                     {"bytes", bytes},
                                     {"ms", ms},
                                     {"bus_gb_s", bus_gb_s(bench, static_cast<double>(bytes), ms)}});
  const std::unique_ptr<RawNccl> raw = bench.options.simulate.empty() ? RawNccl::make(bench.world) : nullptr;
  for (const vg::DType dtype : {vg::f32, vg::bf16})
    for (const int64_t size : {parameters * vg::item_size(dtype), int64_t{25} << 20, int64_t{1} << 30})
      measure(bench, raw.get(), size, dtype);
}

}  // namespace scaling
