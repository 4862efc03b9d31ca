// The rendezvous: how processes find each other before NCCL connects their GPUs, notice when one of them is gone, and
// compare their calls of collectives.
//
// Rank 0 listens, the others connect. Every connection starts with a hello that has the token of the job; a connection
// without it is dropped, and learns nothing. The token, and all else, travels in plain text: docs/scaling.md has the
// trust model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../core/communicator.h"

namespace voxgrad::parallel {

/// The port on which rank 0 waits for the others.
class Listener {
 public:
  /// Listens on the addresses of this machine among those that `host` stands for. Where there are none, or a name
  /// stands for loopback addresses here (Debian's 127.0.1.1), but may not elsewhere, it listens on all interfaces if
  /// there is a token. Port 0 takes any that is free. Throws Error if no address can be used, with the reason.
  Listener(const std::string& host, int port, std::string token);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int port() const { return port_; }
  const std::string& token() const { return token_; }
  const std::vector<int>& handles() const { return handles_; }
  /// "127.0.1.1, port 29500", for messages.
  std::string describe() const;

 private:
  std::string listen_on(const char* host);
  void close();

  std::vector<int> handles_;
  std::vector<std::string> addresses_;
  int port_;
  std::string token_;
};

/// The state of a rank's collectives.
struct Progress {
  std::string late{};     ///< "all_reduce within 600 s": a collective that did not end in time; empty if there is none
  int64_t late_call = 0;  ///< its number among this rank's calls, from 1
  std::string error{};    ///< of a collective; empty if there is none
};

/// A TCP connection of each rank with rank 0. Collectives do not use it. No function blocks for longer than its time
/// limit, whatever the peers send or fail to read.
class Rendezvous {
 public:
  /// On rank 0: waits until all others have come, and sends them `message`. Peers without the token, with another
  /// number of ranks, or with a rank that is taken are refused, without an effect on the others. Throws Error, on all
  /// ranks that came, if after `seconds` some are missing: the message names them, and the peers that were refused.
  Rendezvous(const Listener& listener, int size, const std::string& message, double seconds);
  /// On the other ranks: throws Error if rank 0 does not answer within `seconds`, or refuses this rank.
  Rendezvous(int rank, int size, const std::string& host, int port, const std::string& token, double seconds);
  /// Leaves in order. Takes up to two seconds if the others do not answer.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// Rank 0's.
  const std::string& message() const { return message_; }
  /// Starts a thread that calls `progress` every 0.1 seconds. It ends the processes of all ranks, after one line on
  /// stderr that names the rank and the cause, when a process is gone that did not leave in order, when a collective is
  /// late or has failed, and when the ranks' calls differ.
  void watch(std::function<Progress()> progress);
  /// Adds a call of a collective to those that rank 0 compares and counts. `description` is one line. Thread-safe.
  void add_call(const Signature& signature, const std::string& description);
  /// Ends the processes of all other ranks. Prints nothing.
  void end_others();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  std::string message_;
};

/// 128 random bits as hexadecimal digits: the token of ranks that need none from outside.
std::string random_token();
/// Prints "rank 1 of 4 on host node7: <what>" and a line end on stderr, in one piece.
void print_failure(int rank, int size, const std::string& what);
/// The name of this machine.
std::string host_name();

}  // namespace voxgrad::parallel
