// Matrix products with cuBLAS, which the first product loads.
//
// There is one cuBLAS handle per device. float32 products are computed in float32, or in TF32 if
// set_float32_precision() selects TF32. Products of halves (bf16, f16) are accumulated in float32. Each call passes its
// own workspace to cuBLAS. If cuBLAS used an internal workspace, the choice of the algorithm, and therefore the order
// of sums, could depend on other work that runs at the same time.
#include <cublas_v2.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "core/detail/shared_library.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/precision.h"
#include "cuda/detail/kernels.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {
namespace {

/// Bytes of workspace per call, the size that NVIDIA recommends for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;
/// Maximum number of matrices per call: the third axis of a grid has at most 65535 CTAs.
constexpr int64_t kMaxBatch = 65535;

/// The functions of cuBLAS. CMake defines VG_CUBLAS_FOLDER, the folder of the CUDA toolkit's libraries.
struct Cublas : SharedLibrary {
  Cublas()
      : SharedLibrary("matmul", concat("libcublas.so.", CUBLAS_VER_MAJOR), VG_CUBLAS_FOLDER,
                      concat("cuBLAS ", CUBLAS_VER_MAJOR, " (NVIDIA's package libcublas-", CUDART_VERSION / 1000, "-",
                             CUDART_VERSION % 1000 / 10, ")")) {}
  VG_LIBRARY_FUNCTION(cublasCreate_v2);
  VG_LIBRARY_FUNCTION(cublasGemmStridedBatchedEx_64);
  VG_LIBRARY_FUNCTION(cublasGetStatusName);
  VG_LIBRARY_FUNCTION(cublasGetStatusString);
  VG_LIBRARY_FUNCTION(cublasSetMathMode);
  VG_LIBRARY_FUNCTION(cublasSetStream_v2);
  VG_LIBRARY_FUNCTION(cublasSetWorkspace_v2);
};

const Cublas& cublas() {
  static const auto* functions = new Cublas;
  return *functions;
}

void check_blas(cublasStatus_t status, const char* what) {
  check(status == CUBLAS_STATUS_SUCCESS, "matmul", what, " failed: ", cublas().cublasGetStatusName(status), " (",
        cublas().cublasGetStatusString(status), ")");
}

/// A cuBLAS handle. It is never destroyed, because CUDA may be shut down first at the end of the process.
struct Handle {
  Handle() { check_blas(cublas().cublasCreate_v2(&blas), "cublasCreate"); }
  cublasHandle_t blas = nullptr;
  std::mutex mutex;  ///< held from setting the stream and the workspace until the product is queued
};

Handle& handle_of(const Launch& launch) {
  static auto* mutex = new std::mutex;
  static auto* handles = new std::map<int, Handle>;
  const std::lock_guard lock(*mutex);
  return (*handles)[launch.device];
}

/// A batch of matrices as an operand of multiply(). cuBLAS uses column-major order, so multiply() computes the
/// transposed product. `op` is CUBLAS_OP_N if the elements of a row are contiguous, and CUBLAS_OP_T if the elements of
/// a column are contiguous.
struct Operand {
  const void* data;
  cublasOperation_t op;
  int64_t leading;  ///< elements from one row (CUBLAS_OP_N) or column (CUBLAS_OP_T) to the next
  int64_t batch_stride;
};

/// Returns the operand for `x` (batch, rows, columns) without a copy, or nothing if cuBLAS does not support the
/// strides.
std::optional<Operand> operand_in_place(const View& x) {
  const int64_t rows = x.size[1], columns = x.size[2];
  const int64_t batch_stride = x.size[0] == 1 ? 0 : x.stride[0];
  if (batch_stride < 0) return {};
  // The stride of an axis of size 1 is arbitrary.
  const int64_t row_stride = rows == 1 ? columns : x.stride[1];
  const int64_t column_stride = columns == 1 ? rows : x.stride[2];
  if ((columns == 1 || x.stride[2] == 1) && row_stride >= columns)
    return Operand{x.data, CUBLAS_OP_N, row_stride, batch_stride};
  if ((rows == 1 || x.stride[1] == 1) && column_stride >= rows)
    return Operand{x.data, CUBLAS_OP_T, column_stride, batch_stride};
  return {};
}

/// Prepares the operand for a view of any strides. Copies the view if cuBLAS does not support the strides. Copies only
/// one matrix if the batch is broadcast (stride 0).
class PreparedOperand {
 public:
  PreparedOperand(const Launch& launch, const View& x) {
    if (const auto in_place = operand_in_place(x)) {
      operand = *in_place;
      return;
    }
    View source = x;
    if (x.stride[0] == 0) source.size[0] = 1;
    const int64_t matrix = x.size[1] * x.size[2];
    copy_.emplace(launch, static_cast<size_t>(source.numel() * item_size(x.dtype)));
    const View dense = dense_like(source, copy_->as<void>(), x.dtype);
    kernel::copy(dense, source);
    operand = {dense.data, CUBLAS_OP_N, x.size[2], source.size[0] == 1 ? 0 : matrix};
  }
  Operand operand{};

