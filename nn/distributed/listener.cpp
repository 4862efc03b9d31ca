// The class Listener: the sockets on which rank 0 listens.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "core/error.h"
#include "nn/distributed/detail/rendezvous.h"

namespace voxgrad::distributed {
namespace {

constexpr const char* kOp = "distributed::Rendezvous";

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

Listener::~Listener() { close(); }

void Listener::close() {
  for (const int handle : handles_) ::close(handle);
  handles_.clear();
  addresses_.clear();
}

/// Listens on the addresses of a host that belong to this machine, or on all interfaces if `host` is null. Returns the
/// last reason why an address was not used.
std::string Listener::listen_on(const char* host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  const int requested_port = port_;
  if (const int code = ::getaddrinfo(host, std::to_string(port_).c_str(), &hints, &found)) return ::gai_strerror(code);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  std::string reason;
  for (const addrinfo* a = found; a; a = a->ai_next) {
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

}  // namespace voxgrad::distributed
