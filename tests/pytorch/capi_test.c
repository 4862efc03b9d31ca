/* Calls the C interface from C: values, layouts and the texts of errors. Prints the first failed check. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "voxgrad_c.h"

#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s fails, last error: %s\n", __LINE__, #condition, voxgrad_error()); \
      exit(1);                                                                                       \
    }                                                                                                \
  } while (0)

/* Checks that a call fails with `code` and a message that contains `text`. */
#define CHECK_ERROR(call, code, text)               \
  do {                                              \
    CHECK((call) == (code));                        \
    CHECK(strstr(voxgrad_error(), (text)) != NULL); \
  } while (0)

/* Returns the layout of a contiguous tensor (N, C, D, H, W) of f32 on the CPU. */
static voxgrad_layout volume(int64_t n, int64_t c, int64_t d, int64_t h, int64_t w) {
  voxgrad_layout layout = {.dtype = VOXGRAD_F32, .device = -1, .rank = 5, .size = {n, c, d, h, w}};
  int64_t stride = 1;
  for (int axis = 4; axis >= 0; --axis) {
    layout.stride[axis] = stride;
    stride *= layout.size[axis];
  }
  return layout;
}

static voxgrad_layout vector(int64_t c) {
  const voxgrad_layout layout = {.dtype = VOXGRAD_F32, .device = -1, .rank = 1, .size = {c}, .stride = {1}};
  return layout;
}

static const voxgrad_context kContext = {.threads = 1};
static const voxgrad_conv kConv = {.stride = {1, 1, 1}, .dilation = {1, 1, 1}, .groups = 1};

/* A kernel of 1 x 1 x 2 ones computes the sums of neighbors along W. */
static void test_convolution(void) {
  const voxgrad_layout x_layout = volume(1, 1, 1, 2, 3), weight_layout = volume(1, 1, 1, 1, 2),
                       y_layout = volume(1, 1, 1, 2, 2), bias_layout = vector(1);
  const float x[] = {1, 2, 3, 4, 5, 6}, weight[] = {1, 1}, bias[] = {10};
  float y[4], dx[6], dweight[2], dbias[1];
  CHECK(voxgrad_conv_forward(&kContext, &kConv, &y_layout, y, &x_layout, x, &weight_layout, weight, &bias_layout,
                             bias) == VOXGRAD_OK);
  CHECK(y[0] == 13 && y[1] == 15 && y[2] == 19 && y[3] == 21);
  CHECK(voxgrad_conv_transpose(&kContext, &kConv, &x_layout, dx, &y_layout, y, &weight_layout, weight, NULL, NULL) ==
        VOXGRAD_OK);
  CHECK(dx[0] == 13 && dx[1] == 28 && dx[2] == 15 && dx[3] == 19 && dx[4] == 40 && dx[5] == 21);
  CHECK(voxgrad_conv_weight(&kContext, &kConv, &weight_layout, dweight, &x_layout, x, &y_layout, y) == VOXGRAD_OK);
  CHECK(dweight[0] == 13 * 1 + 15 * 2 + 19 * 4 + 21 * 5 && dweight[1] == 13 * 2 + 15 * 3 + 19 * 5 + 21 * 6);
  CHECK(voxgrad_conv_bias(&kContext, &bias_layout, dbias, &y_layout, y) == VOXGRAD_OK);
  CHECK(dbias[0] == 68);

  /* The same input with the rows in reverse order. */
  voxgrad_layout reversed = x_layout;
  reversed.stride[3] = -3;
  CHECK(voxgrad_conv_forward(&kContext, &kConv, &y_layout, y, &reversed, x + 3, &weight_layout, weight, NULL, NULL) ==
        VOXGRAD_OK);
  CHECK(y[0] == 9 && y[1] == 11 && y[2] == 3 && y[3] == 5);
}

static void test_normalization(void) {
  const voxgrad_norm norm = {.groups = 2, .after = VOXGRAD_RELU};
  const voxgrad_layout layout = volume(1, 2, 1, 1, 2);
  const float x[] = {1, 3, 5, 9};
  float y[4], dx[4];
  double statistics[4];
  CHECK(voxgrad_norm_forward(&kContext, &norm, &layout, y, x, statistics, NULL, NULL, NULL, NULL) == VOXGRAD_OK);
  CHECK(statistics[0] == 2 && statistics[1] == 1 && statistics[2] == 7 && statistics[3] == 0.5);
  CHECK(y[0] == 0 && y[1] == 1 && y[2] == 0 && y[3] == 1);

  /* dy is a part of a larger tensor, whose other elements are NaN. */
  const float dy[] = {NAN, NAN, 0, 1, NAN, NAN, 0, 2};
  voxgrad_layout dy_layout = layout;
  dy_layout.stride[1] = 4;
  CHECK(voxgrad_norm_backward(&kContext, &norm, &layout, dx, NULL, NULL, NULL, &dy_layout, dy + 2, x, statistics, NULL,
                              NULL, NULL, NULL) == VOXGRAD_OK);
  for (int i = 0; i < 4; ++i) CHECK(fabsf(dx[i]) < 1e-6F); /* two normalized values do not depend on the input */
}

