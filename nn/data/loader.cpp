// Implements the data loader and its worker threads.
#include "nn/data/loader.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stop_token>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/autograd.h"
#include "core/detail/philox.h"
#include "core/thread_pool.h"
#include "cuda/cuda.h"
#include "ops/create.h"
#include "ops/shape.h"

namespace voxgrad::data {
namespace {

constexpr const char* kOp = "data::Loader";
constexpr int64_t kMaxEpoch = int64_t{1} << 62;  // so small that incrementing an epoch cannot overflow
constexpr int64_t kMaxQueue = 1 << 20;           // batches

/// Stacks the inputs or the targets of a batch. Throws if their shapes or dtypes differ.
Tensor stack_samples(const Tensors& tensors, const char* name) {
  for (const Tensor& tensor : tensors) {
    const bool alike =
        tensor.defined() == tensors[0].defined() &&
        (!tensor.defined() || (tensor.shape() == tensors[0].shape() && tensor.dtype() == tensors[0].dtype()));
    check(alike, kOp, "the ", name, "s of a batch differ: ", describe(tensors[0]), " and ", describe(tensor));
  }
  return tensors[0].defined() ? stack(tensors) : Tensor();
}

}  // namespace

/// A running epoch. Workers claim batches in order and store them in slots. The consumer, which is the thread that runs
/// the loop over the loader, takes the batches from the slots in order. At most slots_.size() batches are claimed and
/// not yet taken, so each claimed batch has its own slot. A worker can therefore deliver a batch or an exception
/// without allocating memory.
class Loader::Epoch : NonCopyable {
 public:
  Epoch(const Loader& loader, Sampler::Order order)
      : dataset_(loader.dataset_),
        options_(loader.options_),
        order_(std::move(order)),
        samples_(loader.sampler_->size()),
        number_(loader.position_.epoch),
        batches_(loader.size()),
        taken_(loader.position_.batch),
        claimed_(taken_),
        slots_(static_cast<size_t>(std::min(options_.num_workers * options_.prefetch_factor, batches_ - taken_))) {
    if (!slots_.empty() && options_.device && options_.device->is_cuda()) stream_.emplace(options_.device->index);
    try {
      for (int i = 0; i < options_.num_workers && i < batches_ - taken_; ++i)
        workers_.emplace_back([this](const std::stop_token& stop) { work(stop); });
    } catch (const std::system_error& error) {
      fail(kOp, "thread ", workers_.size() + 1, " of ", options_.num_workers, " cannot be started: ", error.what());
    }
  }
  ~Epoch() {  // stops all workers before the first one is joined
    for (std::jthread& worker : workers_) worker.request_stop();
  }

  int64_t number() const { return number_; }
  bool finished() const { return taken_ == batches_; }

  /// Returns the next batch. finished() must be false.
  Sample next() {
    if (workers_.empty()) return on_device(make_batch(taken_++));
    std::unique_lock lock(mutex_);
    Slot& slot = slot_of(taken_);
    ready_.wait(lock, [&] { return slot.ready; });
    Slot result = std::exchange(slot, {});
    ++taken_;
    lock.unlock();
    free_.notify_one();
    if (result.error) std::rethrow_exception(result.error);
    if (result.copied) result.copied->wait();
    return std::move(result.batch);
  }

 private:
  /// A finished batch or the exception of its worker.
  struct Slot {
    Sample batch;
    std::unique_ptr<cuda::Event> copied;  // recorded after the copy to the GPU; null without a copy
    std::exception_ptr error;
    bool ready = false;
  };
  Slot& slot_of(int64_t batch) { return slots_[static_cast<size_t>(batch) % slots_.size()]; }

