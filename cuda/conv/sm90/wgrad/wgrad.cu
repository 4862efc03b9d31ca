// Host side of kernel.cuh: tensor maps, the table of taps, and launches.
#include "cuda/conv/common/mma.cuh"
#include "cuda/conv/common/tensor_map.h"
#include "cuda/conv/common/wgrad_splits.h"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan/common.h"
#include "cuda/conv/sm90/wgrad/operand.h"
#include "cuda/conv/sm90/wgrad/params.h"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {
namespace {

using namespace implicit_wgrad;

/// Fills in the sets of taps: the offset of each box, and the start of each m64 tile.
void list_sets(Params& p, const WgradPlan& plan) {
  const int pitch[] = {plan.box[2] * plan.box[3], plan.box[3], 1}, taps_of_tile = 64 / plan.cta.chunk;
  const int* kernel[] = {&plan.axis[0].kernel, &plan.axis[1].kernel, &plan.axis[2].kernel};
  int boxes = 0;
  for (size_t s = 0; s < plan.sets.size(); ++s) {
    TapSet& set = p.set[s];
    set.first_box = static_cast<uint16_t>(boxes);
    set.boxes = static_cast<uint16_t>(plan.sets[s].size());
    int m_tiles = 0;
    for (size_t b = 0; b < plan.sets[s].size(); ++b) {
      const WgradBox& of = plan.sets[s][b];
      Box& box = p.box[boxes++];
      box.chunk = static_cast<uint16_t>(of.chunk);
      for (int a = 0; a < 3; ++a) {
        const AxisPhase& part = plan.axis[a].phase[of.part[a]];
        box.offset[a] =
            static_cast<int16_t>((part.start + of.first[a] * part.step) * plan.axis[a].in_step + part.residue);
        if (a == 0 && plan.cta.slide > 1) box.offset[a] = 0;
      }
      int shift[2] = {};
      for (int t = 0; t < of.taps(); ++t) {
        const int at[] = {t / (of.count[1] * of.count[2]), t / of.count[2] % of.count[1], t % of.count[2]};
        int tap = 0, rows = 0;
        for (int a = 0; a < 3; ++a) {
          const AxisPhase& part = plan.axis[a].phase[of.part[a]];
          tap = tap * *kernel[a] + part.tap_first + (of.first[a] + at[a]) * part.tap_step;
          rows += at[a] * part.step * pitch[a];
        }
        const int in_tile = t % taps_of_tile;
        shift[in_tile] = rows * plan.chunk_bytes() / 16;
        MTile& m_tile = set.m_tile[m_tiles % 2][m_tiles / 2];
        if (in_tile == 0)
          m_tile = {static_cast<int32_t>(static_cast<int>(b) * plan.box_bytes() / 16 + shift[0]),
                    0,
                    {MTile::kNone, MTile::kNone},
                    box.chunk};
        else
          m_tile.apart = static_cast<uint16_t>(shift[1] - shift[0]);
        m_tile.tap[in_tile] = static_cast<uint16_t>(tap);
        if (in_tile == taps_of_tile - 1 || t == of.taps() - 1) ++m_tiles;
      }
    }
    set.m_tiles[0] = static_cast<uint16_t>((m_tiles + 1) / 2);
    set.m_tiles[1] = static_cast<uint16_t>(m_tiles / 2);
  }
}

/// Lists the offset in a box of x of each step of 16 voxels. A step has two octets of voxels at a fixed distance.
void list_steps(Params& p, const WgradPlan& plan) {
  const int bytes = plan.chunk_bytes();
  p.steps = plan.rows() / 16;
  p.x_pitch = plan.box_row(8) * bytes;
  for (int i = 0; i < p.steps; ++i) p.step_at[i] = plan.box_row(16 * i) * bytes / 16;
}

Params make_params(const Operand& x, const Operand& y, const ConvProblem& problem, const WgradPlan& plan) {
  Params p{};
  p.x_pitch_channels = x.channel_pitch();
  p.y_pitch_channels = y.channel_pitch();
  if (three_products(problem)) p.parts[0] = {1, 0}, p.parts[1] = {0, 1};
  p.taps = static_cast<int>(problem.kernel[0] * problem.kernel[1] * problem.kernel[2]);
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.split_stride = problem.groups * problem.out_channels * problem.in_channels * p.taps;
  p.chunks = plan.chunks;
  p.box_bytes = plan.box_bytes();
  p.boxes_bytes = plan.most_boxes() * plan.box_bytes();
  p.box_rows = plan.box_rows();
  p.y_rows = plan.y_rows();
  if (plan.cta.slide > 1) {
    p.y_plane = plan.tile[2] * plan.tile[3] * 2 * plan.cta.columns;
    p.y_first = 1 - plan.cta.slide - plan.axis[0].phase[0].start;
    p.plane_taps = static_cast<int>(problem.kernel[1] * problem.kernel[2]);
  }
  p.stage_bytes = plan.stage_bytes();
  p.stages = plan.stages;
  p.sets = Divisor(static_cast<int>(plan.sets.size()));
  p.columns = Divisor(divide_up(p.out_channels, plan.cta.columns));
  p.channel_tiles = Divisor(plan.channel_tiles);
  p.groups = Divisor(static_cast<int>(problem.groups));
  std::copy_n(plan.tile, 4, p.tile);
  for (int a = 0; a < 3; ++a) {
    const int64_t positions = a == 0 ? plan.depth : problem.out_size[a];
    p.tiles[2 - a] = Divisor(static_cast<int>(divide_up(positions, plan.tile[a + 1])));
    p.in_step[a] = plan.axis[a].in_step;
  }
  list_sets(p, plan);
  list_steps(p, plan);
  return p;
}

/// Sets the parameters that depend on the operands of one launch. `samples` may be less than the samples of the plan.
/// Returns the number of splits.
int set_samples(Params& p, const View& x, const View& y, int samples, const ConvProblem& problem,
                const WgradPlan& plan) {
  constexpr const char* kOp = "conv weight gradient";
  p.x = describe_voxels(x, plan.cta.chunk, plan.box, p.in_step, kOp);
  const int y_box[] = {plan.y_box(0), plan.y_box(1), plan.y_box(2), plan.y_box(3)};
  p.y = describe_voxels(y, plan.cta.columns, y_box, {1, 1, 1}, kOp);
  p.samples = samples;
  p.tiles[3] = Divisor(divide_up(samples, plan.tile[0]));
  p.all_tiles = three_products(problem) ? 3 : 1;
  for (const Divisor& along : p.tiles) p.all_tiles *= along.value();
  p.tiles_of_split = std::min(plan.tiles_of_split, divide_up(p.all_tiles, plan.splits));
  const int splits = divide_up(p.all_tiles, p.tiles_of_split);
  p.units = static_cast<int>(plan.units / plan.splits * splits);
  return splits;
}

/// Returns x without the positions after the last position that a tap reads. An infinity there could reach the result.
View read_part(View x, const ConvProblem& problem) {
  for (int a = 0; a < 3; ++a) x.size[a + 2] = std::max<int64_t>(read_size(problem, a), 1);
  return x;
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const WgradPlan& plan, const Launch& launch) {
  const View &w = call.w, read = read_part(call.in, problem);
  const int parts = three_products(problem) ? 2 : 1;
  Operand input(read, problem.groups, parts, launch), gradient(call.out, problem.groups, parts, launch);
  input.allocate(plan.samples);
  gradient.allocate(plan.samples);
  const Scales scales(input, gradient, launch);
  Params p = make_params(input, gradient, problem, plan);
  const int64_t launches = divide_up(problem.batch, plan.samples);
  const Workspace partial(launch, static_cast<size_t>(launches * workspace_bytes(problem, plan)));
  p.partial = partial.as<float>();
  if (plan.direct) {
    p.weight = WeightLayout(w);
    p.x_maxima = input.maxima();
    p.y_maxima = gradient.maxima();
    p.cluster = Divisor(plan.splits);
  }
  const int shared = 1024 + plan.shared_bytes(), cluster = p.cluster.value();
  const auto run = parts == 2 ? launch_tile<Tf32x3> : w.dtype == DType::bf16 ? launch_tile<Bf16> : launch_tile<F16>;
  int splits = 0;
  for (int64_t first = 0; first < problem.batch; first += plan.samples) {
    const int64_t count = std::min(plan.samples, problem.batch - first);
    const View in = input.samples(first, count), out = gradient.samples(first, count);
    const int more = set_samples(p, in, out, static_cast<int>(count), problem, plan);
    run(p, plan.cta, plan.direct ? p.units : std::min(p.units, problem.multiprocessors), cluster, shared,
        launch.stream);
    p.partial += more * p.split_stride;
    splits += more;
  }
  if (plan.direct) return;
  reduce_wgrad_splits(w,
                      {.partial = partial.as<float>(),
                       .split_stride = p.split_stride,
                       .splits = splits,
                       .in_channels = p.in_channels,
                       .out_channels = p.out_channels,
                       .x_maxima = input.maxima(),
                       .y_maxima = gradient.maxima()},
                      launch.stream);
}

}  // namespace voxgrad::cuda
