// Non-blocking TCP connections between ranks, and the sockets on which rank 0 listens. Each connection buffers its
// frames in both directions.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../../../core/noncopyable.h"

namespace voxgrad::distributed {

using Deadline = std::chrono::steady_clock::time_point;
/// Returns the point in time `seconds` from now.
Deadline after(double seconds);

/// Kinds of messages between rank 0 and another rank. Each message has a kind, a number and a text.
enum class FrameKind : int64_t {
  /// The first frame. Number: rank << 32 | size; text: token, line end, host. The enumerator's value is "voxgrad" in
  /// ASCII.
  hello = 0x766f78'67726164,
  welcome,  ///< text: rank 0's message
  refused,  ///< text: the reason
  calls,    ///< to rank 0; number: collectives so far; text: calls since the previous frame of this kind
  late,     ///< to rank 0; number: index of the late call; text: its name and the timeout
  end,      ///< the receiver ends its process
  bye       ///< the sender leaves the group
};
inline constexpr int64_t kMaxText = 1 << 24;  // bytes of the text of a frame

/// A message between two ranks.
struct Frame {
  FrameKind kind;
  int64_t number = 0;
  std::string text{};
};

/// A connected, non-blocking socket with a buffer for each direction. The connection closes itself if the peer
/// disappears, sends an invalid frame, or does not read.
class Connection {
 public:
  Connection() = default;  ///< creates a closed connection
  /// Takes ownership of the socket.
  explicit Connection(int handle);
  ~Connection() { close(); }
  Connection(Connection&& other) noexcept { *this = std::move(other); }
  Connection& operator=(Connection&& other) noexcept;

  bool is_open() const { return handle_ >= 0; }
  int handle() const { return handle_; }
  /// Returns whether the buffer still contains frames to send.
  bool is_sending() const { return is_open() && !output_.empty(); }
  /// Sets the maximum size of the text of received frames, kMaxText by default.
  void set_max_text(int64_t bytes) { max_text_ = bytes; }

  /// Appends a frame to the buffer and sends as much of the buffer as the socket accepts. Does nothing if closed.
  void send(const Frame& frame);
  /// Moves bytes in both directions without blocking.
  void transfer();
  /// Returns the next complete frame, or nullopt if there is none. Also returns frames that arrived before the
  /// connection was closed.
  std::optional<Frame> next();
  void close();

 private:
  void flush();

  int handle_ = -1;
  int64_t max_text_ = kMaxText;
  std::string input_;
  std::string output_;
};

/// Waits until a connection can transfer bytes or a handle is readable, at most 0.1 seconds and not beyond the
/// deadline. Then calls transfer() of the connections that are ready. Skips closed connections.
void poll_connections(const std::vector<Connection*>& connections, const std::vector<int>& handles, Deadline deadline);

/// Connects to one of the addresses of a host before the deadline. If no address accepts the connection, returns a
/// closed connection and sets `reason`.
Connection connect_to(const std::string& host, int port, Deadline deadline, std::string& reason);

/// The sockets on which rank 0 waits for the other ranks.
class Listener : NonCopyable {
 public:
  /// Listens on the addresses of `host` that belong to this machine. Listens on all interfaces instead if `token` is
  /// not empty and other machines could not connect to these addresses. Other machines cannot connect if `host` has no
  /// address on this machine, or if `host` is a name other than localhost that resolves only to loopback addresses
  /// (such as Debian's 127.0.1.1). Port 0 selects a free port. Throws Error with the reason if no address can be used.
  Listener(const std::string& host, int port, std::string token);
  ~Listener() { close(); }

  int port() const { return port_; }
  const std::string& token() const { return token_; }
  const std::vector<int>& handles() const { return handles_; }
  /// Returns whether only processes of this machine can connect.
  bool is_loopback_only() const;
  /// Returns the addresses and the port for messages: "127.0.1.1, port 29500".
  std::string describe() const;

 private:
  std::string listen_on(const char* host);
  void close();

  std::vector<int> handles_;
  std::vector<std::string> addresses_;
  int port_;
  std::string token_;
};

/// Replaces bytes that are not printable ASCII by escapes such as "\x1b", so that a peer's text can be printed.
std::string escape(std::string_view text);

}  // namespace voxgrad::distributed