  /// The loop of a worker thread.
  void work(const std::stop_token& stop) {
    const SerialGuard serial;
    std::unique_lock lock(mutex_);
    while (true) {
      free_.wait(lock, stop, [&] { return claimed_ == batches_ || claimed_ - taken_ < std::ssize(slots_); });
      if (stop.stop_requested() || claimed_ == batches_) return;
      const int64_t batch = claimed_++;
      Slot& slot = slot_of(batch);  // only this thread modifies the slot until slot.ready is set
      lock.unlock();
      try {
        fill(slot, batch);
      } catch (...) {
        slot.error = std::current_exception();
      }
      lock.lock();
      slot.ready = true;
      if (batch == taken_) ready_.notify_one();
    }
  }

  /// Creates a batch and copies it to the device. The memory of the copy belongs to stream_: when the consumer frees
  /// this memory, the allocator reuses it on stream_.
  void fill(Slot& slot, int64_t batch) const {
    const Sample made = make_batch(batch);
    std::optional<cuda::StreamGuard> guard;
    if (stream_) guard.emplace(*stream_);
    slot.batch = on_device(made);
    if (!stream_) return;
    slot.copied = std::make_unique<cuda::Event>(stream_->device());
    slot.copied->record();
  }

  Sample on_device(const Sample& batch) const {
    if (!options_.device) return batch;
    return {batch.input.to(*options_.device),
            batch.target.defined() ? batch.target.to(*options_.device) : batch.target};
  }

  Sample make_batch(int64_t batch) const {
    NoGradGuard no_grad;
    const int64_t begin = batch * options_.batch_size;
    const int64_t count = std::min(options_.batch_size, samples_ - begin);
    Tensors inputs, targets;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = order_(begin + i);
      check(index >= 0 && index < dataset_.size(), kOp, "the sampler returned index ", index,
            ", but the size of the dataset is ", dataset_.size());
      Generator random(derived_seed(options_.seed, number_, index));
      Sample sample = dataset_.get(index, random);
      check(sample.input.defined(), kOp, "the input of sample ", index, " is undefined");
      inputs.push_back(std::move(sample.input));
      targets.push_back(std::move(sample.target));
    }
    return {stack_samples(inputs, "input"), stack_samples(targets, "target")};
  }

  const Dataset& dataset_;
  const LoaderOptions options_;
  const Sampler::Order order_;
  const int64_t samples_;  // samples per epoch
  const int64_t number_;   // number of the epoch
  const int64_t batches_;  // batches per epoch
  int64_t taken_;          // batches that the consumer has taken
  int64_t claimed_;        // batches that workers have started
  std::vector<Slot> slots_;
  std::optional<cuda::Stream> stream_;  // for copies to the GPU
  std::mutex mutex_;
  std::condition_variable ready_;     // signaled to the consumer when the next batch is ready
  std::condition_variable_any free_;  // signaled to a worker when a slot becomes free
  std::vector<std::jthread> workers_;
};

Loader::Loader(const Dataset& dataset, const LoaderOptions& options)
    : dataset_(dataset), options_(options), sampler_(options.sampler) {
  check(options.batch_size > 0, kOp, "batch_size must be positive, got ", options.batch_size);
  check(options.num_workers >= 0 && options.num_workers <= 1024, kOp, "num_workers must lie in [0, 1024], got ",
        options.num_workers);
  check(options.prefetch_factor > 0 && options.prefetch_factor <= kMaxQueue / std::max(options.num_workers, 1), kOp,
        "prefetch_factor must lie in [1, 2^20 / num_workers], got ", options.prefetch_factor,
        " with num_workers = ", options.num_workers);
  if (options.device) runtime(*options.device).require(options.device->index);
  check(!(options.shuffle && options.sampler), kOp, "shuffle and sampler cannot be combined");
  if (sampler_) {
    sampler_->check_batch_size(options.batch_size);
    return;
  }
  if (options.shuffle)
    sampler_ = std::make_shared<RandomSampler>(dataset.size(), options.seed);
  else
    sampler_ = std::make_shared<SequentialSampler>(dataset.size());
}

int64_t Loader::size() const {
  const int64_t samples = sampler_->size();
  return options_.drop_last ? samples / options_.batch_size
                            : samples / options_.batch_size + (samples % options_.batch_size != 0);
}

