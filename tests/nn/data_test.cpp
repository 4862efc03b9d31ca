// Tests of datasets and the loader: order of the batches, threads, resuming and errors.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <set>
#include <thread>

#include "core/thread_pool.h"
#include "nn/data/loader.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

using data::FunctionDataset;
using data::Loader;
using data::LoaderOptions;
using data::Sample;

/// Returns a dataset in which the input of sample i is [i, a random number]. get() sleeps for varying times, so that
/// workers finish out of order.
FunctionDataset noisy(int64_t size) {
  return FunctionDataset(size, [](int64_t index, Generator& random) {
    const Tensor noise = rand({1}, {}, &random);
    std::this_thread::sleep_for(std::chrono::microseconds((index * 7919) % 700));
    return Sample{tensor({static_cast<double>(index), noise.item()}), full({}, static_cast<double>(-index))};
  });
}

/// Returns all elements of the batches of one epoch, in order.
std::vector<double> epoch_values(Loader& loader) {
  std::vector<double> all;
  for (auto [x, y] : loader) {
    for (double value : x.to_vector()) all.push_back(value);
    for (double value : y.to_vector()) all.push_back(value);
  }
  return all;
}

TEST(Dataset, TensorDatasetSelectsRows) {
  const data::TensorDataset dataset(arange(0, 6).reshape({3, 2}), arange(0, 3, 1, {.dtype = i64}));
  Generator unused;
  EXPECT_EQ(dataset.size(), 3);
  const Sample sample = dataset.get(1, unused);
  EXPECT_EQ(sample.input.to_vector(), (std::vector<double>{2, 3}));
  EXPECT_EQ(sample.target.item<int>(), 1);
  EXPECT_ERROR(data::TensorDataset(zeros({3}), zeros({2})),
               "the first axes of inputs and targets must have the same size");
  EXPECT_ERROR(data::TensorDataset(Tensor()), "TensorDataset: inputs must have at least one axis, got undefined");
  EXPECT_ERROR(FunctionDataset(1, nullptr), "FunctionDataset: the function is empty");
}

TEST(Loader, ResumesOnADifferentNumberOfRanks) {
  const FunctionDataset dataset(19, [](int64_t index, Generator& random) {
    return Sample{full({1}, static_cast<double>(index)), rand({1}, {}, &random)};
  });
  const auto all = std::make_shared<data::RandomSampler>(19, 5);
  const auto loader = [&](int ranks, int rank, bool drop = false) {
    return std::make_unique<Loader>(
        dataset, LoaderOptions{.batch_size = 8 / ranks,
                               .seed = 5,
                               .sampler = std::make_shared<data::DistributedSampler>(
                                   all, data::DistributedSamplerOptions{
                                            .num_replicas = ranks, .rank = rank, .batch_size = 8, .drop_last = drop})});
  };
  const auto two = loader(2, 1);
  two->set_epoch(1);
  auto place = two->begin();  // consumes the first batch
  const TensorMap state = two->state_dict();
  const std::unique_ptr<Loader> one = loader(1, 0);
  one->load_state_dict(state);
  const std::vector<double> rest = epoch_values(*one);
  ASSERT_EQ(rest.size(), 2u * 16u);
  for (int rank = 0; rank < 4; ++rank) {
    const auto part = loader(4, rank);
    part->load_state_dict(state);
    EXPECT_EQ(part->epoch(), 1);
    const std::vector<double> values = epoch_values(*part);  // a batch of 2 has two indices and two random numbers
    ASSERT_EQ(values.size(), 8u);
    for (size_t step = 0; step < 2; ++step)
      for (size_t kind = 0; kind < 2; ++kind)
        for (size_t i = 0; i < 2; ++i)
          EXPECT_EQ(values[step * 4 + kind * 2 + i], rest[step * 16 + kind * 8 + static_cast<size_t>(rank) * 2 + i]);
  }
  EXPECT_ERROR(loader(2, 0, true)->load_state_dict(state),
               "number of samples 24; this loader has seed 5, batch size 8 and number of samples 16");
  EXPECT_ERROR(Loader(dataset, {.batch_size = 8, .seed = 5, .sampler = all}).load_state_dict(state),
               "number of samples 19");
  EXPECT_ERROR(Loader(dataset, {.batch_size = 3,
                                .sampler = std::make_shared<data::DistributedSampler>(
                                    all, data::DistributedSamplerOptions{.num_replicas = 2, .batch_size = 8})}),
               "the loader's batch_size must be 8 / num_replicas = 4, got 3");
}

