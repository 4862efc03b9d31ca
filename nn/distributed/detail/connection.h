// TCP connections between ranks.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace voxgrad::distributed {

using Deadline = std::chrono::steady_clock::time_point;
/// Returns the point in time `seconds` from now.
Deadline after(double seconds);

/// Kinds of messages between rank 0 and another rank. Each message has a kind, a number and a text.
enum class FrameKind : int64_t {
  /// The first frame. Number: rank << 32 | size; text: token, line end, host. The value is "voxgrad" in ASCII.
  hello = 0x766f78'67726164,
  welcome,  ///< text: rank 0's message
  refused,  ///< text: the reason
  calls,    ///< to rank 0; text: calls since the previous frame of this kind, each with a line end
  end,      ///< the receiver ends its process
  bye       ///< the sender leaves the group
};
inline constexpr int64_t kMaxText = 1 << 22;  // bytes

/// A message between two ranks.
struct Frame {
  FrameKind kind;
  int64_t number = 0;
  std::string text{};
};

/// A connected socket with a buffer of received bytes. The connection closes itself if the peer disappears, sends an
/// invalid frame, or does not read.
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

  /// Sends a frame. Closes the connection if the peer does not read for a second. Does nothing if closed.
  void send(const Frame& frame);
  /// Moves the bytes that have arrived to the buffer, without blocking.
  void receive();
  /// Returns the next complete frame, or nullopt if there is none. Also returns frames that arrived before the
  /// connection was closed.
  std::optional<Frame> next();
  void close();

 private:
  int handle_ = -1;
  std::string input_;
};

/// Waits until bytes arrive on a connection or a peer connects to the socket `listener`, at most until the deadline and
/// at most 0.1 seconds. Then receives from the connections.
void poll_connections(const std::vector<Connection*>& connections, int listener, Deadline deadline);
/// Connects to a host, which may have several addresses. Returns a closed connection and sets `reason` if no address
/// answers before the deadline. Only the resolution of the host name may take longer.
Connection connect_to(const std::string& host, int port, Deadline deadline, std::string& reason);
/// Replaces bytes that are not printable ASCII by escapes such as "\x1b", so that a peer's text can be printed.
std::string escape(std::string_view text);

}  // namespace voxgrad::distributed
