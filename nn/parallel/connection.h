// TCP connections between ranks that never block: frames wait in buffers until a socket takes or delivers them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace voxgrad::parallel {

using Deadline = std::chrono::steady_clock::time_point;
Deadline after(double seconds);

/// Messages between rank 0 and another rank: a kind, a number and a text.
enum class FrameKind : int64_t {
  hello = 0x766f78'67726164,  ///< number: rank << 32 | size; text: token, line end, host ("voxgrad" marks the protocol)
  welcome,                    ///< text: rank 0's message
  refused,                    ///< text: the reason
  calls,                      ///< to rank 0; number: the calls of collectives so far; text: those since the last frame
  late,                       ///< to rank 0; number: of the call that is late; text: its name
  end,                        ///< to all: ends the process
  bye                         ///< leaves in order
};
inline constexpr int64_t kMaxText = 1 << 24;  // bytes
struct Frame {
  FrameKind kind;
  int64_t number = 0;
  std::string text{};
};

/// A connected, non-blocking socket with a buffer for each direction. Closes itself when the peer is gone, sends what
/// is no frame, or does not read what is sent to it.
class Connection {
 public:
  Connection() = default;  ///< closed
  /// Takes the socket over.
  explicit Connection(int handle);
  ~Connection() { close(); }
  Connection(Connection&& other) noexcept { *this = std::move(other); }
  Connection& operator=(Connection&& other) noexcept;

  bool is_open() const { return handle_ >= 0; }
  int handle() const { return handle_; }
  /// Whether sent frames are still in the buffer.
  bool is_sending() const { return is_open() && !output_.empty(); }
  /// Limits the text of frames that the peer sends, kMaxText unless set.
  void set_longest_text(int64_t bytes) { longest_text_ = bytes; }

  /// Appends a frame to the buffer, and sends as much of the buffer as the socket takes.
  void send(const Frame& frame);
  /// Moves bytes in both directions without blocking.
  void transfer();
  /// The next frame that has arrived completely. Frames that arrived before the peer was gone are returned, too.
  std::optional<Frame> next();
  void close();

 private:
  void flush();

  int handle_ = -1;
  int64_t longest_text_ = kMaxText;
  std::string input_;
  std::string output_;
};

/// Waits until one of the connections can send or has received something, or one of the handles is readable, but not
/// past the deadline or longer than `ms`; then transfers on all connections. Null and closed connections are passed
/// over.
void poll_connections(const std::vector<Connection*>& connections, const std::vector<int>& handles, Deadline deadline,
                      int ms = 100);

/// Connects to one of the addresses of a host before the deadline. A closed connection, and the reason, if none
/// answers.
Connection connect_to(const std::string& host, int port, Deadline deadline, std::string& reason);

/// The text with bytes that are not printable ASCII written as "\x1b". For texts of a peer that are printed.
std::string escape(std::string_view text);

}  // namespace voxgrad::parallel