TEST(Loader, StacksBatchesInOrder) {
  const data::TensorDataset dataset(arange(0, 10).reshape({5, 2}), arange(0, 5));
  Loader loader(dataset, {.batch_size = 2});
  EXPECT_EQ(loader.size(), 3);
  std::vector<Shape> shapes;
  std::vector<double> targets;
  for (auto [x, y] : loader) {
    shapes.push_back(x.shape());
    for (double value : y.to_vector()) targets.push_back(value);
  }
  EXPECT_EQ(shapes, (std::vector<Shape>{{2, 2}, {2, 2}, {1, 2}}));
  EXPECT_EQ(targets, (std::vector<double>{0, 1, 2, 3, 4}));

  Loader dropping(dataset, {.batch_size = 2, .num_workers = 1, .drop_last = true});
  EXPECT_EQ(dropping.size(), 2);
  EXPECT_EQ(std::distance(dropping.begin(), dropping.end()), 2);
}

TEST(Loader, TargetsAreOptional) {
  const data::TensorDataset dataset(zeros({4, 2}));
  Loader loader(dataset, {.batch_size = 4});
  for (auto [x, y] : loader) EXPECT_TRUE(x.defined() && !y.defined());
}

TEST(Loader, ResultsDoNotDependOnWorkers) {
  const FunctionDataset dataset = noisy(37);
  manual_seed(11);
  const GeneratorState before = default_generator().state();
  const LoaderOptions options{.batch_size = 4, .shuffle = true, .seed = 5};
  Loader alone(dataset, options);
  const std::vector<double> first = epoch_values(alone), second = epoch_values(alone);
  EXPECT_NE(first, second);
  EXPECT_EQ(alone.epoch(), 2);
  for (int workers : {1, 2, 5}) {
    LoaderOptions threaded = options;
    threaded.num_workers = workers;
    threaded.prefetch_factor = 1;
    Loader loader(dataset, threaded);
    EXPECT_EQ(epoch_values(loader), first) << workers;
    EXPECT_EQ(epoch_values(loader), second) << workers;
  }
  EXPECT_EQ(default_generator().state(), before);
}

TEST(Loader, WorkersRunLoopsSerially) {
  const int threads = num_threads();
  set_num_threads(3);
  const FunctionDataset dataset(2, [](int64_t, Generator&) {
    std::atomic<int> pieces = 0;
    parallel_for(10, 1, [&](int64_t, int64_t) { ++pieces; });
    return Sample{full({}, pieces), Tensor()};
  });
  for (const int workers : {0, 2}) {
    Loader loader(dataset, {.num_workers = workers});
    for (const auto& [pieces, none] : loader) EXPECT_EQ(pieces.item(), workers == 0 ? 3 : 1);
  }
  set_num_threads(threads);
}

TEST(Loader, ResultsDoNotDependOnTheDevice) {
  const FunctionDataset dataset = noisy(37);
  Loader reference(dataset, {.batch_size = 4, .shuffle = true});
  const std::vector<double> first = epoch_values(reference), second = epoch_values(reference);
  for (const Device device : devices())
    for (const int workers : {0, 1, 3}) {
      Loader loader(dataset, {.batch_size = 4, .shuffle = true, .num_workers = workers, .device = device});
      EXPECT_EQ(epoch_values(loader), first) << device << workers;
      EXPECT_EQ(loader.begin()->target.device(), device);  // leaves the second epoch early
      loader.set_epoch(1);
      EXPECT_EQ(epoch_values(loader), second) << device << workers;
    }
  const data::TensorDataset inputs_only(zeros({4, 2}));
  Loader loader(inputs_only, {.device = Device::cpu()});
  EXPECT_FALSE(loader.begin()->target.defined());
  EXPECT_ERROR(Loader(inputs_only, {.device = Device::cuda(63)}), "cuda:63 is not available: ");
}