 private:
  std::optional<Workspace> copy_;
};

/// The cudaDataType_t of T.
template <class T>
inline constexpr cudaDataType_t kDataType = std::is_same_v<T, BFloat16>  ? CUDA_R_16BF
                                            : std::is_same_v<T, Float16> ? CUDA_R_16F
                                            : std::is_same_v<T, float>   ? CUDA_R_32F
                                                                         : CUDA_R_64F;

/// Computes c = a * b in one call per kMaxBatch matrices; `depth` is the number of columns of a.
template <class T>
void multiply(const Launch& launch, const View& c, const Operand& a, const Operand& b, int64_t depth) {
  const Cublas& blas = cublas();
  Handle& handle = handle_of(launch);
  const Workspace workspace(launch, kWorkspaceBytes);
  const std::lock_guard lock(handle.mutex);
  check_blas(blas.cublasSetStream_v2(handle.blas, launch.stream), "cublasSetStream");
  check_blas(blas.cublasSetWorkspace_v2(handle.blas, workspace.as<void>(), kWorkspaceBytes), "cublasSetWorkspace");
  const bool high = float32_precision() == Float32Precision::high;  // affects only float32
  const auto mode = (high ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH) |
                    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;  // affects only halves
  check_blas(blas.cublasSetMathMode(handle.blas, static_cast<cublasMath_t>(mode)), "cublasSetMathMode");
  const compute_t<T> one = 1, zero = 0;
  const auto compute = std::is_same_v<T, double> ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
  const int64_t rows = c.size[1], columns = c.size[2];
  const int64_t leading = rows == 1 ? columns : c.stride[1];
  for (int64_t start = 0; start < c.size[0]; start += kMaxBatch) {
    const int64_t batch = std::min(kMaxBatch, c.size[0] - start);
    // cuBLAS interprets a row-major buffer as the transposed matrix, so compute c^T = b^T a^T.
    check_blas(
        blas.cublasGemmStridedBatchedEx_64(
            handle.blas, b.op, a.op, columns, rows, depth, &one, static_cast<const T*>(b.data) + start * b.batch_stride,
            kDataType<T>, b.leading, b.batch_stride, static_cast<const T*>(a.data) + start * a.batch_stride,
            kDataType<T>, a.leading, a.batch_stride, &zero, c.as<T>() + start * c.stride[0], kDataType<T>, leading,
            c.stride[0], batch, compute, CUBLAS_GEMM_DEFAULT),
        "gemm");
  }
}

}  // namespace

void kernel::matmul(const View& c, const View& a, const View& b) {
  dispatch_cuda(Floats(), c.dtype, "matmul", [&]<class T>() {
    if (c.numel() == 0) return;
    if (a.size[2] == 0) return fill(c, 0);
    const Launch launch(c);
    const PreparedOperand left(launch, a), right(launch, b);
    multiply<T>(launch, c, left.operand, right.operand, a.size[2]);
  });
}

}  // namespace voxgrad::cuda
