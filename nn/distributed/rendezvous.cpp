// Implements the rendezvous: the constructors connect the ranks, and a thread that calls monitor() watches the
// connections.
#include "nn/distributed/detail/rendezvous.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace voxgrad::distributed {
namespace {

constexpr const char* kOp = "distributed::Rendezvous";
constexpr double kHelloSeconds = 5;     // limit between accepting a connection and receiving its hello
constexpr double kFarewellSeconds = 1;  // limit for sending the last frames to a peer that does not read
constexpr double kGraceSeconds = 2;     // time that a rank waits beyond its limit for rank 0's refusal
constexpr double kSilentSeconds = 2;    // a rank that sends no frames for this long is missing; ranks send every second
constexpr double kCallsSeconds = 2.5;   // rank 0 waits this long for the latest calls; longer than kSilentSeconds
constexpr double kVerdictSeconds = 5;   // a rank that reports a late collective waits this long for rank 0
constexpr int64_t kMaxHello = 4096;     // bytes of a hello's text; small, because the peer may not have the token
constexpr int kMaxAccepted = 64;        // new connections per round
using Clock = std::chrono::steady_clock;

/// Compares two tokens in a time that depends only on their lengths.
bool is_same_token(std::string_view given, std::string_view token) {
  volatile unsigned char difference = given.size() != token.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference = static_cast<unsigned char>(difference | (given[i] ^ (i < token.size() ? token[i] : '\0')));
  return difference == 0;
}

/// A connection that has not sent its hello.
struct Newcomer {
  Connection connection;
  Deadline deadline;
};

}  // namespace

std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

std::string random_token() {
  std::array<unsigned char, 16> bytes;
  check(::getentropy(bytes.data(), bytes.size()) == 0, kOp, "getentropy failed: ", std::strerror(errno));
  std::string token;
  for (const unsigned char byte : bytes) token += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  return token;
}

std::optional<Hello> parse_hello(const Frame& frame) {
  if (frame.kind != FrameKind::hello) return std::nullopt;
  const std::string_view text = frame.text;
  const size_t cut = std::min(text.rfind('\n'), text.size());
  return Hello{.rank = static_cast<int>(frame.number >> 32),
               .size = static_cast<int>(frame.number & 0x7fffffff),
               .token = text.substr(0, cut),
               .host = escape(text.substr(std::min(cut + 1, text.size())).substr(0, 255))};
}

std::vector<Call> parse_calls(std::string_view text) {
  std::vector<Call> calls;
  while (text.size() > sizeof(Signature)) {
    Call& call = calls.emplace_back();
    std::memcpy(&call.signature, text.data(), sizeof(Signature));
    text.remove_prefix(sizeof(Signature));
    call.description = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(call.description.size() + 1, text.size()));
  }
  return calls;
}

void append_call(std::string& text, const Call& call) {
  text.append(reinterpret_cast<const char*>(&call.signature), sizeof call.signature);
  text += call.description;
  text += '\n';
}