// The loader copies batches to the GPU on its own stream and reuses the memory of earlier batches. The loader must not
// overwrite a batch that queued kernels still read.
TEST(Loader, PrefetchDoesNotOverwriteBatchesInUseOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  const FunctionDataset dataset(60, [](int64_t index, Generator&) {
    return Sample{full({3 << 20}, static_cast<double>(index)), full({}, static_cast<double>(-index))};
  });
  const cuda::Stream stream;
  for (const bool other : {false, true})
    for (const int workers : {0, 1, 3}) {
      std::optional<cuda::StreamGuard> guard;
      if (other) guard.emplace(stream);
      Loader loader(dataset, {.batch_size = 2, .num_workers = workers, .device = Device::cuda()});
      Tensors min_sums, max_sums, targets;
      for (const auto& [x, y] : loader) {
        const Tensor sum = zeros(x.shape(), x.options());
        for (int i = 0; i < 40; ++i) sum.add_(x);
        min_sums.push_back(amin(sum, {1}));
        max_sums.push_back(amax(sum, {1}));
        targets.push_back(y.clone());
      }
      for (size_t i = 0; i < 30; ++i) {
        const double first = static_cast<double>(2 * i);
        EXPECT_EQ(min_sums[i].to_vector(), (std::vector<double>{40 * first, 40 * (first + 1)}));
        EXPECT_EQ(max_sums[i].to_vector(), min_sums[i].to_vector());
        EXPECT_EQ(targets[i].to_vector(), (std::vector<double>{-first, -first - 1}));
      }
    }
}

TEST(Loader, RandomNumbersDependOnSampleAndEpoch) {
  const FunctionDataset dataset = noisy(6);
  Loader ordered(dataset, {.seed = 5}), shuffled(dataset, {.batch_size = 6, .shuffle = true, .seed = 5});
  std::vector<double> first, second;
  for (auto [x, y] : ordered) first.push_back(x.at({0, 1}));
  for (auto [x, y] : shuffled)
    for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(x.at({i, 1}), first[x.at<size_t>({i, 0})]);
  for (auto [x, y] : ordered) second.push_back(x.at({0, 1}));
  for (size_t i = 0; i < first.size(); ++i) EXPECT_NE(first[i], second[i]);
  EXPECT_EQ(std::set<double>(first.begin(), first.end()).size(), first.size());
}

TEST(Loader, QueueIsBounded) {
  std::atomic<int> made = 0;
  const FunctionDataset dataset(100, [&](int64_t, Generator&) {
    ++made;
    return Sample{zeros({1}), {}};
  });
  Loader loader(dataset, {.num_workers = 2, .prefetch_factor = 3});
  auto batch = loader.begin();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LE(made, 7);  // one batch taken, six in the queue
  ++batch;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_LE(made, 8);
}

TEST(Loader, RethrowsErrorsAtTheirBatch) {
  const FunctionDataset dataset(20, [](int64_t index, Generator&) -> Sample {
    if (index == 13) throw std::out_of_range("sample 13");
    return {zeros({1}), {}};
  });
  for (int workers : {0, 3}) {
    Loader loader(dataset, {.batch_size = 2, .num_workers = workers});
    int batches = 0;
    EXPECT_THROW(
        {
          for (auto [x, y] : loader) ++batches;
        },
        std::out_of_range);
    EXPECT_EQ(batches, 6);
  }
}

TEST(Loader, ContinuesAfterAFailedBatch) {
  std::atomic<bool> fails = true;
  const FunctionDataset dataset(6, [&](int64_t index, Generator&) -> Sample {
    if (index == 2 && fails) throw std::out_of_range("sample 2");
    return {full({}, static_cast<double>(index)), {}};
  });
  for (int workers : {0, 2}) {
    fails = true;
    Loader loader(dataset, {.num_workers = workers});
    auto batch = loader.begin();
    ++batch;
    EXPECT_THROW(++batch, std::out_of_range);
    ++batch;  // iteration can continue after the error
    EXPECT_EQ(batch->input.item(), 3);
    fails = false;
    Loader resumed(dataset, {});
    resumed.load_state_dict(loader.state_dict());
    EXPECT_EQ(resumed.begin()->input.item(), 4);
  }
}

