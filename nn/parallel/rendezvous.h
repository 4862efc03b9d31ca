// How processes find each other before NCCL connects their GPUs, and notice when one of them is gone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace voxgrad::parallel {

/// A port on which rank 0 waits for the others.
class Listener {
 public:
  /// 0: any that is free. Throws Error, with the reason, if the port cannot be had.
  explicit Listener(int port);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int port() const { return port_; }
  int handle() const { return handle_; }

 private:
  int handle_ = -1, port_ = 0;
};

/// What a rank tells of itself when it is asked.
struct Progress {
  int64_t collectives = 0;  ///< begun so far
  std::string late{};       ///< "all_reduce within 600 s": one that did not end in time; empty if there is none
  std::string error{};      ///< of a collective; empty if there is none
};

/// A TCP connection of each rank with rank 0. Collectives do not use it.
class Rendezvous {
 public:
  /// Rank 0 (with a listener) waits until all others have come, and gives them `message`. Throws Error, on all ranks
  /// that came, if after `seconds` some are missing, which it names, if two are the same rank, or if one counts other
  /// than `size` ranks.
  Rendezvous(const Listener& listener, int size, const std::string& message, double seconds);
  Rendezvous(int rank, int size, const std::string& address, int port, double seconds);
  /// Tells the others that this rank leaves in order.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// Rank 0's.
  const std::string& message() const { return message_; }
  /// Starts the thread that ends this process, and those of all ranks, after one line on stderr that names the rank
  /// and the cause, when a process is gone that did not leave in order, or when `progress`, which it asks every 0.1
  /// seconds, tells of a collective that is late or of an error.
  void watch(std::function<Progress()> progress);
  /// Ends the processes of all other ranks. Nothing is printed.
  void end_others();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  std::string message_;
};

/// Prints "rank 1 of 4 on host node7: <what>" and a line end on stderr, in one piece.
void print_failure(int rank, int size, const std::string& what);
/// Of this machine.
std::string host_name();

}  // namespace voxgrad::parallel
