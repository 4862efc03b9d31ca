// The rendezvous connects processes before NCCL connects their GPUs. The rendezvous then detects processes that have
// ended, and compares the ranks' calls of collectives.
//
// Rank 0 listens, and the other ranks connect. Every connection starts with a hello that contains the token of the job.
// Rank 0 refuses a hello with a wrong token: the peer receives the reason and nothing else. Everything is sent in plain
// text, including the token. docs/distributed.md describes the trust model.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../../../core/communicator.h"
#include "connection.h"

namespace voxgrad::distributed {

/// The state of a rank's collectives.
struct Progress {
  std::string late{};     ///< "all_reduce within 600 s": a collective that exceeded the timeout; empty if there is none
  int64_t late_call = 0;  ///< index of the late collective among this rank's calls, from 1
  std::string error{};    ///< error message of a collective; empty if there is none
};

/// TCP connections between rank 0 and each other rank. Collectives do not use these connections. No function blocks for
/// longer than its time limit, regardless of what the peers send and whether they read.
class Rendezvous : NonCopyable {
 public:
  /// Rank 0: waits until all other ranks have joined, and sends `message` to these ranks. Refuses peers without the
  /// token, with a different number of ranks, or with a rank that has already joined; this does not affect the other
  /// peers. If ranks are missing after `seconds`, throws Error on all ranks that joined. The message names the missing
  /// ranks and the last refusal.
  Rendezvous(const Listener& listener, int size, const std::string& message, double seconds);
  /// Other ranks: joins rank 0. If the connection is closed before rank 0 answers, connects again. Throws Error if rank
  /// 0 refuses this rank or does not answer within `seconds`.
  Rendezvous(int rank, int size, const std::string& host, int port, const std::string& token, double seconds);
  /// Leaves the group. Takes up to two seconds if other ranks do not answer.
  ~Rendezvous();

  /// Returns the message of rank 0.
  const std::string& message() const { return message_; }
  /// Starts a thread that calls `progress` every 0.1 seconds. If a process ends without leaving the group, if a
  /// collective is late or fails, or if the ranks' calls differ, the thread ends the processes of all ranks. Before
  /// that, it prints one line on stderr that names the rank and the cause.
  void watch(std::function<Progress()> progress);
  /// Records a call of a collective, which rank 0 compares and counts. The description must be one line. Thread-safe.
  void add_call(const Call& call);
  /// Ends the processes of all other ranks. Prints nothing.
  void end_others();

 private:
  /// The connection to another rank, and the state of that rank.
  struct Peer {
    Connection connection{};
    bool is_present = false;   // true from its hello to its bye
    Deadline last_heard{};     // when its last frame arrived
    int64_t num_calls = 0;     // number of its calls that rank 0 has received
    std::deque<Call> calls{};  // calls that have not been compared
  };

  Rendezvous(int rank, int size);
  std::string admit(Connection& connection, const Frame& frame, const std::string& token);
  /// Returns the ranks that have not connected to rank 0.
  std::vector<int> missing() const;
  std::vector<Connection*> connections();
  void send_to_all(const Frame& frame);
  void stop_watching();
  void monitor();
  void receive(Deadline deadline);
  void handle(Peer& peer, const Frame& frame);
  void share_calls();
  void compare_calls();
  void report_late(const Frame& frame);
  [[noreturn]] void end_late();
  [[noreturn]] void end(const std::string& what);

  const int rank_;
  const int size_;
  std::string message_;
  // On rank 0, one entry per rank; entry 0 is unused. On the other ranks, one entry for rank 0.
  std::vector<Peer> peers_;
  std::function<Progress()> progress_;
  std::optional<Deadline> error_deadline_;  // when this rank ends all processes because of its error
  std::optional<Frame> late_;               // the first report of a late collective
  Deadline late_deadline_;                  // when all processes are ended because of late_
  Deadline next_calls_{};                   // when to send a frame even if there are no new calls
  std::atomic<bool> stopping_ = false;
  std::thread watcher_;

  std::mutex mutex_;         // guards the members below
  std::string fresh_calls_;  // calls not sent yet: signature, description and line end of each
  int64_t num_calls_ = 0;
};

/// The contents of a hello, which a peer sends before rank 0 has checked its token.
struct Hello {
  int rank;
  int size;
  std::string_view token;  ///< refers to the text of the frame
  std::string host;        ///< escaped; at most 255 bytes before escaping
};
/// Returns the contents of a hello, or nullopt for any other kind of frame. The rank and the size are not checked.
std::optional<Hello> parse_hello(const Frame& frame);
/// Returns the calls in the text of a frame of kind `calls`. Ignores an incomplete record at the end.
std::vector<Call> parse_calls(std::string_view text);
/// Appends a call to the text of a frame of kind `calls`. The description must be one line.
void append_call(std::string& text, const Call& call);

/// Returns 128 random bits as hexadecimal digits, for a token.
std::string random_token();
/// Prints the line "rank 1 of 4 on host node7: <what>" on stderr with one write.
void print_failure(int rank, int size, const std::string& what);
/// Returns the name of this machine.
std::string host_name();
/// Calls f(world). If f throws, prints one line on stderr and ends the processes of all ranks.
void run_guarded(Communicator& world, const std::function<void(Communicator& world)>& f);

}  // namespace voxgrad::distributed