void Loader::set_epoch(int64_t epoch) {
  check(epoch >= 0 && epoch <= kMaxEpoch, kOp, "the epoch must lie in [0, 2^62], got ", epoch);
  position_ = {epoch, 0};
  running_ = nullptr;
}

Loader::Iterator::Iterator(Loader& loader) : loader_(&loader) {
  check(loader.size() > 0, kOp, "an epoch has no batches: the number of samples is ", loader.sampler_->size(),
        ", batch_size is ", loader.options_.batch_size, ", drop_last is ",
        loader.options_.drop_last ? "true" : "false");
  Position& position = loader.position_;
  if (loader.running_) position = {position.epoch + 1, 0};  // the last loop was left early
  epoch_ = std::make_shared<Epoch>(loader, loader.sampler_->order(position.epoch));
  loader.running_ = epoch_.get();
  ++*this;
}

Loader::Iterator& Loader::Iterator::operator++() {
  const bool current = loader_->running_ == epoch_.get();  // set_epoch() may have been called in this loop
  batch_ = {};  // frees the previous batch, so that the next one can reuse its memory
  if (epoch_->finished()) {
    if (current) {
      loader_->position_ = {epoch_->number() + 1, 0};
      loader_->running_ = nullptr;
    }
    epoch_.reset();
    return *this;
  }
  if (current) ++loader_->position_.batch;
  batch_ = epoch_->next();
  return *this;
}

TensorMap Loader::state_dict() const {
  // After the last batch of an epoch, the position is the start of the next epoch.
  Position next = position_;
  if (running_ && next.batch >= size()) next = {next.epoch + 1, 0};
  uint64_t seed = options_.seed;
  int64_t batch_size = global_batch_size(), samples = global_samples();
  bool drop_last = options_.drop_last;
  const std::string name = sampler_->name();
  const std::vector<uint8_t> bytes(name.begin(), name.end());
  TensorMap state;
  state["sampler"] = from_span<uint8_t>(bytes, {std::ssize(bytes)});
  nn::write_fields(state, "",
                   nn::named_fields("epoch, batch, seed, batch_size, samples, drop_last",  //
                                    next.epoch, next.batch, seed, batch_size, samples, drop_last));
  return state;
}

void Loader::read_state(const TensorMap& state, bool keep) {
  Position position;
  uint64_t seed = 0;
  int64_t batch_size = 0, samples = 0;
  bool drop_last = false;
  nn::read_fields(state, "",
                  nn::named_fields("epoch, batch, seed, batch_size, samples, drop_last",  //
                                   position.epoch, position.batch, seed, batch_size, samples, drop_last),
                  kOp);
  check(seed == options_.seed && batch_size == global_batch_size() && samples == global_samples(), kOp,
        "the state has seed ", seed, ", batch size ", batch_size, " and number of samples ", samples,
        "; this loader has seed ", options_.seed, ", batch size ", global_batch_size(), " and number of samples ",
        global_samples());
  const auto text = state.find("sampler");
  check(text != state.end() && text->second.defined() && text->second.dtype() == u8, kOp,
        "the state does not contain the name of a sampler");
  const Tensor bytes = text->second.to(Device::cpu()).contiguous();
  const std::string name(bytes.data<uint8_t>(), bytes.data<uint8_t>() + bytes.numel());
  check(name == sampler_->name(), kOp, "the state is a position in the order of ", name, ", but this loader uses ",
        sampler_->name());
  check(drop_last == options_.drop_last, kOp, std::boolalpha, "the state has drop_last ", drop_last,
        ", but this loader has ", options_.drop_last);
  check(position.batch <= size(), kOp, "the state is at batch ", position.batch, " of epoch ", position.epoch,
        ", but the number of batches per epoch is ", size());
  if (!keep) return;
  position_ = position;
  running_ = nullptr;
}

}  // namespace voxgrad::data
