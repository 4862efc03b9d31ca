/* C interface to the convolutions and normalizations of voxgrad, for other languages and frameworks.
 *
 * The caller owns all memory: it passes the address and the layout of each tensor, results included. The functions
 * allocate nothing that outlives the call. A function that computes on a GPU only queues work on the stream of the
 * context, and does not wait for this work.
 *
 * Every function that returns int returns VOXGRAD_OK or an error code. voxgrad_error() then returns the message. After
 * an error, the contents of the results are undefined.
 *
 * All functions may be called from several threads at the same time.
 */
#ifndef VOXGRAD_C_H
#define VOXGRAD_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VOXGRAD_API __attribute__((visibility("default")))

/* Version of this interface. It changes when a declaration in this file changes. */
#define VOXGRAD_C_VERSION 2

enum {
  VOXGRAD_OK = 0,
  VOXGRAD_INVALID = 1,       /* an argument is invalid, or the device or its kernel failed */
  VOXGRAD_OUT_OF_MEMORY = 2, /* memory ran out, or voxgrad_context.allocate returned NULL */
};

enum { VOXGRAD_F32 = 0, VOXGRAD_F64 = 1, VOXGRAD_BF16 = 2, VOXGRAD_F16 = 3 };

/* Size and memory layout of a tensor (N, C, D, H, W), or (C) for vectors. Images have D = 1. */
typedef struct voxgrad_layout {
  int32_t dtype;     /* VOXGRAD_F32, ... */
  int32_t device;    /* index of the GPU, or -1 for the CPU */
  int32_t rank;      /* 5 or 1 */
  int32_t reserved;  /* unused; set it to 0 */
  int64_t size[5];   /* elements along each axis */
  int64_t stride[5]; /* distance between neighbors along each axis, in elements */
} voxgrad_layout;

/* Settings of a call. */
typedef struct voxgrad_context {
  void* stream;    /* cudaStream_t of the GPU of the tensors; ignored for tensors on the CPU */
  int32_t threads; /* number of CPU threads; 0 keeps the current number */
  int32_t tf32;    /* 1: float32 convolutions on GPUs may use TF32; 0: they have the accuracy of float32 */
  /* These two functions allocate and free scratch memory on a GPU. If `allocate` is NULL, voxgrad uses its own
   * allocator. `allocate` returns `bytes` bytes, aligned to 512 bytes, or NULL if no memory is left. `deallocate`
   * receives the block before the call returns, while queued work may still use the block: only later work on `stream`
   * may reuse it. */
  void* (*allocate)(void* user, size_t bytes, int device, void* stream);
  void (*deallocate)(void* user, void* data, int device, void* stream);
  void* user; /* passed to both functions */
} voxgrad_context;

/* Geometry of a convolution along D, H and W. */
typedef struct voxgrad_conv {
  int64_t stride[3];
  int64_t padding[3];
  int64_t dilation[3];
  int64_t groups;
} voxgrad_conv;

/* In the following functions, each tensor is a pair of arguments: its layout and its address. x is (N, Cin, D, H, W),
 * weight is (Cout, Cin / groups, kD, kH, kW), y is (N, Cout, D', H', W'). All tensors have the same dtype and device.
 * Their strides are arbitrary. D' must be at least 1 and at most (D + 2 padding - dilation (kD - 1) - 1) / stride + 1,
 * rounded down; H' and W' follow the same rule. */

/* Computes y, the convolution of x with the weight, plus the bias (Cout) unless `bias` is NULL. */
VOXGRAD_API int voxgrad_conv_forward(const voxgrad_context* context, const voxgrad_conv* conv,
                                     const voxgrad_layout* y_layout, void* y, const voxgrad_layout* x_layout,
                                     const void* x, const voxgrad_layout* weight_layout, const void* weight,
                                     const voxgrad_layout* bias_layout, const void* bias);
/* Computes x, the transposed convolution of y with the weight, plus the bias (Cin) unless `bias` is NULL. If y is the
 * gradient of the result of voxgrad_conv_forward and there is no bias, x is the gradient of the input. */