TEST(Loader, SetEpochInsideALoopSelectsTheNextEpoch) {
  const data::TensorDataset dataset(arange(0, 4));
  Loader loader(dataset, {});
  for (auto [x, y] : loader)
    if (x.item() == 1) loader.set_epoch(7);
  EXPECT_EQ(loader.epoch(), 7);
  EXPECT_EQ(loader.begin()->input.item(), 0);
  loader.set_epoch(int64_t{1} << 62);
  for (auto batch = loader.begin(); batch != loader.end();) ++batch;
  EXPECT_EQ(loader.epoch(), (int64_t{1} << 62) + 1);
  EXPECT_ERROR(loader.set_epoch(INT64_MAX), "data::Loader: the epoch must lie in [0, 2^62], got 9223372036854775807");
  EXPECT_ERROR(loader.set_epoch(-1), "the epoch must lie in [0, 2^62], got -1");
}

TEST(Loader, LeavingALoopEarlyJoinsTheWorkers) {
  const FunctionDataset dataset = noisy(64);
  Loader loader(dataset, {.batch_size = 2, .shuffle = true, .num_workers = 3});
  Loader reference(dataset, {.batch_size = 2, .shuffle = true});
  const std::vector<double> first = epoch_values(reference), second = epoch_values(reference);
  for (auto [x, y] : loader) {
    EXPECT_EQ(x.at({0, 0}), first[0]);
    break;
  }
  EXPECT_EQ(epoch_values(loader), second);  // a new loop starts a new epoch
  loader.set_epoch(0);
  EXPECT_EQ(epoch_values(loader), first);
  { Loader unused(dataset, {.num_workers = 2}); }
  Loader abandoned(dataset, {.num_workers = 2});
  abandoned.begin();
}

TEST(Loader, ResumesInTheMiddleOfAnEpoch) {
  const FunctionDataset dataset = noisy(23);
  const LoaderOptions options{.batch_size = 3, .shuffle = true, .num_workers = 2, .seed = 8};
  Loader whole(dataset, options);
  epoch_values(whole);
  std::vector<double> rest;
  TensorMap state;
  int64_t count = 0;
  for (auto [x, y] : whole) {
    if (count >= 3)
      for (double value : x.to_vector()) rest.push_back(value);
    if (++count == 3) state = whole.state_dict();
  }
  Loader resumed(dataset, options);
  resumed.load_state_dict(state);
  std::vector<double> values;
  for (auto [x, y] : resumed)
    for (double value : x.to_vector()) values.push_back(value);
  EXPECT_EQ(values, rest);
  EXPECT_EQ(epoch_values(resumed), epoch_values(whole));

  // A state that is saved during the last batch points to the start of the next epoch.
  Loader last(dataset, options);
  for (auto [x, y] : last) state = last.state_dict();
  EXPECT_EQ(state.at("epoch").item<int>(), 1);
  EXPECT_EQ(state.at("batch").item<int>(), 0);
}

TEST(Loader, RejectsPositionsOutOfRange) {
  const data::TensorDataset dataset(arange(0, 10));
  Loader loader(dataset, {.batch_size = 3});
  const auto expect_rejected = [&](const char* name, double value, const char* message) {
    TensorMap bad = loader.state_dict();
    bad[name] = full({}, value, {.dtype = i64});
    EXPECT_ERROR(loader.load_state_dict(bad), message);
  };
  expect_rejected("epoch", -1, "data::Loader: epoch must lie in [0, 2^62], got -1");
  expect_rejected("epoch", 0x1p62 + 1024, "data::Loader: epoch must lie in [0, 2^62], got 4611686018427388928");
  expect_rejected("batch", -1, "data::Loader: batch must lie in [0, 2^62], got -1");
  TensorMap last = loader.state_dict();
  last["epoch"] = full({}, 0x1p62, {.dtype = i64});
  last["batch"] = full({}, 4, {.dtype = i64});
  loader.load_state_dict(last);
  EXPECT_EQ(std::distance(loader.begin(), loader.end()), 0);  // the epoch is complete
  EXPECT_EQ(loader.epoch(), (int64_t{1} << 62) + 1);
}

