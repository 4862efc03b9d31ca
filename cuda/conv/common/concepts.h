// The requirements of the types that compose a tensor-core kernel, in CUTLASS's terms: a scheduler yields work units,
// producers fill stages of shared memory, and a mainloop multiplies their contents. The kernel templates of sm80/ and
// sm90/ are constrained by these concepts.
#pragma once

#include <concepts>
#include <cstdint>

namespace voxgrad::cuda {

/// A CTA tile: the compile-time parameters of a kernel.
template <class Tile>
concept KernelTile = Tile::kThreads % 32 == 0 && Tile::kThreads <= 1024;

/// The tile of a warp-specialized kernel: kConsumers warpgroups multiply in Sums, and one more warpgroup contains the
/// producers. The warpgroups exchange registers (setmaxnreg), of which an SM has 64 Ki.
template <class Tile>
concept WarpSpecializedTile =
    KernelTile<Tile> && Tile::kThreads == 128 * (Tile::kConsumers + 1) && Tile::kRegisters % 8 == 0 &&
    Tile::kProducerRegisters % 8 == 0 &&
    128 * (Tile::kConsumers * Tile::kRegisters + Tile::kProducerRegisters) <= 64 * 1024 && requires {
  typename Tile::Element;
  typename Tile::Sums;
};

/// The work that a static scheduler assigns to a CTA, given the number of the work unit.
template <class Unit, class Params>
concept ScheduledUnit = std::constructible_from<Unit, const Params&, int>;

/// A producer whose threads fill a stage of shared memory with operands.
template <class Producer>
concept StageProducer = requires {
  &Producer::stage;
};

/// A ring of stages: a producer acquires, commits and fills a stage; a consumer waits for it and releases it.
template <class Ring>
concept StageRing = requires(Ring& ring, int stage, uint32_t bytes) {
  { ring.stage() } -> std::same_as<int>;
  { ring.barrier() } -> std::same_as<uint32_t>;
  ring.acquire();
  ring.commit(bytes);
  ring.wait();
  ring.release(stage);
  ring.next();
};

/// A mainloop that adds the products of k-blocks to sums.
template <class Mainloop>
concept KBlockMainloop = requires {
  &Mainloop::multiply;
};

}  // namespace voxgrad::cuda