void print_failure(int rank, int size, const std::string& what) {
  const std::string line = concat("rank ", rank, " of ", size, " on host ", escape(host_name()), ": ", what, '\n');
  std::fflush(nullptr);
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

Rendezvous::Rendezvous(int rank, int size)
    : rank_(rank), size_(size), peers_(static_cast<size_t>(rank == 0 ? size : 1)) {}

Rendezvous::Rendezvous(const Listener& listener, int size, const std::string& message, double seconds)
    : Rendezvous(0, size) {
  message_ = message;
  const Deadline end = after(seconds);
  std::deque<Newcomer> newcomers;
  std::string refused;  // the reason of the last refusal
  while (!missing().empty()) {
    if (Clock::now() >= end) {
      const std::string why = concat(
          list_ranks(missing()), " of ", size_, " did not connect to rank 0 on host ", escape(host_name()), ", ",
          listener.describe(), ", within ", seconds, " s", refused.empty() ? "" : "; refused: ", refused,
          listener.is_loopback_only() && listener.token().empty()
              ? "; for ranks on other machines, set MASTER_ADDR to an address of rank 0's network, or VOXGRAD_TOKEN"
              : "");
      send_to_all({FrameKind::refused, 0, why});
      fail(kOp, why);
    }
    std::vector<Connection*> all = connections();
    for (Newcomer& newcomer : newcomers) all.push_back(&newcomer.connection);
    poll_connections(all, listener.handles(), end);
    for (Newcomer& newcomer : newcomers) {
      const auto hello = newcomer.connection.next();
      if (hello)
        if (std::string why = admit(newcomer.connection, *hello, listener.token()); !why.empty()) refused = why;
      if (hello || Clock::now() > newcomer.deadline) newcomer.connection.close();
    }
    std::erase_if(newcomers, [](const Newcomer& newcomer) { return !newcomer.connection.is_open(); });
    // Limits the connections per round and drops the oldest, so that a flood cannot delay rank 0 or exhaust its file
    // descriptors.
    for (const int handle : listener.handles())
      for (int i = 0; i < kMaxAccepted; ++i) {
        const int socket = ::accept4(handle, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (socket < 0) break;
        newcomers.push_back({Connection(socket), after(kHelloSeconds)});
        newcomers.back().connection.set_max_text(kMaxHello);
      }
    while (std::ssize(newcomers) > size_ + 4 * kMaxAccepted) newcomers.pop_front();
  }
  send_to_all({FrameKind::welcome, 0, message_});
}

Rendezvous::Rendezvous(int rank, int size, const std::string& host, int port, const std::string& token, double seconds)
    : Rendezvous(rank, size) {
  const Deadline end = after(seconds), verdict = after(seconds + kGraceSeconds);
  Connection& rank0 = peers_[0].connection;
  std::string reason;
  while (Clock::now() < end) {
    rank0 = connect_to(host, port, end, reason);
    if (rank0.is_open()) reason = "the process at this address did not accept the rank";
    rank0.send({FrameKind::hello, int64_t{rank_} << 32 | size_, token + '\n' + host_name()});
    while (rank0.is_open() && Clock::now() < verdict) {
      poll_connections({&rank0}, {}, verdict);
      if (const auto answer = rank0.next()) {
        check(answer->kind == FrameKind::welcome, kOp, escape(answer->text));
        peers_[0].is_present = true;
        message_ = answer->text;
        return;
      }
    }
    std::this_thread::sleep_until(after(0.05));
  }
  fail(kOp, "rank ", rank_, " cannot reach rank 0 at ", host, ", port ", port, ", within ", seconds, " s: ", reason);
}

/// Takes ownership of the connection, or refuses it and returns the reason.
std::string Rendezvous::admit(Connection& connection, const Frame& frame, const std::string& token) {
  const std::optional<Hello> hello = parse_hello(frame);
  if (!hello) return {};  // the peer is not a rank and gets no answer
  const auto& [rank, size, given_token, host] = *hello;
  std::string why;
  if (!is_same_token(given_token, token))
    why = "a process sent a token (VOXGRAD_TOKEN) that differs from rank 0's";
  else if (size != size_)
    why = concat("rank ", rank, " on host ", host, " has WORLD_SIZE ", size, ", but rank 0 has ", size_);
  else if (rank <= 0 || rank >= size_)
    why = concat("a process on host ", host, rank == 0 ? " is also rank 0" : concat(" is rank ", rank, " of ", size));
  else if (peers_[static_cast<size_t>(rank)].connection.is_open())
    why = concat("two processes are rank ", rank, ", the second one on host ", host);
  if (why.empty()) {
    connection.set_max_text(kMaxText);
    peers_[static_cast<size_t>(rank)] = {.connection = std::move(connection), .is_present = true};
  } else {
    connection.send({FrameKind::refused, 0, why});
  }
  return why;
}

std::vector<int> Rendezvous::missing() const {
  std::vector<int> ranks;
  for (int rank = 1; rank < size_; ++rank)
    if (!peers_[static_cast<size_t>(rank)].connection.is_open()) ranks.push_back(rank);
  return ranks;
}

void Rendezvous::watch(std::function<Progress()> progress) {
  progress_ = std::move(progress);
  watcher_ = std::thread([this] {
    while (!stopping_) monitor();
  });
}

void Rendezvous::stop_watching() {
  stopping_ = true;
  if (watcher_.joinable()) watcher_.join();
}

/// Runs one round of the monitoring thread. Receives for 0.1 seconds regardless of the number of frames, so that a
/// round always takes this time.
void Rendezvous::monitor() {
  for (const Deadline end = after(0.1); Clock::now() < end && !stopping_;) receive(end);
  share_calls();
  compare_calls();
  const Progress own = progress_();
  if (!own.late.empty()) report_late({FrameKind::late, own.late_call, own.late});
  if (late_ && Clock::now() > late_deadline_) end_late();
  if (own.error.empty()) return;
  // Waits first, because another rank may have caused the error and may report the cause in the meantime.
  if (!error_deadline_) error_deadline_ = after(2);
  if (Clock::now() > *error_deadline_) end(own.error);
}

std::vector<Connection*> Rendezvous::connections() {
  std::vector<Connection*> all;
  for (Peer& peer : peers_) all.push_back(&peer.connection);
  return all;
}

/// Sends a frame to all peers, and waits until it has been sent, at most kFarewellSeconds.
void Rendezvous::send_to_all(const Frame& frame) {
  for (Peer& peer : peers_) peer.connection.send(frame);
  const auto is_sending = [](const Peer& peer) { return peer.connection.is_sending(); };
  for (const Deadline end = after(kFarewellSeconds); Clock::now() < end && std::ranges::any_of(peers_, is_sending);)
    poll_connections(connections(), {}, end);
}

/// Waits for frames and handles them. Ends all processes if a peer has disappeared. If the peer is rank 0, rank 1
/// prints the cause.
void Rendezvous::receive(Deadline deadline) {
  poll_connections(connections(), {}, deadline);
  for (size_t i = 0; i < peers_.size(); ++i) {
    while (const auto frame = peers_[i].connection.next()) handle(peers_[i], *frame);
    if (!peers_[i].is_present || peers_[i].connection.is_open()) continue;
    end(rank_ <= 1 ? concat("rank ", i, ": its process ended") : "");  // on other ranks, the only peer is rank 0
  }
}

void Rendezvous::handle(Peer& peer, const Frame& frame) {
  peer.last_heard = Clock::now();
  if (frame.kind == FrameKind::end) end({});
  if (frame.kind == FrameKind::late) report_late({frame.kind, frame.number, escape(frame.text)});
  if (frame.kind == FrameKind::bye) {
    peer.is_present = false;
    peer.connection.close();
  }
  if (frame.kind != FrameKind::calls) return;
  peer.num_calls = frame.number;
  for (Call& call : parse_calls(frame.text)) peer.calls.push_back(std::move(call));
}

void Rendezvous::add_call(const Call& call) {
  const std::lock_guard lock(mutex_);
  ++num_calls_;
  append_call(fresh_calls_, call);
}

/// Sends this rank's new calls to rank 0. If there are none, sends an empty frame once a second.
void Rendezvous::share_calls() {
  Frame calls{FrameKind::calls};
  {
    const std::lock_guard lock(mutex_);
    calls.number = num_calls_;
    calls.text.swap(fresh_calls_);
  }
  if (calls.text.empty() && Clock::now() < next_calls_) return;
  next_calls_ = after(1);
  if (rank_ == 0)
    handle(peers_[0], calls);
  else
    peers_[0].connection.send(calls);
}

/// On rank 0, compares the calls that all ranks have made, and ends all processes if they differ.
void Rendezvous::compare_calls() {
  const auto has_call = [](const Peer& peer) { return !peer.calls.empty(); };
  while (rank_ == 0 && std::ranges::all_of(peers_, has_call)) {
    std::vector<Call> calls;
    for (Peer& peer : peers_) {
      calls.push_back(std::move(peer.calls.front()));
      peer.calls.pop_front();
    }
    if (const std::string what = describe_disagreement(calls); !what.empty()) end(escape(what));
  }
}

/// Reports a late collective to rank 0, which names the missing ranks once it has the latest calls of the other ranks.
void Rendezvous::report_late(const Frame& frame) {
  if (late_) return;
  late_ = frame;
  late_deadline_ = after(rank_ == 0 ? kCallsSeconds : kVerdictSeconds);
  if (rank_ != 0) peers_[0].connection.send(frame);
}

/// Names the ranks that have not made the late call or that are silent, and ends all processes.
void Rendezvous::end_late() {
  std::vector<int> missing;
  const Deadline oldest = after(-kSilentSeconds);
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (rank_ != 0 || peer.num_calls < late_->number || (peer.is_present && peer.last_heard < oldest))
      missing.push_back(static_cast<int>(rank));
  }
  end(missing.empty() ? concat("all ranks joined ", late_->text, ", but it did not complete")
                      : concat(list_ranks(missing), " did not join ", late_->text));
}

/// Ends this process and, through rank 0, the processes of all other ranks.
void Rendezvous::end(const std::string& what) {
  if (!what.empty()) print_failure(rank_, size_, what);
  send_to_all({FrameKind::end});
  std::_Exit(1);
}

void Rendezvous::end_others() {
  stop_watching();
  send_to_all({FrameKind::end});
}

/// Leaves the group. Rank 0 first compares the last calls of the other ranks, which arrive before the bye frames of
/// these ranks.
Rendezvous::~Rendezvous() {
  stop_watching();
  share_calls();
  if (rank_ != 0) send_to_all({FrameKind::bye});
  const auto is_present = [](const Peer& peer) { return peer.connection.is_open(); };
  const Deadline end = after(num_calls_ > 0 ? kFarewellSeconds : 0);
  while (Clock::now() < end && std::ranges::any_of(peers_, is_present)) {
    poll_connections(connections(), {}, end);
    for (Peer& peer : peers_)
      while (const auto frame = peer.connection.next()) handle(peer, *frame);
    compare_calls();
  }
  if (rank_ == 0) send_to_all({FrameKind::bye});
}

}  // namespace voxgrad::distributed
