#include "nn/data/loader.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/autograd.h"
#include "nn/data/seed.h"
#include "ops/shape.h"

namespace voxgrad::data {
namespace {

constexpr const char* kOp = "data::Loader";
constexpr int64_t kLastEpoch = int64_t{1} << 62;  // nobody counts from here to an overflow

Tensor stack_samples(const Tensors& tensors, const char* what) {
  for (const Tensor& tensor : tensors) {
    const bool alike =
        tensor.defined() == tensors[0].defined() &&
        (!tensor.defined() || (tensor.shape() == tensors[0].shape() && tensor.dtype() == tensors[0].dtype()));
    check(alike, kOp, "the ", what, "s of a batch differ: ", describe(tensors[0]), " and ", describe(tensor));
  }
  return tensors[0].defined() ? stack(tensors) : Tensor();
}

}  // namespace

/// The running epoch: workers claim batches in order and leave them in `done_`, from where the consumer takes them
/// in order. Claims stay within a window before the consumer, which bounds what waits.
class Loader::Epoch {
 public:
  Epoch(const Dataset& dataset, const LoaderOptions& options, std::vector<int64_t> order, int64_t number,
        int64_t first_batch, int64_t batches)
      : dataset_(dataset),
        options_(options),
        order_(std::move(order)),
        number_(number),
        batches_(batches),
        taken_(first_batch),
        claimed_(first_batch),
        window_(options.num_workers * options.prefetch_factor) {
    try {
      for (int i = 0; i < options.num_workers && first_batch + i < batches; ++i)
        workers_.emplace_back([this] { work(); });
    } catch (...) {  // no more threads to be had
      stop();
      throw;
    }
  }
  ~Epoch() { stop(); }
  Epoch(const Epoch&) = delete;
  Epoch& operator=(const Epoch&) = delete;

  int64_t number() const { return number_; }
  bool finished() const { return taken_ == batches_; }

  /// The next batch; the caller has asked finished().
  Sample next() {
    if (workers_.empty()) return make_batch(taken_++);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_.contains(taken_); });
    auto result = done_.extract(taken_++);
    lock.unlock();
    changed_.notify_all();
    if (result.mapped().error) std::rethrow_exception(result.mapped().error);
    return std::move(result.mapped().batch);
  }

 private:
  struct Result {
    Sample batch;
    std::exception_ptr error;
  };

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || claimed_ == batches_ || claimed_ < taken_ + window_; });
      if (stopping_ || claimed_ == batches_) return;
      const int64_t batch = claimed_++;
      lock.unlock();
      Result result;
      try {
        result.batch = make_batch(batch);
      } catch (...) {
        result.error = std::current_exception();
      }
      lock.lock();
      done_.emplace(batch, std::move(result));
      changed_.notify_all();
    }
  }

  Sample make_batch(int64_t batch) const {
    NoGradGuard no_grad;
    const int64_t begin = batch * options_.batch_size;
    const int64_t end = std::min(begin + options_.batch_size, static_cast<int64_t>(order_.size()));
    Tensors inputs, targets;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t index = order_[static_cast<size_t>(i)];
      Generator random(derived_seed(options_.seed, number_, index));
      Sample sample = dataset_.get(index, random);
      check(sample.input.defined(), kOp, "the input of sample ", index, " is undefined");
      inputs.push_back(std::move(sample.input));
      targets.push_back(std::move(sample.target));
    }
    return {stack_samples(inputs, "input"), stack_samples(targets, "target")};
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  const Dataset& dataset_;
  const LoaderOptions options_;
  const std::vector<int64_t> order_;
  const int64_t number_, batches_;
  int64_t taken_, claimed_;
  const int64_t window_;
  bool stopping_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, Result> done_;
  std::vector<std::thread> workers_;
};

Loader::Loader(const Dataset& dataset, const LoaderOptions& options)
    : dataset_(dataset), options_(options), sampler_(options.sampler) {
  check(options.batch_size > 0, kOp, "batch_size must be positive, got ", options.batch_size);
  check(options.num_workers >= 0 && options.num_workers <= 1024, kOp, "num_workers must lie in [0, 1024], got ",
        options.num_workers);
  check(options.prefetch_factor > 0 && options.prefetch_factor <= 1 << 20, kOp,
        "prefetch_factor must lie in [1, 2^20], got ", options.prefetch_factor);
  check(!(options.shuffle && options.sampler), kOp, "shuffle and sampler exclude each other");
  if (sampler_) return;
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

int64_t Loader::epoch() const { return position_.epoch; }

void Loader::set_epoch(int64_t epoch) {
  check(epoch >= 0 && epoch <= kLastEpoch, kOp, "the epoch must lie in [0, 2^62], got ", epoch);
  position_ = {epoch, 0};
  running_ = nullptr;
}

Loader::Iterator::Iterator(Loader& loader) : loader_(&loader) {
  Position& position = loader.position_;
  if (loader.running_) position = {position.epoch + 1, 0};  // the last loop was left early
  std::vector<int64_t> order = loader.sampler_->order(position.epoch);
  check(static_cast<int64_t>(order.size()) == loader.sampler_->size(), kOp, "the sampler promised ",
        loader.sampler_->size(), " samples and gave ", order.size());
  for (int64_t index : order)
    check(index >= 0 && index < loader.dataset_.size(), kOp, "the sampler gave index ", index, " for a dataset of ",
          loader.dataset_.size());
  epoch_ = std::make_shared<Epoch>(loader.dataset_, loader.options_, std::move(order), position.epoch, position.batch,
                                   loader.size());
  loader.running_ = epoch_.get();
  ++*this;
}

Loader::Iterator& Loader::Iterator::operator++() {
  const bool current = loader_->running_ == epoch_.get();  // set_epoch() may have been called in this loop
  batch_ = {};                                             // its memory can serve the next one
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
  // All batches handed out: the next thing to come is the next epoch.
  Position next = position_;
  if (running_ && next.batch >= size()) next = {next.epoch + 1, 0};
  uint64_t seed = options_.seed;
  int64_t batch_size = options_.batch_size, samples = sampler_->size();
  TensorMap state;
  nn::write_fields(state, "",
                   {{"epoch", &next.epoch},
                    {"batch", &next.batch},
                    {"seed", &seed},
                    {"batch_size", &batch_size},
                    {"samples", &samples}});
  return state;
}

Loader::Position Loader::read_state(const TensorMap& state) const {
  Position position;
  uint64_t seed = 0;
  int64_t batch_size = 0, samples = 0;
  nn::read_fields(state, "",
                  {{"epoch", &position.epoch},
                   {"batch", &position.batch},
                   {"seed", &seed},
                   {"batch_size", &batch_size},
                   {"samples", &samples}},
                  kOp);
  check(seed == options_.seed && batch_size == options_.batch_size && samples == sampler_->size(), kOp,
        "the state has seed ", seed, ", batch size ", batch_size, " and ", samples, " samples; this loader has seed ",
        options_.seed, ", batch size ", options_.batch_size, " and ", sampler_->size(), " samples");
  check(position.epoch >= 0 && position.epoch <= kLastEpoch && position.batch >= 0 && position.batch <= size(), kOp,
        "the state is at batch ", position.batch, " of epoch ", position.epoch, "; an epoch has ", size(), " batches");
  return position;
}

void Loader::check_state_dict(const TensorMap& state) const { read_state(state); }

void Loader::load_state_dict(const TensorMap& state) {
  position_ = read_state(state);
  running_ = nullptr;
}

}  // namespace voxgrad::data
