// Batches of samples, made by worker threads in an order that does not depend on their number.
#pragma once

#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>

#include "../../core/io/safetensors.h"
#include "../fields.h"
#include "dataset.h"
#include "sampler.h"

namespace voxgrad::data {

struct LoaderOptions {
  int64_t batch_size = 1;
  bool shuffle = false;
  /// A worker, a thread, makes whole batches, with loops that do not share out their work (parallel_for). 0: they are
  /// made in the calling thread, when they are asked for.
  int num_workers = 0;
  bool drop_last = false;       ///< leave out a last batch that is not full
  int64_t prefetch_factor = 2;  ///< finished batches that may wait, for each worker; 2^20 in all at most
  uint64_t seed = 0;            ///< of the order and of what get() draws
  /// Where batches are handed out; by default where they were made. To a GPU, workers copy them ahead, through
  /// page-locked memory and in a stream of their own, so that training does not wait for copies: finished batches wait
  /// there. Of samples that get() makes on the CPU.
  std::optional<Device> device{};
  /// In place of `shuffle`.
  std::shared_ptr<const Sampler> sampler{};
};

/// `for (auto [x, y] : loader)` is one epoch; the next loop is the next epoch, with another order and other
/// random numbers. What a worker throws, or an index outside of the dataset, is thrown at its batch, which counts as
/// handed out; leaving the loop early ends the workers.
/// One loop at a time.
class Loader : public nn::Stateful {
 public:
  /// Keeps a reference to `dataset`. Throws for options that make no sense.
  explicit Loader(const Dataset& dataset, const LoaderOptions& options = {});
  explicit Loader(const Dataset&& dataset, const LoaderOptions& options = {}) = delete;
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Batches in an epoch.
  int64_t size() const;
  /// The number of the epoch that is running or was left early, else of the next one.
  int64_t epoch() const;
  /// Makes the next loop epoch number `epoch`, from its start. Throws unless it lies in [0, 2^62].
  void set_epoch(int64_t epoch);

  /// The position: batches handed out so far count as done. Loaded into a loader with the same dataset and
  /// options, the next loop hands out what would have come next. load_state_dict throws if the state's seed, batch
  /// size, number of samples, drop_last or the name of its sampler are others. The last two are missing in states of
  /// earlier versions, and are not compared then.
  TensorMap state_dict() const override;

  class Epoch;
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Sample;
    using difference_type = std::ptrdiff_t;
    using pointer = const Sample*;
    using reference = const Sample&;

    Iterator() = default;  ///< the end
    explicit Iterator(Loader& loader);
    reference operator*() const { return batch_; }
    pointer operator->() const { return &batch_; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(const Iterator& other) const { return epoch_ == other.epoch_; }

   private:
    Loader* loader_ = nullptr;
    std::shared_ptr<Epoch> epoch_;
    Sample batch_;
  };

  /// Starts an epoch. Throws if an epoch has no batch, where PyTorch's loop ends silently: a program that counts
  /// steps would loop forever.
  Iterator begin() { return Iterator(*this); }
  Iterator end() { return {}; }

 private:
  struct Position {
    int64_t epoch = 0;
    int64_t batch = 0;
  };
  void read_state(const TensorMap& state, bool keep) override;
  /// Of all processes that share the sampler's epochs.
  int64_t global_batch_size() const { return options_.batch_size * sampler_->num_replicas(); }
  int64_t global_samples() const { return sampler_->size() * sampler_->num_replicas(); }
  /// Throws if the state was saved in another order.
  void check_order(const TensorMap& state) const;

  const Dataset& dataset_;
  LoaderOptions options_;
  std::shared_ptr<const Sampler> sampler_;
  Position position_;  ///< what comes next
  /// The loop that moves position_; null when the next one is to begin there.
  const Epoch* running_ = nullptr;
};

}  // namespace voxgrad::data
