// Tensor core products of a warpgroup (wgmma, sm_90a): 64 rows x 8 * kN8 columns x 8 words, with B in shared memory and
// A in shared memory or registers. Each of the four warps holds the accumulators of 16 rows, in the layout of the m16n8
// products of mma.cuh.
//
// Descriptors define the addresses and layouts of the operands: K-major, or, for halves only, M-major or N-major. The
// products run asynchronously. Until warpgroup_wait() returns, no thread may access the accumulators or write to the
// operands. Threads that write operands with ordinary stores must call fence_async_proxy() before the barrier that
// publishes the writes. Copies by TMA (tma.cuh) need no fence.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/conv/common/mma.cuh"

// Other architectures have no wgmma. For them, kernels that use it are compiled as empty functions and never launched.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VOXGRAD_HAS_WGMMA 1
#else
#define VOXGRAD_HAS_WGMMA 0
#endif

namespace voxgrad::cuda {

/// Returns a value that is equal in all lanes of a warp. The shuffle lets nvcc keep the value, and results that depend
/// on it, in uniform registers, from which wgmma takes its operands.
template <class T>
__device__ T warp_uniform(T value) {
  return __shfl_sync(0xffffffff, value, 0);
}

/// Returns true in the first lane of a warp. Call this function before products are queued, because an access to
/// threadIdx would wait for queued products.
__device__ inline bool is_leader() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane == 0;
}

/// Returns a descriptor whose address is `offset` times 16 bytes higher. Changes only the lower word.
__device__ inline uint64_t advance_slab(uint64_t descriptor, int offset) {
  return (descriptor & 0xffffffff00000000) | (static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(offset));
}

/// Makes earlier writes to registers visible to the following products.
__device__ inline void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most kPending of the committed groups are incomplete.
template <int kPending>
__device__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The operands of an instruction with N / 2 accumulators per thread.
#define VG_C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define VG_C8(i) VG_C4(i), VG_C4(i + 1)
#define VG_C16(i) VG_C8(i), VG_C8(i + 2)
#define VG_C32(i) VG_C16(i), VG_C16(i + 4)
#define VG_D4 "%0, %1, %2, %3"
#define VG_D8 VG_D4 ", %4, %5, %6, %7"
#define VG_D12 VG_D8 ", %8, %9, %10, %11"
#define VG_D16 VG_D12 ", %12, %13, %14, %15"
#define VG_D24 VG_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define VG_D32 VG_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define VG_D36 VG_D32 ", %32, %33, %34, %35"
#define VG_D48 VG_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define VG_D64                                                                         \
  VG_D32                                                                               \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define VG_D72 VG_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define VG_D80 VG_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define VG_D96 VG_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

// The supported widths, with the numbers of the operands that follow the accumulators.
#define VG_EACH_WIDTH(form, type, k, tail)                                                                      \
  form(type, k, tail, 16, VG_D8, "%8", "%9", "%10", "%11", "%12", "%13", VG_C8(0));                             \
  form(type, k, tail, 24, VG_D12, "%12", "%13", "%14", "%15", "%16", "%17", VG_C8(0), VG_C4(2));                \
  form(type, k, tail, 32, VG_D16, "%16", "%17", "%18", "%19", "%20", "%21", VG_C16(0));                         \
  form(type, k, tail, 48, VG_D24, "%24", "%25", "%26", "%27", "%28", "%29", VG_C16(0), VG_C8(4));               \
  form(type, k, tail, 64, VG_D32, "%32", "%33", "%34", "%35", "%36", "%37", VG_C32(0));                         \
  form(type, k, tail, 72, VG_D36, "%36", "%37", "%38", "%39", "%40", "%41", VG_C32(0), VG_C4(8));               \
  form(type, k, tail, 96, VG_D48, "%48", "%49", "%50", "%51", "%52", "%53", VG_C32(0), VG_C16(8));              \
  form(type, k, tail, 128, VG_D64, "%64", "%65", "%66", "%67", "%68", "%69", VG_C32(0), VG_C32(8));             \
  form(type, k, tail, 144, VG_D72, "%72", "%73", "%74", "%75", "%76", "%77", VG_C32(0), VG_C32(8), VG_C8(16));  \
  form(type, k, tail, 160, VG_D80, "%80", "%81", "%82", "%83", "%84", "%85", VG_C32(0), VG_C32(8), VG_C16(16)); \
  form(type, k, tail, 192, VG_D96, "%96", "%97", "%98", "%99", "%100", "%101", VG_C32(0), VG_C32(8), VG_C32(16));