TEST(Loader, SupportsHugeEpochs) {
  for (int64_t size : {int64_t{1} << 45, int64_t{1} << 52}) {
    const FunctionDataset dataset(size, [](int64_t index, Generator&) {
      return Sample{full({}, index, {.dtype = i64}), {}};
    });
    for (int workers : {0, 2}) {
      Loader loader(dataset, {.batch_size = 3, .num_workers = workers});
      TensorMap state = loader.state_dict();
      state["batch"] = full({}, size / 3 - 1, {.dtype = i64});
      loader.load_state_dict(state);
      EXPECT_EQ(loader.begin()->input.to_vector<int64_t>()[2], size / 3 * 3 - 1);
    }
    Loader shuffled(dataset, {.shuffle = true});
    EXPECT_THROW(shuffled.begin(), OutOfMemoryError);
  }
  const data::TensorDataset few(zeros({3}));
  Loader large(few, {.batch_size = INT64_MAX});
  EXPECT_EQ(large.begin()->input.size(0), 3);
}

TEST(Loader, RejectsEpochsWithoutBatches) {
  const data::TensorDataset empty(zeros({0, 2})), few(zeros({3, 2}));
  Loader none(empty, {.num_workers = 2}), dropping(few, {.batch_size = 4, .drop_last = true});
  EXPECT_EQ(none.size(), 0);
  EXPECT_ERROR(none.begin(), "data::Loader: an epoch has no batches: the number of samples is 0, batch_size is 1");
  EXPECT_EQ(dropping.size(), 0);
  EXPECT_ERROR(dropping.begin(),
               "data::Loader: an epoch has no batches: the number of samples is 3, batch_size is 4, drop_last is true");
}

TEST(Loader, RejectsBadOptionsAndBatches) {
  const data::TensorDataset dataset(zeros({4, 2}));
  EXPECT_ERROR(Loader(dataset, {.batch_size = 0}), "data::Loader: batch_size must be positive, got 0");
  EXPECT_ERROR(Loader(dataset, {.num_workers = -1}), "data::Loader: num_workers must lie in [0, 1024], got -1");
  for (int64_t factor : {0, (1 << 20) + 1})
    EXPECT_ERROR(Loader(dataset, {.prefetch_factor = factor}), "data::Loader: prefetch_factor must lie in [1, 2^20");
  EXPECT_ERROR(Loader(dataset, {.num_workers = 2, .prefetch_factor = 1 << 20}), "got 1048576 with num_workers = 2");
  EXPECT_EQ(Loader(dataset, {.num_workers = 1, .prefetch_factor = 1 << 20}).size(), 4);
  auto sampler = std::make_shared<data::SequentialSampler>(9);
  EXPECT_ERROR(Loader(dataset, {.shuffle = true, .sampler = sampler}), "shuffle and sampler cannot be combined");
  for (int workers : {0, 2}) {
    Loader outside(dataset, {.batch_size = 4, .num_workers = workers, .sampler = sampler});
    auto batch = outside.begin();
    EXPECT_ERROR(++batch, "data::Loader: the sampler returned index 4, but the size of the dataset is 4");
  }
  Loader loader(dataset);
  Loader seeded(dataset, {.seed = 3});
  EXPECT_ERROR(loader.load_state_dict(seeded.state_dict()), "data::Loader: the state has seed 3");
  TensorMap beyond = loader.state_dict();
  beyond["batch"] = full({}, 5, {.dtype = i64});
  EXPECT_ERROR(loader.load_state_dict(beyond),
               "the state is at batch 5 of epoch 0, but the number of batches per epoch is 4");

  const FunctionDataset ragged(2, [](int64_t index, Generator&) { return Sample{zeros({index + 1}), {}}; });
  Loader mixed(ragged, {.batch_size = 2});
  EXPECT_ERROR(mixed.begin(), "the inputs of a batch differ: [1] f32 on cpu and [2] f32 on cpu");
  const FunctionDataset nothing(1, [](int64_t, Generator&) { return Sample{}; });
  Loader undefined(nothing);
  EXPECT_ERROR(undefined.begin(), "the input of sample 0 is undefined");
}

}  // namespace
}  // namespace voxgrad
