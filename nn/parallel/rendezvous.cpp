#include "nn/parallel/rendezvous.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/error.h"

namespace voxgrad::parallel {
namespace {

constexpr const char* kOp = "parallel::Rendezvous";
constexpr int64_t kMagic = 0x766f78'67726164;  // "voxgrad"
constexpr int64_t kLongest = 1 << 16;          // bytes of a text
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// What the ranks say to each other: a kind, a number and a text.
enum class Kind : int64_t {
  hello = kMagic,  // number: rank << 32 | size; text: host
  welcome,         // text: rank 0's message
  refused,         // text: why
  late,            // to rank 0; number: collectives begun; text: the one that is late
  ask,             // how many collectives were begun
  progress,        // number: as many
  end,             // to all: ends the process
  bye              // leaves in order
};
struct Frame {
  Kind kind;
  int64_t number = 0;
  std::string text{};
};

bool send_all(int handle, const void* data, size_t bytes) {
  for (const char* from = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t sent = ::send(handle, from, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    from += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(int handle, void* data, size_t bytes) {
  for (char* to = static_cast<char*>(data); bytes > 0;) {
    const ssize_t got = ::recv(handle, to, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

bool send_frame(int handle, const Frame& frame) {
  const std::array<int64_t, 3> head{static_cast<int64_t>(frame.kind), frame.number, std::ssize(frame.text)};
  std::string bytes(reinterpret_cast<const char*>(head.data()), sizeof head);
  bytes += frame.text;
  return send_all(handle, bytes.data(), bytes.size());
}

/// nullopt if the connection is gone, silent for longer than its timeout, or not one of ours.
std::optional<Frame> receive_frame(int handle) {
  std::array<int64_t, 3> head{};
  if (!receive_all(handle, head.data(), sizeof head)) return std::nullopt;
  if (head[0] < kMagic || head[0] > static_cast<int64_t>(Kind::bye) || head[2] < 0 || head[2] > kLongest)
    return std::nullopt;
  Frame frame{static_cast<Kind>(head[0]), head[1], std::string(static_cast<size_t>(head[2]), '\0')};
  if (!receive_all(handle, frame.text.data(), frame.text.size())) return std::nullopt;
  return frame;
}

void set_up(int handle, int seconds) {
  const timeval time{seconds, 0};
  const int on = 1;
  ::setsockopt(handle, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
  ::setsockopt(handle, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(handle, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);  // a machine that is gone
}

bool is_readable(int handle, int ms) {
  pollfd wanted{handle, POLLIN, 0};
  return ::poll(&wanted, 1, ms) > 0;
}

/// A socket, or -1 and the reason.
int connect_to(const std::string& address, int port, std::string& reason) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  if (const int code = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found); code != 0) {
    reason = ::gai_strerror(code);
    return -1;
  }
  int handle = -1;
  for (const addrinfo* a = found; a && handle < 0; a = a->ai_next) {
    handle = ::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (handle < 0 || ::connect(handle, a->ai_addr, a->ai_addrlen) == 0) continue;
    reason = std::strerror(errno);
    ::close(handle);
    handle = -1;
  }
  ::freeaddrinfo(found);
  return handle;
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += concat(text.empty() ? ranks.size() > 1 ? "ranks " : "rank " : ", ", rank);
  return text;
}

}  // namespace

std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

void print_failure(int rank, int size, const std::string& what) {
  const std::string line = concat("rank ", rank, " of ", size, " on host ", host_name(), ": ", what, '\n');
  std::fflush(nullptr);
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

Listener::Listener(int port) : handle_(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0)), port_(port) {
  const int on = 1, off = 0;
  const bool v6 = handle_ >= 0;
  if (!v6) handle_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ::setsockopt(handle_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in6 all6{};
  sockaddr_in all{};
  all6.sin6_family = AF_INET6;
  all.sin_family = AF_INET;
  all6.sin6_port = all.sin_port = htons(static_cast<uint16_t>(port));
  if (v6) ::setsockopt(handle_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  auto* const address = v6 ? reinterpret_cast<sockaddr*>(&all6) : reinterpret_cast<sockaddr*>(&all);
  socklen_t bytes = v6 ? sizeof all6 : sizeof all;
  if (::bind(handle_, address, bytes) != 0 || ::listen(handle_, 1024) != 0) {
    const std::string reason = std::strerror(errno);
    ::close(handle_);
    fail(kOp, "rank 0 cannot listen on port ", port, ": ", reason, "; set MASTER_PORT to one that is free");
  }
  ::getsockname(handle_, address, &bytes);
  port_ = ntohs(v6 ? all6.sin6_port : all.sin_port);
}

Listener::~Listener() { ::close(handle_); }

class Rendezvous::Impl {
 public:
  Impl(int rank, int size) : rank_(rank), size_(size), peers_(static_cast<size_t>(rank == 0 ? size : 1), -1) {}
  ~Impl();
  void gather(const Listener& listener, const std::string& message, double seconds);
  std::string join(const std::string& address, int port, double seconds);
  void watch(std::function<Progress()> progress);
  void tell_all(const Frame& frame) {
    for (const int peer : peers_)
      if (peer >= 0) send_frame(peer, frame);
  }

 private:
  std::string admit(int handle, const Frame& hello);
  void look();
  void handle_frame(size_t peer, const std::optional<Frame>& frame);
  void inquire(const Progress& own);
  /// Of this process and, by way of rank 0, of all others.
  [[noreturn]] void end(const std::string& what) {
    if (!what.empty()) print_failure(rank_, size_, what);
    tell_all({Kind::end});
    std::_Exit(1);
  }
  void drop(size_t peer) {
    ::close(peers_[peer]);
    peers_[peer] = -1;
  }

  const int rank_, size_;
  std::vector<int> peers_;  // rank 0: by rank; others: rank 0 alone; -1: gone, or none
  std::function<Progress()> progress_;
  Clock::time_point failed_{};  // when an error was first seen
  std::atomic<bool> stopping_ = false;
  std::thread watcher_;
};

/// Why the new rank cannot come; empty if it can.
std::string Rendezvous::Impl::admit(int handle, const Frame& hello) {
  const int rank = static_cast<int>(hello.number >> 32), size = static_cast<int>(hello.number & 0x7fffffff);
  if (size != size_)
    return concat("rank ", rank, " on host ", hello.text, " counts ", size, " ranks (WORLD_SIZE), rank 0 counts ",
                  size_);
  if (rank <= 0 || rank >= size_) return concat("a process on host ", hello.text, " is rank ", rank, ", too");
  int& place = peers_[static_cast<size_t>(rank)];
  if (place >= 0) return concat("two processes are rank ", rank, ", the second one on host ", hello.text);
  place = handle;
  return {};
}

void Rendezvous::Impl::gather(const Listener& listener, const std::string& message, double seconds) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  const auto refuse = [&](const std::string& why) {
    tell_all({Kind::refused, 0, why});
    fail(kOp, why);
  };
  for (int missing = size_ - 1; missing > 0;) {
    if (Clock::now() > end) {
      std::vector<int> absent;
      for (int rank = 1; rank < size_; ++rank)
        if (peers_[static_cast<size_t>(rank)] < 0) absent.push_back(rank);
      refuse(concat(list_of(absent), " of ", size_, " did not come to rank 0 on host ", host_name(), ", port ",
                    listener.port(), ", within ", seconds, " s"));
    }
    if (!is_readable(listener.handle(), 100)) continue;
    const int handle = ::accept4(listener.handle(), nullptr, nullptr, SOCK_CLOEXEC);
    if (handle < 0) continue;
    set_up(handle, 5);
    const auto hello = receive_frame(handle);
    if (!hello || hello->kind != Kind::hello) {  // somebody else's
      ::close(handle);
      continue;
    }
    if (const std::string why = admit(handle, *hello); !why.empty()) {
      send_frame(handle, {Kind::refused, 0, why});
      ::close(handle);
      refuse(why);
    }
    --missing;
  }
  tell_all({Kind::welcome, 0, message});
}

std::string Rendezvous::Impl::join(const std::string& address, int port, double seconds) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::string reason;
  while ((peers_[0] = connect_to(address, port, reason)) < 0) {
    check(Clock::now() < end, kOp, "rank ", rank_, " cannot reach rank 0 at ", address, ", port ", port, ", within ",
          seconds, " s: ", reason);
    std::this_thread::sleep_for(milliseconds(50));
  }
  set_up(peers_[0], static_cast<int>(seconds) + 10);
  send_frame(peers_[0], {Kind::hello, int64_t{rank_} << 32 | size_, host_name()});
  const auto answer = receive_frame(peers_[0]);
  check(answer.has_value(), kOp, "what answers at ", address, ", port ", port, ", is not rank 0, or it ended");
  check(answer->kind == Kind::welcome, kOp, answer->text);
  return answer->text;
}

void Rendezvous::Impl::watch(std::function<Progress()> progress) {
  progress_ = std::move(progress);
  watcher_ = std::thread([this] {
    while (!stopping_) look();
  });
}

/// One round of the watching thread, 0.1 seconds.
void Rendezvous::Impl::look() {
  std::vector<pollfd> wanted;
  for (const int peer : peers_) wanted.push_back({peer, POLLIN, 0});  // poll() passes over -1
  if (::poll(wanted.data(), wanted.size(), 100) > 0)
    for (size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i].revents != 0) handle_frame(i, receive_frame(peers_[i]));
  const Progress own = progress_();
  if (!own.late.empty()) inquire(own);
  if (own.error.empty()) return;
  if (failed_ == Clock::time_point{}) failed_ = Clock::now();
  if (Clock::now() - failed_ > milliseconds(2000)) end(own.error);  // unless a rank is found that caused it
}

void Rendezvous::Impl::handle_frame(size_t peer, const std::optional<Frame>& frame) {
  if (!frame) {  // with rank 0 gone, rank 1 tells of it
    if (rank_ == 0) end(concat("rank ", peer, ": its process ended"));
    end(rank_ == 1 ? "rank 0: its process ended" : "");
  }
  switch (frame->kind) {
    case Kind::bye:
      return drop(peer);
    case Kind::end:
      return end({});
    case Kind::ask:
      send_frame(peers_[peer], {Kind::progress, progress_().collectives});
      return;
    case Kind::late:
      return inquire({frame->number, frame->text, {}});
    default:
      return;
  }
}

/// Finds the ranks that began fewer collectives than one that waits, or that do not answer, and ends all. On other
/// ranks than 0 it has that done.
void Rendezvous::Impl::inquire(const Progress& own) {
  if (rank_ != 0) {
    send_frame(peers_[0], {Kind::late, own.collectives, own.late});
    if (!is_readable(peers_[0], 5000)) end(concat("rank 0 did not come to ", own.late));
    return;
  }
  std::vector<int64_t> begun(peers_.size(), -1);
  begun[0] = progress_().collectives;
  tell_all({Kind::ask});
  for (const auto stop = Clock::now() + milliseconds(1000); Clock::now() < stop;)
    for (size_t i = 1; i < peers_.size(); ++i) {
      if (peers_[i] < 0 || !is_readable(peers_[i], 5)) continue;
      const auto answer = receive_frame(peers_[i]);
      if (!answer) end(concat("rank ", i, ": its process ended"));
      if (answer->kind == Kind::bye) drop(i);
      if (answer->kind == Kind::progress) begun[i] = answer->number;
    }
  std::vector<int> missing;
  for (size_t i = 0; i < begun.size(); ++i)
    if (begun[i] < own.collectives) missing.push_back(static_cast<int>(i));
  end(missing.empty() ? concat("all ranks came to ", own.late, ", but it did not end")
                      : concat(list_of(missing), " did not come to ", own.late));
}

Rendezvous::Impl::~Impl() {
  stopping_ = true;
  if (watcher_.joinable()) watcher_.join();
  tell_all({Kind::bye});
  for (size_t i = 0; i < peers_.size(); ++i)
    if (peers_[i] >= 0) drop(i);
}

Rendezvous::Rendezvous(const Listener& listener, int size, const std::string& message, double seconds)
    : impl_(std::make_unique<Impl>(0, size)), message_(message) {
  impl_->gather(listener, message, seconds);
}

Rendezvous::Rendezvous(int rank, int size, const std::string& address, int port, double seconds)
    : impl_(std::make_unique<Impl>(rank, size)) {
  message_ = impl_->join(address, port, seconds);
}

Rendezvous::~Rendezvous() = default;

void Rendezvous::watch(std::function<Progress()> progress) { impl_->watch(std::move(progress)); }

void Rendezvous::end_others() { impl_->tell_all({Kind::end}); }

}  // namespace voxgrad::parallel
