#!/usr/bin/env python3
"""Breaks CUDA kernels on purpose, one line at a time, and checks that their tests fail.

    tests/cuda/mutations.py WORK            # builds and runs each mutation; needs a GPU
    tests/cuda/mutations.py WORK --build    # only builds: WORK/<name> is the test program of a mutation
    tests/cuda/mutations.py WORK --run      # only runs the programs in WORK

WORK is a folder for a copy of the sources, a build and the programs. --cmake passes an option to cmake, for example
--cmake=-DCMAKE_CUDA_ARCHITECTURES=90a-real. Each mutation of a header rebuilds most convolution sources twice. The
program "none" contains the unchanged sources. The exit status is 1 if the tests pass despite a mutation, or if "none"
fails. A program that runs for more than 5 minutes counts as failed.
"""
import argparse
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILTER = "*CudaConvModes*:*CudaConvChannelsLast*:*CudaConvPointwise*:*CudaConvDepthwise*:*CudaConvFewInputs*:"\
         "*CudaConvFewOutputs*:CudaAccuracy.*:CudaKernels.GeluBackward*:CudaNorm.*"
MUTATIONS = {  # name: (file, text that occurs once in the file, its replacement)
    "none": ("cuda/conv/sm80/fprop_dgrad.cu", "", ""),
    "mma_sync_drops_a_tap": ("cuda/conv/sm80/fprop_dgrad.cu", "column < p.out_channels ? from",
                             "column < p.out_channels && tap != 0 ? from"),
    "mma_sync_shifts_the_halo": ("cuda/conv/sm80/fprop_dgrad_producers.cuh", " + at.residue;",
                                 " + at.residue + 1;"),
    "fprop_dgrad_replaces_low_parts": ("cuda/conv/sm90/fprop_dgrad/scheduler.cuh", "product == 0, product == 1",
                                       "false, product == 1"),
    "fprop_dgrad_stores_at_a_wrong_stride": ("cuda/conv/sm90/fprop_dgrad/epilogue.cuh", "to += 8 * stride;",
                                             "to += 7 * stride;"),
    "fprop_dgrad_drops_a_tap": ("cuda/conv/sm90/fprop_dgrad/kernel.cuh", "while (++i < taps);",
                                "while (++i + (taps > 1) < taps);"),
    "fprop_dgrad_shifts_the_halo": ("cuda/conv/sm90/fprop_dgrad/fprop_dgrad.cu", " + part[a]->residue);",
                                    " + part[a]->residue + 1);"),
    "fprop_dgrad_shortens_the_halo": ("cuda/conv/plan/sm90_fprop_dgrad.cpp", "plan.axis[a].max_span - 1 : 0);",
                                      "std::max(plan.axis[a].max_span - 2, 0) : 0);"),
    "fprop_dgrad_forgets_a_phase": ("cuda/conv/sm90/fprop_dgrad/scheduler.cuh", "p.merged ? p.phases :",
                                    "p.merged ? p.phases - 1 :"),
    "fprop_dgrad_forgets_a_tile_of_columns": ("cuda/conv/sm90/fprop_dgrad/scheduler.cuh", "column < p.unit_columns;",
                                              "column < p.unit_columns - (p.unit_columns > 1);"),
    "fprop_dgrad_repeats_a_tile_of_weights": ("cuda/conv/sm90/fprop_dgrad/kernel.cuh", "(unit.column * p.chunks +",
                                              "(0 * p.chunks +"),
    "fprop_dgrad_gives_a_cluster_one_tile": ("cuda/conv/sm90/fprop_dgrad/scheduler.cuh",
                                             "static_cast<int>(blockIdx.x) % 2;", "0;"),
    "fprop_dgrad_repeats_weights": ("cuda/conv/sm90/fprop_dgrad/fprop_dgrad.cu", "static_cast<uint16_t>(weight)}",
                                    "static_cast<uint16_t>(weight / 2 * 2)}"),
    "fprop_dgrad_releases_a_stage_early": ("cuda/conv/sm90/fprop_dgrad/kernel.cuh",
                                           "warpgroup_wait<1>();  // ", "// "),
    "store_vectors_exchanges_wrong_lanes": ("cuda/conv/common/store_vectors.cuh", "block >= kN8 - step",
                                            "block > kN8 - step"),
    "store_vectors_forgets_the_end_of_a_row": ("cuda/conv/common/store_vectors.cuh",
                                               "first * 8 < min(columns, kN8 * 8) - column)",
                                               "first * 8 < kN8 * 8 - column)"),
    "store_vectors_mixes_staged_rows": ("cuda/conv/common/store_vectors.cuh", "(lane % 4 ^ g / 2 % 4)",
                                        "(lane % 4 ^ g % 4)"),
    "fprop_dgrad_stores_at_wrong_offsets": ("cuda/conv/sm90/fprop_dgrad/epilogue.cuh", "offset = at.offset;",
                                            "offset = at.offset * (row % 16 < 8);"),
    "wgrad_adds_one_split_twice": ("cuda/conv/sm90/wgrad/epilogue.cuh", "in_cta(1 - rank, own)", "in_cta(rank, own)"),
    "wgrad_stores_a_wrong_tap": ("cuda/conv/sm90/wgrad/epilogue.cuh", "+ tap.offset;", "+ 0 * tap.offset;"),
    "depthwise_drops_a_tap": ("cuda/conv/direct/depthwise.cu", "kd < K; ++kd", "kd < K - 1; ++kd"),
    "depthwise_shifts_the_halo": ("cuda/conv/direct/depthwise.cu", "return begin * S - padding;",
                                  "return begin * S - padding + 1;"),
    "depthwise_forgets_the_start_of_a_chunk": ("cuda/conv/direct/depthwise.cu", "const bool all = first <= 0 &&",
                                               "const bool all ="),
    "depthwise_reads_a_plane_early": ("cuda/conv/direct/depthwise.cu", "8 * state.stage, state.round);",
                                      "8 * state.stage, state.round + 1);"),
    "depthwise_keeps_the_order_of_taps": ("cuda/conv/direct/depthwise.cu", "flipped ? -w.stride[a + 2]",
                                          "flipped ? w.stride[a + 2]"),
    "depthwise_mma_shifts_a_band": ("cuda/conv/direct/depthwise_mma.cu", "+ j - lane / 4 % 4;",
                                    "+ j - lane / 4 % 4 + i;"),
    "depthwise_mma_forgets_infinities": ("cuda/conv/direct/depthwise_mma.cuh", "return sum & 0x7fff7fff;",
                                         "return sum & 0x7fff;"),
    "depthwise_mma_wgrad_repeats_a_plane": ("cuda/conv/direct/depthwise_mma_wgrad.cu",
                                            "< static_cast<uint32_t>(y_planes))",
                                            "<= static_cast<uint32_t>(y_planes))"),
    "depthwise_mma_wgrad_mixes_rows": ("cuda/conv/direct/depthwise_mma_wgrad.cu", "pair / 2 * (128 + 8)",
                                       "pair / 2 * 128"),
    "gelu_backward_forgets_a_range": ("cuda/gelu.cu", "range < ranges;", "range < ranges - 1;"),
    "depthwise_wgrad_drops_a_tap": ("cuda/conv/direct/depthwise_wgrad.cu", "ky < 0 || ky >= K", "ky < 1 || ky >= K"),
    "depthwise_wgrad_forgets_a_patch": ("cuda/conv/direct/depthwise_wgrad.cu", "turn < patches", "turn < 1"),
    "multistage_wgrad_ignores_the_padding": ("cuda/conv/sm80/multistage_wgrad.cu", "vector_[i].offset), read);",
                                             "vector_[i].offset), inside);"),
    "multistage_wgrad_drops_the_last_voxel": ("cuda/conv/sm80/multistage_wgrad.cu", "+ row < last_voxel;",
                                              "+ row < last_voxel - 1;"),
    "multistage_wgrad_swaps_rows": ("cuda/conv/sm80/multistage_wgrad.cu", "16 * m + 2 * g + i;", "16 * m + 8 * i + g;"),
    "wgrad_drops_a_tap": ("cuda/conv/sm90/wgrad/epilogue.cuh", "tap != MTile::kNone &&", "tap != MTile::kNone && tap != 1 &&"),
    "wgrad_shifts_the_halo": ("cuda/conv/sm90/wgrad/wgrad.cu", " + part.residue);", " + part.residue + 1);"),
    "wgrad_shortens_the_halo": ("cuda/conv/plan/sm90_wgrad.cpp", "tile[a + 1] + span[a] - 1;",
                                "tile[a + 1] + std::max(span[a] - 2, 0);"),
    "wgrad_forgets_a_residue": ("cuda/conv/plan/sm90_wgrad.cpp", "w < axis[2].phases;",
                                "w < std::max(axis[2].phases - 1, 1);"),
    "wgrad_mixes_the_lines_of_octets": ("cuda/conv/plan/sm90_wgrad.cpp", "return run == 8 && tile[a] % 2 == 0;",
                                        "return run % 8 == 0;"),
    "fprop_dgrad_stores_behind_the_end": ("cuda/conv/sm90/fprop_dgrad/epilogue.cuh", "min(left, kMaxFpropDgradSide)",
                                          "min(left + 1, kMaxFpropDgradSide)"),
    "norm_forgets_a_part_of_the_sums": ("cuda/norm.cuh", "part == 0 && other < parts;", "part == 0 && other < parts - 1;"),
    "norm_forgets_the_residual": ("cuda/norm.cu", "u += x[1];", "u += 0;"),
    "wgrad_repeats_a_part": ("cuda/conv/sm90/wgrad/wgrad.cu", "p.parts[1] = {0, 1};", "p.parts[1] = {1, 0};"),
    "wgrad_does_not_split": ("cuda/conv/sm90/wgrad/operand.cu", "low = Float16(rest == rest ? rest : 0.0f);",
                             "low = Float16(0.0f * rest);"),
    "wgrad_forgets_a_scale": ("cuda/conv/common/wgrad_splits.h", " - scale_exponent(y_maximum)", ""),
    "wgrad_releases_a_stage_early": ("cuda/conv/sm90/wgrad/kernel.cuh",
                                     "warpgroup_wait<1>();  // ", "// "),
    "phases_as_channels_forgets_a_phase": ("cuda/conv/rewrites.cu", "(phase * channels * w.stride[1] +",
                                           "(phase / 2 * 2 * channels * w.stride[1] +"),
    "phases_as_channels_shifts_the_taps": ("cuda/conv/rewrites.cu", "first < 0 ? divide_up(-first, phases) : 0;",
                                           "0;"),
    "width_as_channels_forgets_a_bias": ("cuda/conv/rewrites.cu", "axis == 1 ? bias_.stride[0]",
                                         "axis == 1 && to.rank > 2 ? bias_.stride[0]"),
    "channels_last_copies_forget_the_result": ("cuda/conv/rewrites.cu", "target_ = out;", ""),
    "fprop_dgrad_omits_a_box_inside": ("cuda/conv/sm90/fprop_dgrad/scheduler.cuh", "first + p.box_depth <= 0;",
                                       "first + p.box_depth <= 1;"),
    "store_vectors_swaps_pairs": ("cuda/conv/common/store_vectors.cuh", "low = odd ? other[i / 2][i % 2] : low;",
                                  "low = odd ? low : other[i / 2][i % 2];"),
    "width_as_channels_shifts_the_padding": ("cuda/conv/rewrites.cu",
                                             "to.as<char>() + g.padding[2] * item_size(in.dtype);",
                                             "to.as<char>();"),
    "simt_drops_a_tap": ("cuda/conv/simt/fprop_dgrad.cu", "taps * problem.in_channels};",
                         "(taps - (taps > 1)) * problem.in_channels};"),
    "simt_wgrad_shifts_the_padding": ("cuda/conv/simt/wgrad.cu", "problem.stride[axis] - problem.padding[axis];",
                                      "problem.stride[axis] - problem.padding[axis] + 1;"),
    "small_channel_drops_a_tap": ("cuda/conv/direct/small_channel/epilogue.cuh", "tap < part.taps &&",
                                  "tap + 1 < part.taps &&"),
    "small_channel_shifts_the_halo": ("cuda/conv/direct/small_channel/producer.cuh", "* halo.step[2] + halo.low[2];",
                                      "* halo.step[2] + halo.low[2] + 1;"),
    "few_inputs_counts_a_tap_twice": ("cuda/conv/direct/few_inputs.cu", "!(word.repeats_tap && e == 0))", "true)"),
    "few_inputs_misses_the_first_pair": ("cuda/conv/direct/few_inputs.cuh", "if (x >= in.half_distance)",
                                         "if (x > in.half_distance)"),
    "few_inputs_wgrad_forgets_a_warp": ("cuda/conv/direct/few_inputs_wgrad.cu", "(turn > 0 ? total",
                                        "(turn > 1 ? total"),
    "few_outputs_takes_a_wrong_tap": ("cuda/conv/direct/few_outputs.cu", "first_tap - kStep + kDepth;",
                                      "first_tap - kStep + kDepth - 1;"),
    "few_outputs_keeps_old_sums": ("cuda/conv/direct/few_outputs.cu", "of_tap = 0;\n      });", "of_tap *= 0.5f;\n      });"),
    "few_outputs_forgets_the_bias": ("cuda/conv/direct/few_outputs.cu", "next_h, next_w, bias);",
                                     "next_h, next_w, 0 * bias);"),
    "mirrored_forgets_the_padding": ("cuda/conv/plan/rewrites.cpp", "dilation[a] - p.geometry.padding[a];",
                                     "dilation[a];"),
    "pointwise_swaps_voxels": ("cuda/conv/direct/pointwise.cu", "+ i % 4 / 2 * 8 + at.row) * narrow",
                               "+ (1 - i % 4 / 2) * 8 + at.row) * narrow"),
    "pointwise_forgets_a_channel": ("cuda/conv/direct/pointwise.cu", "if (i >= p.narrow.value()) break;\n    int",
                                    "if (i + 1 >= p.narrow.value()) break;\n    int"),
    "pointwise_drops_the_last_voxel": ("cuda/conv/direct/pointwise.cu", "lane + i * 32 < voxels * kNarrow ?",
                                       "lane + i * 32 < voxels * kNarrow - 1 ?"),
    "pointwise_forgets_a_group": ("cuda/conv/direct/pointwise.cu", "for (int s = 0; s < slices; ++s)",
                                  "for (int s = 0; s < std::max(slices - 1, 1); ++s)"),
    "planes_swap_voxels": ("cuda/conv/direct/pointwise_planes.cu", "row == 0 ? 0x5410", "row == 1 ? 0x5410"),
    "planes_mix_steps": ("cuda/conv/direct/pointwise_planes.cu", "(32 * kWords * kN8) * 16", "(32 * kWords * kN8) * 8"),
    "planes_mix_channels_of_results": ("cuda/conv/direct/pointwise_planes.cu", "swizzled(channel / 2, lane.vector)",
                                       "swizzled(channel % 2, lane.vector)"),
    "planes_wgrad_forgets_a_slice": ("cuda/conv/direct/pointwise_planes.cu", "s < slices; ++s", "s < 1; ++s"),
    "planes_wgrad_reads_behind_a_channel": ("cuda/conv/direct/pointwise_planes.cu", "voxel + next < p.voxels",
                                            "voxel + next <= p.voxels"),
    "merged_groups_keeps_old_weights": ("cuda/conv/rewrites.cu", "kernel::fill(w, 0);\n  kernel::copy(diagonal",
                                        "kernel::copy(diagonal"),
    "merged_groups_reads_beside_the_diagonal": ("cuda/conv/rewrites.cu", "by_groups(w, groups, count, in, in);",
                                                "by_groups(w, groups, count, in, in - 1);"),
    "scale_slices_forgets_a_block": ("cuda/conv/sm90/wgrad/operand.cu", "block < kCluster; ++block)",
                                     "block < kCluster - 1; ++block)"),
    "scale_slices_forgets_a_channel": ("cuda/conv/sm90/wgrad/operand.cu", "p.maxima[channel + j] = most[j];",
                                       "p.maxima[channel + j] = most[0];"),
    "no_rounding": ("cuda/conv/common/mma.cuh", 'asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));',
                    "bits = __float_as_uint(value);"),
    "wgrad_reads_unused_inputs": ("cuda/conv/plan/problem.cpp", "return std::clamp<int64_t>(last + 1, 0, p.in_size[axis]);",
                                  "return p.in_size[axis] + 0 * last;"),
}


