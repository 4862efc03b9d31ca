// A data loader. Worker threads create batches of samples. The order of the batches does not depend on the number of
// workers.
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

/// Options of Loader.
struct LoaderOptions {
  int64_t batch_size = 1;
  bool shuffle = false;  ///< visits the samples in a new random order in each epoch
  /// Number of worker threads. Each worker creates whole batches and runs parallel_for loops serially. 0: the calling
  /// thread creates each batch on request.
  int num_workers = 0;
  bool drop_last = false;  ///< skips the last batch of an epoch if it is not full
  /// Number of batches per worker that may be loaded ahead of the loop. num_workers * prefetch_factor must be at most
  /// 2^20.
  int64_t prefetch_factor = 2;
  uint64_t seed = 0;  ///< seed of the order and of the random numbers in get()
  /// Device of the returned batches, by default the device on which get() creates the samples. For a GPU, workers copy
  /// batches ahead of time through page-locked memory on a separate stream, so that training does not wait for the
  /// copies. Finished batches then occupy GPU memory, and get() should return CPU tensors.
  std::optional<Device> device{};
  /// Order of the samples. Cannot be combined with `shuffle`.
  std::shared_ptr<const Sampler> sampler{};
};

/// Loads batches of a dataset. `for (auto [x, y] : loader)` runs one epoch. The next loop runs the next epoch, with
/// different random numbers and, if `shuffle` is true, in a different order. If a worker throws, or if the sampler
/// returns an index outside of the dataset, the loop throws the exception at that batch, which then counts as loaded.
/// Leaving a loop early stops the workers. Only one loop may run at a time.
class Loader : public nn::Stateful, NonCopyable {
 public:
  /// Keeps a reference to `dataset`. Throws Error for invalid options.
  explicit Loader(const Dataset& dataset, const LoaderOptions& options = {});
  explicit Loader(const Dataset&& dataset, const LoaderOptions& options = {}) = delete;

  /// Returns the number of batches per epoch.
  int64_t size() const;
  /// Returns the number of the epoch that is running or was left early, otherwise the number of the next epoch.
  int64_t epoch() const { return position_.epoch; }
  /// Makes the next loop start epoch number `epoch`. Throws Error unless `epoch` lies in [0, 2^62].
  void set_epoch(int64_t epoch);

  /// Returns the position in the epoch. After a loader with the same dataset and options has loaded the state, its next
  /// loop continues with the next batch. load_state_dict throws Error if the seed, batch size, number of samples,
  /// drop_last or name of the sampler differ.
  TensorMap state_dict() const override;

  class Epoch;
  /// An input iterator over the batches of an epoch.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Sample;
    using difference_type = std::ptrdiff_t;
    using pointer = const Sample*;
    using reference = const Sample&;

    Iterator() = default;  ///< the end of an epoch
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

  /// Starts an epoch. Throws Error if an epoch has no batches. In PyTorch, a loop over an empty epoch ends silently,
  /// and a program that repeats epochs until it has counted enough steps never ends.
  Iterator begin() { return Iterator(*this); }
  Iterator end() { return {}; }

 private:
  /// The next batch to load.
  struct Position {
    int64_t epoch = 0;
    int64_t batch = 0;
  };
  void read_state(const TensorMap& state, bool keep) override;
  /// Returns the sum of the batch sizes of all processes that share an epoch.
  int64_t global_batch_size() const { return options_.batch_size * sampler_->num_replicas(); }
  /// Returns the number of samples per epoch, summed over all processes that share an epoch.
  int64_t global_samples() const { return sampler_->size() * sampler_->num_replicas(); }

  const Dataset& dataset_;
  LoaderOptions options_;
  std::shared_ptr<const Sampler> sampler_;
  Position position_;
  /// The epoch that advances position_. Null before the first loop, after a complete epoch, and after set_epoch() or
  /// read_state(): the next loop then starts at position_. If running_ is not null when a loop starts, the previous
  /// loop was left early, and the new loop starts the next epoch.
  const Epoch* running_ = nullptr;
};

}  // namespace voxgrad::data