static void test_errors(void) {
  const voxgrad_layout x_layout = volume(1, 2, 1, 2, 3), weight_layout = volume(1, 1, 1, 1, 2),
                       y_layout = volume(1, 1, 1, 2, 2);
  float x[12] = {0}, weight[2] = {0}, y[4];
#define FORWARD(context, conv, y_layout, x_layout, x) \
  voxgrad_conv_forward(context, conv, y_layout, y, x_layout, x, &weight_layout, weight, NULL, NULL)
  CHECK_ERROR(FORWARD(&kContext, &kConv, &y_layout, &x_layout, x), VOXGRAD_INVALID,
              "conv_forward: batch, channels and groups do not match (x [1, 2, 1, 2, 3], weight [1, 1, 1, 1, 2]");
  voxgrad_layout one = volume(1, 1, 1, 2, 3), other = volume(1, 1, 1, 2, 3);
  CHECK_ERROR(FORWARD(&kContext, &kConv, &other, &one, x), VOXGRAD_INVALID, "y must have 1 to 2 elements along axis 4");
  CHECK_ERROR(FORWARD(NULL, &kConv, &y_layout, &one, x), VOXGRAD_INVALID, "context is NULL");
  CHECK_ERROR(FORWARD(&kContext, NULL, &y_layout, &one, x), VOXGRAD_INVALID, "conv is NULL");
  CHECK_ERROR(FORWARD(&kContext, &kConv, &y_layout, NULL, x), VOXGRAD_INVALID, "x has no layout");
  CHECK_ERROR(FORWARD(&kContext, &kConv, &y_layout, &one, NULL), VOXGRAD_INVALID, "x has no data");
  other = one;
  other.dtype = 4;
  CHECK_ERROR(FORWARD(&kContext, &kConv, &y_layout, &other, x), VOXGRAD_INVALID, "x has the unknown dtype 4");
  other.dtype = VOXGRAD_F64;
  CHECK_ERROR(FORWARD(&kContext, &kConv, &y_layout, &other, x), VOXGRAD_INVALID,
              "weight is f32 on cpu, x is f64 on cpu");
  other = one;
  other.rank = 4;
  CHECK_ERROR(FORWARD(&kContext, &kConv, &y_layout, &other, x), VOXGRAD_INVALID, "x must have 1 or 5 axes, got 4");
  voxgrad_conv conv = kConv;
  conv.stride[1] = 0;
  CHECK_ERROR(FORWARD(&kContext, &conv, &y_layout, &one, x), VOXGRAD_INVALID,
              "stride 0, padding 0 or dilation 1 of axis 1");
  CHECK(FORWARD(&kContext, &kConv, &y_layout, &one, x) == VOXGRAD_OK);

  voxgrad_norm norm = {.groups = 3};
  double statistics[6];
#define NORM(layout) voxgrad_norm_forward(&kContext, &norm, layout, y, x, statistics, NULL, NULL, NULL, NULL)
  CHECK_ERROR(NORM(&x_layout), VOXGRAD_INVALID, "groups 3 does not divide the channels of x [1, 2, 1, 2, 3]");
  norm.groups = 1;
  norm.eps = -1;
  CHECK_ERROR(NORM(&x_layout), VOXGRAD_INVALID, "eps must not be negative, got -1");
  norm.eps = 0;
  norm.after = 5;
  CHECK_ERROR(NORM(&x_layout), VOXGRAD_INVALID, "the activation 5 is unknown");
  norm.after = VOXGRAD_NONE;
  other = x_layout;
  other.stride[1] = 7;
  CHECK_ERROR(NORM(&other), VOXGRAD_INVALID, "x must be contiguous or channels-last");
  CHECK_ERROR(voxgrad_norm_backward(&kContext, &norm, &x_layout, y, NULL, NULL, NULL, &one, y, x, statistics, NULL,
                                    NULL, NULL, NULL),
              VOXGRAD_INVALID, "norm_backward: dy must have the size of x");
  if (!voxgrad_has_cuda()) {
    other = one;
    other.device = 0;
    CHECK(FORWARD(&kContext, &kConv, &y_layout, &other, x) == VOXGRAD_INVALID);
  }
}

int main(void) {
  CHECK(voxgrad_c_version() == VOXGRAD_C_VERSION);
  CHECK(voxgrad_supports_cpu() == 1);
  CHECK(strchr(voxgrad_version(), '.') != NULL);
  CHECK(strcmp(voxgrad_error(), "") == 0);
  test_convolution();
  test_normalization();
  test_errors();
  return 0;
}
