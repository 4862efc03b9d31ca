// Implements parallel_for with a pool of threads. Idle threads sleep instead of spinning, because they share the cores
// with the threads of data loaders and with other programs.
#include "core/thread_pool.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/error.h"

namespace voxgrad {
namespace {

/// Points to the value in the newest SerialGuard of this thread, or is null. parallel_for runs serially while this
/// thread has a guard. Threads also create a guard while they run pieces of a loop.
thread_local ScopedValue<bool>* inside_loop = nullptr;

/// A call of parallel_for. Threads take pieces of the loop until none is left.
struct Loop {
  const std::function<void(int64_t, int64_t)>& body;
  int64_t count;     // number of elements
  int64_t pieces;    // number of ranges into which the elements are split
  int64_t next = 0;  // number of the next piece
  int64_t finished = 0;
  std::exception_ptr error{};

  int64_t begin(int64_t piece) const { return count / pieces * piece + std::min(piece, count % pieces); }
};

class Pool {
 public:
  /// Runs all pieces on this thread and on idle threads.
  void run(Loop& loop) {
    std::unique_lock lock(mutex_);
    while (static_cast<int64_t>(workers_) < loop.pieces - 1) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {
        break;  // the system has no more threads; the existing threads run all pieces
      }
      ++workers_;
    }
    loops_.push_back(&loop);
    if (loop.pieces == 2)
      wake_.notify_one();
    else
      wake_.notify_all();
    take_pieces(loop, lock);
    done_.wait(lock, [&] { return loop.finished == loop.pieces; });
  }

 private:
  [[noreturn]] void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return !loops_.empty(); });
      take_pieces(*loops_.front(), lock);
    }
  }

  /// Takes and runs pieces of `loop`. Holds `lock` except while a piece runs. Removes the loop from the list when its
  /// last piece has been taken.
  void take_pieces(Loop& loop, std::unique_lock<std::mutex>& lock) {
    const SerialGuard serial;
    while (loop.next < loop.pieces) {
      const int64_t piece = loop.next++;
      if (loop.next == loop.pieces) loops_.remove(&loop);
      lock.unlock();
      std::exception_ptr error;
      try {
        loop.body(loop.begin(piece), loop.begin(piece + 1));
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error && !loop.error) loop.error = error;
      if (++loop.finished == loop.pieces) {  // the loop may be destroyed once the lock is released
        done_.notify_all();
        break;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::list<Loop*> loops_;  // loops with pieces that no thread has taken
  int workers_ = 0;
};

std::atomic<int>& thread_count() {
  static std::atomic<int> count = [] {
    for (const char* name : {"VOXGRAD_NUM_THREADS", "OMP_NUM_THREADS"})
      if (const char* text = std::getenv(name); text && std::atoi(text) > 0) return std::atoi(text);
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }();
  return count;
}

}  // namespace

std::atomic<bool> detail::ignores_grain = false;

SerialGuard::SerialGuard() : ScopedValue(inside_loop, true) {}

int num_threads() { return thread_count(); }

void set_num_threads(int count) {
  check(count > 0, "set_num_threads", "the number of threads must be positive, got ", count);
  thread_count() = count;
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  if (detail::ignores_grain) grain = 1;
  const int64_t pieces = std::min<int64_t>(num_threads(), std::max<int64_t>(1, count / std::max<int64_t>(1, grain)));
  if (pieces == 1 || inside_loop) return body(0, count);
  static auto* pool = new Pool;  // never destroyed, because its threads wait in it until the process ends
  Loop loop{body, count, pieces};
  pool->run(loop);
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace voxgrad
