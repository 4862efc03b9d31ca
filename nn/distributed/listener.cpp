// The class Listener: the socket on which rank 0 listens.
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "nn/distributed/detail/rendezvous.h"

namespace voxgrad::distributed {
namespace {

constexpr const char* kOp = "distributed::Rendezvous";

constexpr int kBacklog = 1024;  // connections that wait to be accepted

/// Returns a listening, non-blocking socket, or -1 with errno set if the address cannot be used.
int listening_socket(const addrinfo& a) {
  const int on = 1, off = 0;
  const int handle = ::socket(a.ai_family, a.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a.ai_protocol);
  if (handle < 0) return -1;
  ::setsockopt(handle, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  // A socket on all IPv6 interfaces also accepts IPv4.
  if (a.ai_family == AF_INET6) ::setsockopt(handle, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(handle, a.ai_addr, a.ai_addrlen) == 0 && ::listen(handle, kBacklog) == 0) return handle;
  const int reason = errno;
  ::close(handle);
  errno = reason;
  return -1;
}

}  // namespace

Listener::Listener(const std::string& host, int port, std::string token) : token_(std::move(token)) {
  const bool everywhere = !token_.empty() && host != "localhost" && host != "127.0.0.1" && host != "::1";
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  const int code = ::getaddrinfo(everywhere ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  check(code == 0, kOp, "rank 0 cannot listen on ", host, ": ", ::gai_strerror(code));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  std::vector<const addrinfo*> order;
  for (const addrinfo* a = found; a; a = a->ai_next) order.push_back(a);
  if (everywhere) std::ranges::stable_partition(order, [](const addrinfo* a) { return a->ai_family == AF_INET6; });
  for (const addrinfo* a : order) {
    handle_ = listening_socket(*a);
    if (handle_ >= 0 || errno == EADDRINUSE) break;
  }
  check(handle_ >= 0, kOp, "rank 0 cannot listen on ", host, ", port ", port, ": ", std::strerror(errno),
        "; MASTER_ADDR must be an address of rank 0's machine, unless VOXGRAD_TOKEN is set, and MASTER_PORT must be "
        "free");
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  auto* const bound = reinterpret_cast<sockaddr*>(&address);
  ::getsockname(handle_, bound, &bytes);
  char name[NI_MAXHOST] = "?", service[NI_MAXSERV] = "";
  ::getnameinfo(bound, bytes, name, sizeof name, service, sizeof service, NI_NUMERICHOST | NI_NUMERICSERV);
  port_ = std::atoi(service);
  description_ = concat(name, ", port ", port_);
}

Listener::~Listener() {
  if (handle_ >= 0) ::close(handle_);
}

}  // namespace voxgrad::distributed