def build(work, options):
    """Copies the sources to work/source and builds a test program for each mutation."""
    source, binary = work / "source", work / "build"
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout.split("\n")
    files = {source / name: ROOT / name for name in listed if (ROOT / name).is_file()}
    for stale in [path for path in source.rglob("*") if path.is_file() and path not in files]:
        stale.unlink()
    for to, original in files.items():  # copy only changed files, so that the build is incremental
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists() or to.read_bytes() != original.read_bytes():
            shutil.copy(original, to)
    subprocess.run(["cmake", "-S", source, "-B", binary, "-DCMAKE_BUILD_TYPE=Release", "-DVOXGRAD_CUDA=ON",
                    *options], check=True)
    for mutation, (name, was, becomes) in MUTATIONS.items():
        text = (source / name).read_text()
        if was and text.count(was) != 1:
            sys.exit(f"{mutation}: '{was}' occurs {text.count(was)} times in {name}, expected once")
        if was:
            (source / name).write_text(text.replace(was, becomes))
        subprocess.run(["cmake", "--build", binary, "--target", "cuda_tests", "--parallel",
                        str(os.cpu_count())], check=True)
        shutil.copy(binary / "tests/cuda_tests", work / mutation)
        if was:
            (source / name).write_text(text)


def run(work):
    """Runs all programs. Returns the mutations whose tests pass, and "none" if its tests fail."""
    programs = {mutation: subprocess.Popen([work / mutation, f"--gtest_filter={FILTER}", "--gtest_brief=1",
                                            "--gtest_fail_fast"],
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                for mutation in MUTATIONS}
    wrong = []
    for mutation, program in programs.items():
        try:
            output, _ = program.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            program.kill()
            output, _ = program.communicate()
        if program.returncode == 77:
            sys.exit("no GPU")
        failed = sorted({line.split()[3].rstrip(",") for line in output.splitlines()
                         if line.startswith("[  FAILED  ] Cuda")})
        print(f"{mutation}: exit status {program.returncode}, failed: {' '.join(failed) or 'none'}", flush=True)
        if (program.returncode == 0) != (mutation == "none"):
            wrong.append(mutation)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=pathlib.Path, help="folder for the sources, the build and the programs")
    parser.add_argument("--build", action="store_true", help="only build the programs")
    parser.add_argument("--run", action="store_true", help="only run the programs")
    parser.add_argument("--cmake", action="append", default=[], help="option for cmake; may be repeated")
    options = parser.parse_args()
    work = options.work.resolve()
    if options.build or not options.run:
        build(work, options.cmake)
    if options.run or not options.build:
        if wrong := run(work):
            sys.exit(f"unexpected test results: {' '.join(wrong)}")
        print("the tests detected every mutation")


if __name__ == "__main__":
    main()
