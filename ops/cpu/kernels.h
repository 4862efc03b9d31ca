// The CPU's side of the device contract: one function for each entry of Kernels, documented there.
// The table that lists them is ops/cpu/table.cpp.
#pragma once

#include "ops/detail/kernels.h"

namespace voxgrad::cpu {

// copy.cpp
void copy(const View& out, const View& in);
void fill(const View& out, double value);
void arange(const View& out, double start, double step);

// elementwise.cpp
void unary(UnaryOp op, const View& out, const View& in, double a, double b);
void binary(BinaryOp op, const View& out, const View& x, const View& y, double a, double b);
void where(const View& out, const View& condition, const View& x, const View& y);

// random.cpp
void uniform(const View& out, GeneratorState state);
void normal(const View& out, GeneratorState state);

// reduce.cpp, softmax.cpp
void reduce(ReduceOp op, const View& out, const View& in);
void softmax(const View& y, const View& x, int axis, bool logarithm);

// lines.cpp
void cumsum(const View& out, const View& in, int axis, bool reverse);
void argmax(const View& index, const View& in, int axis, bool largest);
void sort(const View& index, const View& in, int axis, bool descending);

// matmul.cpp
void matmul(const View& c, const View& a, const View& b);

// conv*.cpp
void conv_forward(const View& y, const View& x, const View& w, const ConvEpilogue& epilogue,
                  const ConvGeometry& geometry);
void conv_backward_data(const View& x, const View& y, const View& w, const ConvEpilogue& epilogue,
                        const ConvGeometry& geometry);
void conv_backward_weight(const View& w, const View& x, const View& y, const ConvGeometry& geometry);
ConvExplanation explain_conv(ConvPass pass, const View& x, const View& w, const View& y, const ConvGeometry& geometry);

// loss.cpp
void class_sums(const char* op, const View& sums, const View& x, const View& target, const ClassSums& options);
void class_sums_backward(const View& dx, const View& grad, const View& x, const View& target, const ClassSums& options);

// norm.cpp
void normalize(const View& y, const View& x, const View& mean, const View& rstd, const View* gamma, const View* beta);
void group_norm(const View& y, const View& mean, const View& rstd, const View& x, const View* gamma, const View* beta,
                double eps, const NormActivations& activations, const OverRanks* over_ranks);
void group_norm_backward(const GroupNormGradients& out, const View& dy, const View& x, const View& mean,
                         const View& rstd, const View* gamma, const View* beta, const NormActivations& activations,
                         const OverRanks* over_ranks);
void track_statistics(const View* running_mean, const View* running_var, const View& mean, const View& rstd, double eps,
                      double count, const View* counts, double momentum);
void prelu(const View& y, const View& x, const View& weight);
void prelu_backward(const View& dx, const View& dweight, const View& dy, const View& x, const View& weight);
void relu_bias_backward(const View& dz, const View& dbias, const View& dy, const View& y);

// pool.cpp, resample.cpp
void max_pool(const View& y, const View* indices, const View& x, const PoolGeometry& geometry);
void max_pool_backward(const View& dx, const View& dy, const View& indices, const PoolGeometry& geometry);
void resample(const View& out, const View& in, const ResampleMaps& maps, bool transposed);

// grid_sample.cpp
void grid_sample(const View& y, const View& x, const View& grid, const GridSampleOptions& how);
void grid_sample_backward(const View* dx, const View* dgrid, const View& dy, const View& x, const View& grid,
                          const GridSampleOptions& how);

// gather.cpp
void gather(const char* op, const View& out, const View& in, const View& index, int axis);
void scatter_add(const char* op, const View& out, const View& in, const View& index, int axis);

// optim.cpp
void step(const char* op, std::span<const StepViews> params, const AnyStep& step, const StepGate& gate);
void sum_of_squares(const View& out, std::span<const View> list);

}  // namespace voxgrad::cpu