VOXGRAD_API int voxgrad_conv_transpose(const voxgrad_context* context, const voxgrad_conv* conv,
                                       const voxgrad_layout* x_layout, void* x, const voxgrad_layout* y_layout,
                                       const void* y, const voxgrad_layout* weight_layout, const void* weight,
                                       const voxgrad_layout* bias_layout, const void* bias);
/* Computes the gradient of the weight of voxgrad_conv_forward from x and y, the gradient of the result. */
VOXGRAD_API int voxgrad_conv_weight(const voxgrad_context* context, const voxgrad_conv* conv,
                                    const voxgrad_layout* weight_layout, void* weight, const voxgrad_layout* x_layout,
                                    const void* x, const voxgrad_layout* y_layout, const void* y);
/* Computes the gradient of the bias: the sums of y, the gradient of the result, over all axes except C. `bias` is (C)
 * and has the dtype of y. */
VOXGRAD_API int voxgrad_conv_bias(const voxgrad_context* context, const voxgrad_layout* bias_layout, void* bias,
                                  const voxgrad_layout* y_layout, const void* y);

enum { VOXGRAD_NONE = 0, VOXGRAD_RELU = 1, VOXGRAD_LEAKY_RELU = 2, VOXGRAD_GELU = 3, VOXGRAD_SILU = 4 };

/* A group norm between two activations: y = after((before(x) - mean) * rstd * weight + bias). mean is the mean of
 * before(x) over a group of C / groups channels of one sample, and rstd is 1 / sqrt(variance + eps) of this group. With
 * groups = C, the operation is an instance norm. */
typedef struct voxgrad_norm {
  int64_t groups;
  double eps;
  int32_t before;      /* VOXGRAD_NONE, ... */
  int32_t after;       /* VOXGRAD_NONE, ... */
  double before_slope; /* slope if `before` is VOXGRAD_LEAKY_RELU */
  double after_slope;  /* slope if `after` is VOXGRAD_LEAKY_RELU */
} voxgrad_norm;

/* Computes y from x (N, C, D, H, W). x and y have the same size, dtype and strides: contiguous or channels-last. weight
 * and bias are (C) or NULL. They have the dtype of x; if x is bf16 or f16, they may be f32. Writes the mean and rstd of
 * each group to `statistics`: 2 * N * groups doubles, aligned to 16 bytes, on the device of x. */
VOXGRAD_API int voxgrad_norm_forward(const voxgrad_context* context, const voxgrad_norm* norm,
                                     const voxgrad_layout* layout, void* y, const void* x, double* statistics,
                                     const voxgrad_layout* weight_layout, const void* weight,
                                     const voxgrad_layout* bias_layout, const void* bias);
/* Computes the gradients of voxgrad_norm_forward from dy, the gradient of y. dy has the size, dtype and device of x and
 * any strides. dx has the layout of x; dweight and dbias have the layouts of weight and bias. Also computes dadded (C),
 * the sums of dx over all axes except C: the gradient of a bias that x already includes. dadded is f64 if x is f64,
 * otherwise f32. dweight, dbias and dadded may be NULL. */
VOXGRAD_API int voxgrad_norm_backward(const voxgrad_context* context, const voxgrad_norm* norm,
                                      const voxgrad_layout* layout, void* dx, void* dweight, void* dbias, void* dadded,
                                      const voxgrad_layout* dy_layout, const void* dy, const void* x,
                                      const double* statistics, const voxgrad_layout* weight_layout, const void* weight,
                                      const voxgrad_layout* bias_layout, const void* bias);

/* Returns the message of the last error on this thread: operation, cause and expectation. The pointer is valid until
 * the next error on this thread. */
VOXGRAD_API const char* voxgrad_error(void);
/* Returns the version of voxgrad, such as "0.1.0". */
VOXGRAD_API const char* voxgrad_version(void);
/* Returns VOXGRAD_C_VERSION of the library. */
VOXGRAD_API int voxgrad_c_version(void);
/* Returns 1 if the library was built with CUDA kernels, otherwise 0. */
VOXGRAD_API int voxgrad_has_cuda(void);
/* Returns 1 if the processor supports the instructions for which the library was compiled, otherwise 0. */
VOXGRAD_API int voxgrad_supports_cpu(void);

#ifdef __cplusplus
}
#endif

#endif
