// Implements TCP connections between ranks, and the sockets on which rank 0 listens.
#include "nn/distributed/detail/connection.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/error.h"

namespace voxgrad::distributed {
namespace {

constexpr const char* kOp = "distributed::Rendezvous";
using Head = std::array<int64_t, 3>;          // kind, number, size of the text in bytes
constexpr int64_t kMaxOutput = 2 * kMaxText;  // bytes that may wait for a peer that does not read
constexpr double kMaxAttempt = 5;             // seconds per address, except for the last address of a host

/// Returns the time to the deadline, at most a minute.
int milliseconds_to(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// Returns the addresses of a host, or of all interfaces if `host` is null. Returns null and sets `reason` if there are
/// none.
Addresses resolve(const char* host, int port, int flags, std::string& reason) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  if (const int code = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &found)) reason = ::gai_strerror(code);
  return {found, ::freeaddrinfo};
}

/// Returns whether the host is a numeric address or a standard name of the loopback interface. Unlike other names,
/// these have the same meaning on all machines.
bool is_unambiguous(const std::string& host) {
  in6_addr address;
  return host.starts_with("localhost") || host.starts_with("ip6-l") ||
         ::inet_pton(AF_INET, host.c_str(), &address) == 1 || ::inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

/// Returns a reference to the port in a socket address.
in_port_t& port_in(sockaddr* address) {
  return address->sa_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                                        : reinterpret_cast<sockaddr_in*>(address)->sin_port;
}

/// Returns the port to which a socket is bound.
int port_of(int handle) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  ::getsockname(handle, reinterpret_cast<sockaddr*>(&address), &bytes);
  return ntohs(port_in(reinterpret_cast<sockaddr*>(&address)));
}

/// Returns a listening, non-blocking socket, or -1 with errno set if the address cannot be used.
int listening_socket(const addrinfo& a) {
  const int on = 1, handle = ::socket(a.ai_family, a.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a.ai_protocol);
  if (handle < 0) return -1;
  ::setsockopt(handle, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (a.ai_family == AF_INET6) ::setsockopt(handle, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (::bind(handle, a.ai_addr, a.ai_addrlen) == 0 && ::listen(handle, 1024) == 0) return handle;
  const int reason = errno;
  ::close(handle);
  errno = reason;
  return -1;
}

}  // namespace

Deadline after(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<Deadline::duration>(std::chrono::duration<double>(seconds));
}

Connection::Connection(int handle) : handle_(handle) {
  const int on = 1;
  ::setsockopt(handle, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(handle, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);  // detects a machine that has disappeared
}

Connection& Connection::operator=(Connection&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(max_text_, other.max_text_);
  std::swap(input_, other.input_);
  std::swap(output_, other.output_);
  return *this;
}

void Connection::close() {
  if (is_open()) ::close(std::exchange(handle_, -1));
}

void Connection::send(const Frame& frame) {
  if (!is_open()) return;
  const Head head{static_cast<int64_t>(frame.kind), frame.number, std::ssize(frame.text)};
  output_.append(reinterpret_cast<const char*>(head.data()), sizeof head);
  output_ += frame.text;
  flush();
  if (std::ssize(output_) > kMaxOutput) close();
}

void Connection::flush() {
  while (is_sending()) {
    const ssize_t sent = ::send(handle_, output_.data(), output_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0)
      output_.erase(0, static_cast<size_t>(sent));
    else if (would_block())
      return;
    else if (errno == EPIPE || errno == ECONNRESET)
      output_.clear();  // the peer has closed; transfer() still receives its last frames
    else
      close();
  }
}

void Connection::transfer() {
  flush();
  std::array<char, 4096> bytes;
  // Buffers about one frame. Later bytes stay in the socket until next() has removed that frame.
  while (is_open() && std::ssize(input_) <= max_text_ + std::ssize(Head{}) * 8) {
    const ssize_t got = ::recv(handle_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0)
      input_.append(bytes.data(), static_cast<size_t>(got));
    else if (got < 0 && would_block())
      return;
    else
      close();
  }
}

std::optional<Frame> Connection::next() {
  Head head;
  if (input_.size() < sizeof head) return std::nullopt;
  std::memcpy(head.data(), input_.data(), sizeof head);
  const auto [kind, number, bytes] = head;
  if (kind < static_cast<int64_t>(FrameKind::hello) || kind > static_cast<int64_t>(FrameKind::bye) || bytes < 0 ||
      bytes > max_text_) {
    input_.clear();
    close();
    return std::nullopt;
  }
  const size_t whole = sizeof head + static_cast<size_t>(bytes);
  if (input_.size() < whole) return std::nullopt;
  Frame frame{static_cast<FrameKind>(kind), number, input_.substr(sizeof head, static_cast<size_t>(bytes))};
  input_.erase(0, whole);
  return frame;
}

void poll_connections(const std::vector<Connection*>& connections, const std::vector<int>& handles, Deadline deadline) {
  std::vector<pollfd> polled;
  for (const Connection* c : connections)  // poll() skips closed connections, whose handle is negative
    polled.push_back({c->handle(), static_cast<short>(c->is_sending() ? POLLIN | POLLOUT : POLLIN), 0});
  for (const int handle : handles) polled.push_back({handle, POLLIN, 0});
  ::poll(polled.data(), polled.size(), milliseconds_to(std::min(deadline, after(0.1))));
  for (size_t i = 0; i < connections.size(); ++i)
    if (polled[i].revents != 0) connections[i]->transfer();
}

Connection connect_to(const std::string& host, int port, Deadline deadline, std::string& reason) {
  const Addresses addresses = resolve(host.c_str(), port, 0, reason);
  for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
    const int handle = ::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
    if (handle < 0) continue;
    Connection connection(handle);
    int error = ::connect(handle, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd polled{handle, POLLOUT, 0};
      error = ETIMEDOUT;
      socklen_t bytes = sizeof error;
      const Deadline attempt = a->ai_next ? std::min(deadline, after(kMaxAttempt)) : deadline;
      int ready = 0;
      while ((ready = ::poll(&polled, 1, milliseconds_to(attempt))) < 0 && errno == EINTR) {
      }
      if (ready > 0) ::getsockopt(handle, SOL_SOCKET, SO_ERROR, &error, &bytes);
    }
    if (error == 0) return connection;
    reason = std::strerror(error);
  }
  return {};
}

Listener::Listener(const std::string& host, int port, std::string token) : port_(port), token_(std::move(token)) {
  std::string reason = listen_on(host.c_str());
  if ((handles_.empty() || (is_loopback_only() && !is_unambiguous(host))) && !token_.empty()) {
    close();
    port_ = port;
    reason = listen_on(nullptr);
  }
  check(!handles_.empty(), kOp, "rank 0 cannot listen on ", host, ", port ", port, ": ", reason,
        "; MASTER_ADDR must be an address of rank 0's machine, unless VOXGRAD_TOKEN is set");
}

void Listener::close() {
  for (const int handle : handles_) ::close(handle);
  handles_.clear();
  addresses_.clear();
}

/// Listens on the addresses of a host that belong to this machine, or on all interfaces if `host` is null. Returns the
/// last reason why an address was not used.
std::string Listener::listen_on(const char* host) {
  const int requested_port = port_;
  std::string reason;
  const Addresses addresses = resolve(host, port_, AI_PASSIVE, reason);
  for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
    char name[NI_MAXHOST] = "?";
    ::getnameinfo(a->ai_addr, a->ai_addrlen, name, sizeof name, nullptr, 0, NI_NUMERICHOST);
    // The resolver returns an address twice if /etc/hosts lists the address twice.
    if (std::ranges::find(addresses_, name) != addresses_.end()) continue;
    port_in(a->ai_addr) = htons(static_cast<uint16_t>(port_));  // the same port on all addresses
    const int handle = listening_socket(*a);
    if (handle < 0) {
      reason = std::strerror(errno);
      if (errno != EADDRINUSE || requested_port == 0) continue;
      close();
      fail(kOp, "rank 0 cannot listen on port ", port_, ": ", reason, "; set MASTER_PORT to a free port");
    }
    handles_.push_back(handle);
    addresses_.push_back(name);
    port_ = port_of(handle);
  }
  return reason;
}

bool Listener::is_loopback_only() const {
  return std::ranges::all_of(addresses_, [](const auto& a) { return a.starts_with("127.") || a == "::1"; });
}

std::string Listener::describe() const {
  std::string text;
  for (const std::string& address : addresses_) text += address + ", ";
  return concat(text, "port ", port_);
}

std::string escape(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= ' ' && byte <= '~')
      result += c;
    else
      result += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return result;
}

}  // namespace voxgrad::distributed
