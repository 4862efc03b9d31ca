#include "nn/distributed/detail/connection.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace voxgrad::distributed {
namespace {

using Head = std::array<int64_t, 3>;  // kind, number, bytes of the text
constexpr double kSendSeconds = 1;    // limit for a peer that does not read
constexpr double kMaxAttempt = 5;     // seconds per address

double seconds_to(Deadline deadline) {
  return std::chrono::duration<double>(deadline - std::chrono::steady_clock::now()).count();
}

/// Limits the time for which connect() and send() block.
void set_timeout(int handle, double seconds) {
  const auto us = static_cast<int64_t>(std::max(seconds, 0.001) * 1e6);
  const timeval time{us / 1'000'000, us % 1'000'000};
  ::setsockopt(handle, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
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
  set_timeout(handle, kSendSeconds);
}

Connection& Connection::operator=(Connection&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(input_, other.input_);
  return *this;
}

void Connection::close() {
  if (is_open()) ::close(std::exchange(handle_, -1));
}

void Connection::send(const Frame& frame) {
  const Head head{static_cast<int64_t>(frame.kind), frame.number, std::ssize(frame.text)};
  std::string rest(reinterpret_cast<const char*>(head.data()), sizeof head);
  rest += frame.text;
  while (is_open() && !rest.empty()) {
    const ssize_t sent = ::send(handle_, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent > 0)
      rest.erase(0, static_cast<size_t>(sent));
    else if (errno == EPIPE || errno == ECONNRESET)
      return;  // the peer has closed; receive() still receives its last frames
    else if (errno != EINTR)
      close();
  }
}

void Connection::receive() {
  std::array<char, 4096> bytes;
  while (is_open() && std::ssize(input_) <= kMaxText) {  // later bytes stay in the socket until next() is called
    const ssize_t got = ::recv(handle_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0)
      input_.append(bytes.data(), static_cast<size_t>(got));
    else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
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
      bytes > kMaxText) {
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

void poll_connections(const std::vector<Connection*>& connections, int listener, Deadline deadline) {
  std::vector<pollfd> polled;  // poll() skips closed connections, whose handle is negative
  for (const Connection* c : connections) polled.push_back({c->handle(), POLLIN, 0});
  polled.push_back({listener, POLLIN, 0});
  ::poll(polled.data(), polled.size(), static_cast<int>(1e3 * std::clamp(seconds_to(deadline), 0.001, 0.1)));
  for (size_t i = 0; i < connections.size(); ++i)
    if (polled[i].revents != 0) connections[i]->receive();
}

Connection connect_to(const std::string& host, int port, Deadline deadline, std::string& reason) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  if (const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); code != 0) {
    reason = ::gai_strerror(code);
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  for (const addrinfo* a = found; a; a = a->ai_next) {
    const int handle = ::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (handle < 0) continue;
    Connection connection(handle);
    set_timeout(handle, std::min(seconds_to(deadline), kMaxAttempt));
    const int error = ::connect(handle, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    set_timeout(handle, kSendSeconds);
    if (error == 0) return connection;
    reason = std::strerror(error == EINPROGRESS ? ETIMEDOUT : error);
  }
  return {};
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
