// A pool of threads that sleep when there is nothing to do: volumes are processed beside loader threads and other
// programs, where threads that spin while they wait cost more than they save.
#include "core/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"

namespace voxgrad {
namespace {

/// Set in the threads that run a piece of a loop, and by SerialGuard.
thread_local ScopedValue<bool>* inside_loop = nullptr;

/// One call of parallel_for. Threads take pieces until none is left.
struct Loop {
  const std::function<void(int64_t, int64_t)>& body;
  int64_t count, pieces;
  int64_t next = 0;  // piece to be taken
  int64_t finished = 0;
  std::exception_ptr error{};

  int64_t begin(int64_t piece) const { return count / pieces * piece + std::min(piece, count % pieces); }
};

class Pool {
 public:
  /// Runs all pieces, in this thread and in those that are idle.
  void run(Loop& loop) {
    std::unique_lock lock(mutex_);
    while (static_cast<int64_t>(workers_) < loop.pieces - 1) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {
        break;  // no more threads to be had: those there are, this one at least, do the work
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

  /// Holds `lock` except while a piece runs. A loop leaves the list with its last piece taken.
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
      if (++loop.finished == loop.pieces) {  // the loop may be gone once the lock is
        done_.notify_all();
        break;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::list<Loop*> loops_;  // those with pieces to be taken
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

SerialGuard::SerialGuard() : serial_(inside_loop, true) {}

int num_threads() { return thread_count(); }

void set_num_threads(int count) {
  check(count > 0, "set_num_threads", "needs a positive number, got ", count);
  thread_count() = count;
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  const int64_t pieces = std::min<int64_t>(num_threads(), std::max<int64_t>(1, count / std::max<int64_t>(1, grain)));
  if (pieces == 1 || inside_loop) return body(0, count);
  static auto* pool = new Pool;  // never destroyed: its threads sleep in it until the process ends
  Loop loop{body, count, pieces};
  pool->run(loop);
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace voxgrad