#define VG_EACH_TYPE(form, halves_tail)                     \
  if constexpr (std::is_same_v<Element, float>) {           \
    VG_EACH_WIDTH(form, "tf32", "8", "")                    \
  } else if constexpr (std::is_same_v<Element, BFloat16>) { \
    VG_EACH_WIDTH(form, "bf16", "16", halves_tail)          \
  } else {                                                  \
    VG_EACH_WIDTH(form, "f16", "16", halves_tail)           \
  }

#define VG_WGMMA(type, k, tail, columns, D, A, b, adds)                                                               \
  "{.reg .pred p; setp.ne.b32 p, " adds ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k" k ".f32." type "." type \
  " {" D "}, " A ", " b ", p, 1, 1" tail ";}"
#define VG_A_SHARED(type, k, tail, columns, D, o0, o1, o2, o3, o4, o5, ...) \
  if constexpr (kN8 * 8 == columns)                                         \
  asm volatile(VG_WGMMA(type, k, tail, columns, D, o0, o1, o2)              \
               : __VA_ARGS__                                                \
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)))
#define VG_A_REGISTERS(type, k, tail, columns, D, o0, o1, o2, o3, o4, o5, ...)                 \
  if constexpr (kN8 * 8 == columns)                                                            \
  asm volatile(VG_WGMMA(type, k, tail, columns, D, "{" o0 ", " o1 ", " o2 ", " o3 "}", o4, o5) \
               : __VA_ARGS__                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))

/// Returns true if the macros above contain products of n8 blocks of 8 columns.
constexpr bool is_wgmma_width(int n8) {
  return n8 == 2 || n8 == 3 || n8 == 4 || n8 == 6 || n8 == 8 || n8 == 9 || n8 == 12 || n8 == 16 || n8 == 18 ||
         n8 == 20 || n8 == 24;
}

/// Queues c += A * B or, unless `adds`, c = A * B. Descriptors define A, with 64 rows, and B, with kN8 blocks of 8
/// columns. Elements of type float must already be rounded, because the hardware truncates to TF32. kMMajorA, kNMajorB
/// (halves only): the rows of A, or the columns of B, are contiguous in memory.
template <class Element, bool kMMajorA = false, bool kNMajorB = kMMajorA, int kN8>
__device__ void multiply_async(Accumulator (&c)[kN8], uint64_t a, uint64_t b, bool adds = true) {
  static_assert(is_wgmma_width(kN8) && (!kNMajorB || sizeof(Element) == 2) && (!kMMajorA || kNMajorB));
  if constexpr (!kMMajorA && kNMajorB) {
    VG_EACH_TYPE(VG_A_SHARED, ", 0, 1")
  } else if constexpr (kMMajorA) {
    VG_EACH_TYPE(VG_A_SHARED, ", 1, 1")
  } else {
    VG_EACH_TYPE(VG_A_SHARED, ", 0, 0")
  }
}
/// The same with the fragments of A in registers, in the layout of mma.cuh for the 16 rows of each warp.
template <class Element, int kN8>
__device__ void multiply_async(Accumulator (&c)[kN8], const uint32_t (&a)[4], uint64_t b, bool adds = true) {
  static_assert(is_wgmma_width(kN8));
  VG_EACH_TYPE(VG_A_REGISTERS, ", 0")
}
#undef VG_A_SHARED
#undef VG_A_REGISTERS
#undef VG_EACH_TYPE
#undef VG_EACH_WIDTH
#undef VG_WGMMA
#undef VG_C4
#undef VG_C8
#undef VG_C16
#undef VG_C32
#undef VG_D4
#undef VG_D8
#undef VG_D12
#undef VG_D16
#undef VG_D24
#undef VG_D32
#undef VG_D36
#undef VG_D48
#undef VG_D64
#undef VG_D72
#undef VG_D80
#undef VG_D96

}  // namespace voxgrad::cuda
