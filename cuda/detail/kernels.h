// The CUDA side of the device contract: one function for each entry of struct Kernels (ops/detail/kernels.h), of the
// same name and signature. cuda/table.cpp puts them into the table.
#pragma once

#include <type_traits>
#include <utility>

#include "ops/detail/kernels.h"

namespace voxgrad::cuda::kernel {

/// The function type of a table entry: what is declared with it cannot drift from the contract.
template <auto entry>
using Signature = std::remove_pointer_t<std::remove_reference_t<decltype(std::declval<Kernels&>().*entry)>>;

// copy.cu
Signature<&Kernels::copy> copy;
Signature<&Kernels::fill> fill;
Signature<&Kernels::arange> arange;
// unary.cu, binary.cu
Signature<&Kernels::unary> unary;
Signature<&Kernels::binary> binary;
Signature<&Kernels::where> where;
// random.cu
Signature<&Kernels::uniform> uniform;
Signature<&Kernels::normal> normal;
// reduce.cu, softmax.cu
Signature<&Kernels::reduce> reduce;
Signature<&Kernels::argmax> argmax;
Signature<&Kernels::softmax> softmax;
// cumsum.cu, sort.cu
Signature<&Kernels::cumsum> cumsum;
Signature<&Kernels::sort> sort;
// blas.cpp
Signature<&Kernels::matmul> matmul;
// conv/conv.cu
Signature<&Kernels::conv_forward> conv_forward;
Signature<&Kernels::conv_backward_data> conv_backward_data;
Signature<&Kernels::conv_backward_weight> conv_backward_weight;
// conv/explain.cpp
Signature<&Kernels::explain_conv> explain_conv;
// loss.cu
Signature<&Kernels::class_sums> class_sums;
Signature<&Kernels::class_sums_backward> class_sums_backward;
// norm.cu, norm_backward.cu, relu_bias.cu
Signature<&Kernels::group_norm> group_norm;
Signature<&Kernels::normalize> normalize;
Signature<&Kernels::group_norm_backward> group_norm_backward;
Signature<&Kernels::track_statistics> track_statistics;
Signature<&Kernels::prelu> prelu;
Signature<&Kernels::prelu_backward> prelu_backward;
Signature<&Kernels::relu_bias_backward> relu_bias_backward;
// pooling and resampling
Signature<&Kernels::max_pool> max_pool;
Signature<&Kernels::max_pool_backward> max_pool_backward;
Signature<&Kernels::resample> resample;
Signature<&Kernels::grid_sample> grid_sample;
Signature<&Kernels::grid_sample_backward> grid_sample_backward;
// gather.cu
Signature<&Kernels::gather> gather;
Signature<&Kernels::scatter_add> scatter_add;
// optim.cu
Signature<&Kernels::step> step;
Signature<&Kernels::sum_of_squares> sum_of_squares;

}  // namespace voxgrad::cuda::kernel
