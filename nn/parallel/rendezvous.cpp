// Connections with rank 0: the greeting (gather, join), and a thread that watches them (look).
#include "nn/parallel/rendezvous.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "core/error.h"
#include "nn/parallel/connection.h"

namespace voxgrad::parallel {
namespace {

constexpr const char* kOp = "parallel::Rendezvous";
constexpr double kHelloSeconds = 5;      // from a connection to its hello
constexpr double kFarewellSeconds = 1;   // for the last frames, if a peer does not read
constexpr double kGraceSeconds = 2;      // for rank 0's refusal to arrive, which it sends when its time has passed
constexpr double kCallsSeconds = 0.5;    // for the others' latest calls to reach rank 0
constexpr double kVerdictSeconds = 5;    // from a report of a late collective until rank 0 ends all processes
constexpr int64_t kLongestHello = 4096;  // bytes of the text, from a peer that may have no token
constexpr int kAcceptedAtOnce = 64;      // connections
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Takes the same time for all tokens of one length.
bool is_same_token(std::string_view given, std::string_view token) {
  volatile unsigned char difference = given.size() != token.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference = static_cast<unsigned char>(difference | (given[i] ^ (i < token.size() ? token[i] : '\0')));
  return difference == 0;
}

/// A connection that has not said hello yet.
struct Newcomer {
  Connection connection;
  Deadline deadline;
};

/// A rank's call of a collective.
struct Call {
  Signature signature;
  std::string description;
};

struct Peer {
  Connection connection{};
  bool is_present = false;   // from its hello to its bye
  int64_t num_calls = 0;     // of collectives, as far as rank 0 has received them; rank 0 counts its own, too
  std::deque<Call> calls{};  // those that have not been compared
};

}  // namespace

std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

std::string random_token() {
  std::array<unsigned char, 16> bytes;
  check(::getentropy(bytes.data(), bytes.size()) == 0, kOp, "there are no random numbers: ", std::strerror(errno));
  std::string token;
  for (const unsigned char byte : bytes) token += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  return token;
}

void print_failure(int rank, int size, const std::string& what) {
  const std::string line = concat("rank ", rank, " of ", size, " on host ", escape(host_name()), ": ", what, '\n');
  std::fflush(nullptr);
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

class Rendezvous::Impl {
 public:
  Impl(int rank, int size) : rank_(rank), size_(size), peers_(static_cast<size_t>(rank == 0 ? size : 1)) {}
  ~Impl();
  void gather(const Listener& listener, const std::string& message, double seconds);
  std::string join(const std::string& host, int port, const std::string& token, double seconds);
  void watch(std::function<Progress()> progress);
  void add_call(const Signature& signature, const std::string& description);
  void end_others();

 private:
  std::string admit(Connection& connection, const Frame& hello, const std::string& token);
  std::vector<int> missing() const;
  std::vector<Connection*> connections();
  void tell_all(const Frame& frame);
  void flush(double seconds);
  void stop_watching();
  void look();
  void receive(int ms);
  void handle(Peer& peer, const Frame& frame);
  void share_calls();
  void compare_calls();
  void note_late(const Frame& frame);
  [[noreturn]] void end_late();
  [[noreturn]] void end(const std::string& what);
  [[noreturn]] void end_without(size_t peer);

  const int rank_;
  const int size_;
  std::vector<Peer> peers_;  // on rank 0: by rank, the first one unconnected; on others: rank 0
  std::function<Progress()> progress_;
  std::optional<Deadline> error_deadline_;  // until which a rank may be found that caused the error
  std::optional<Frame> late_;               // the first report of a late collective
  Deadline late_deadline_;                  // for rank 0's decision about it
  std::atomic<bool> stopping_ = false;
  std::thread watcher_;

  std::mutex mutex_;         // guards the members below
  std::string fresh_calls_;  // not shared yet: the signature, the description and a line end of each
  int64_t num_calls_ = 0;
};

/// Takes the connection over, or refuses it and returns the reason.
std::string Rendezvous::Impl::admit(Connection& connection, const Frame& hello, const std::string& token) {
  if (hello.kind != FrameKind::hello) return {};  // a stranger
  const size_t cut = std::min(hello.text.rfind('\n'), hello.text.size());
  const std::string host = escape(hello.text.substr(std::min(cut + 1, hello.text.size())).substr(0, 255));
  const auto rank = static_cast<int>(hello.number >> 32), size = static_cast<int>(hello.number & 0x7fffffff);
  std::string why;
  if (!is_same_token(std::string_view(hello.text).substr(0, cut), token))
    why = "a process came with another token (VOXGRAD_TOKEN) than rank 0's";
  else if (size != size_)
    why = concat("rank ", rank, " on host ", host, " counts ", size, " ranks (WORLD_SIZE), rank 0 counts ", size_);
  else if (rank <= 0 || rank >= size_)
    why = concat("a process on host ", host, rank == 0 ? " is rank 0, too" : concat(" is rank ", rank, " of ", size));
  else if (peers_[static_cast<size_t>(rank)].connection.is_open())
    why = concat("two processes are rank ", rank, ", the second one on host ", host);
  if (why.empty()) {
    connection.set_longest_text(kMaxText);
    peers_[static_cast<size_t>(rank)] = {.connection = std::move(connection), .is_present = true};
  } else {
    connection.send({FrameKind::refused, 0, why});
  }
  return why;
}

std::vector<int> Rendezvous::Impl::missing() const {
  std::vector<int> ranks;
  for (int rank = 1; rank < size_; ++rank)
    if (!peers_[static_cast<size_t>(rank)].connection.is_open()) ranks.push_back(rank);
  return ranks;
}

void Rendezvous::Impl::gather(const Listener& listener, const std::string& message, double seconds) {
  const Deadline end = after(seconds);
  std::deque<Newcomer> newcomers;
  std::string refused;  // the last reason
  while (!missing().empty()) {
    if (Clock::now() >= end) {
      const std::string why =
          concat(list_ranks(missing()), " of ", size_, " did not come to rank 0 on host ", escape(host_name()), ", ",
                 listener.describe(), ", within ", seconds, " s", refused.empty() ? "" : "; refused: ", refused);
      tell_all({FrameKind::refused, 0, why});
      flush(kFarewellSeconds);
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
    // Few at a time, and the oldest go: a flood must not hold rank 0 up, or use up its file descriptors.
    for (const int handle : listener.handles())
      for (int i = 0; i < kAcceptedAtOnce; ++i) {
        const int socket = ::accept4(handle, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (socket < 0) break;
        newcomers.push_back({Connection(socket), after(kHelloSeconds)});
        newcomers.back().connection.set_longest_text(kLongestHello);
      }
    while (std::ssize(newcomers) > size_ + 4 * kAcceptedAtOnce) newcomers.pop_front();
  }
  tell_all({FrameKind::welcome, 0, message});
  flush(kFarewellSeconds);
}

std::string Rendezvous::Impl::join(const std::string& host, int port, const std::string& token, double seconds) {
  const Deadline end = after(seconds), verdict = after(seconds + kGraceSeconds);
  const std::string place = concat(host, ", port ", port);
  Connection& rank0 = peers_[0].connection;
  std::string reason;
  while (!(rank0 = connect_to(host, port, end, reason)).is_open()) {
    check(Clock::now() < end, kOp, "rank ", rank_, " cannot reach rank 0 at ", place, ", within ", seconds,
          " s: ", reason);
    std::this_thread::sleep_for(milliseconds(50));
  }
  peers_[0].is_present = true;
  rank0.send({FrameKind::hello, int64_t{rank_} << 32 | size_, token + '\n' + host_name()});
  while (true) {
    if (const auto answer = rank0.next()) {
      check(answer->kind == FrameKind::welcome, kOp, escape(answer->text));
      return answer->text;
    }
    check(rank0.is_open(), kOp, "the process at ", place, ", is not rank 0, or it ended");
    check(Clock::now() < verdict, kOp, "rank 0 at ", place, ", did not admit rank ", rank_, " within ",
          seconds + kGraceSeconds, " s");
    poll_connections({&rank0}, {}, verdict);
  }
}

void Rendezvous::Impl::watch(std::function<Progress()> progress) {
  progress_ = std::move(progress);
  watcher_ = std::thread([this] {
    while (!stopping_) look();
  });
}

void Rendezvous::Impl::stop_watching() {
  stopping_ = true;
  if (watcher_.joinable()) watcher_.join();
}

/// One round of the watching thread, 0.1 seconds.
void Rendezvous::Impl::look() {
  receive(100);
  share_calls();
  compare_calls();
  const Progress own = progress_();
  if (!own.late.empty()) note_late({FrameKind::late, own.late_call, own.late});
  if (late_ && Clock::now() > late_deadline_) end_late();
  if (own.error.empty()) return;
  // Another rank may be found that caused the error.
  if (!error_deadline_) error_deadline_ = after(2);
  if (Clock::now() > *error_deadline_) end(own.error);
}

std::vector<Connection*> Rendezvous::Impl::connections() {
  std::vector<Connection*> all;
  for (Peer& peer : peers_) all.push_back(&peer.connection);
  return all;
}

void Rendezvous::Impl::tell_all(const Frame& frame) {
  for (Peer& peer : peers_) peer.connection.send(frame);
}

/// Waits until the peers have received all frames, but not longer than the time.
void Rendezvous::Impl::flush(double seconds) {
  const auto is_sending = [](const Peer& peer) { return peer.connection.is_sending(); };
  for (const Deadline end = after(seconds); Clock::now() < end && std::ranges::any_of(peers_, is_sending);)
    poll_connections(connections(), {}, end, 10);
}

/// Waits up to `ms` for frames and handles them. Ends all processes if a peer is gone.
void Rendezvous::Impl::receive(int ms) {
  poll_connections(connections(), {}, after(ms / 1000.0), ms);
  for (size_t i = 0; i < peers_.size(); ++i) {
    while (const auto frame = peers_[i].connection.next()) handle(peers_[i], *frame);
    if (peers_[i].is_present && !peers_[i].connection.is_open()) end_without(i);
  }
}

void Rendezvous::Impl::handle(Peer& peer, const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::bye:
      peer.is_present = false;
      return peer.connection.close();
    case FrameKind::end:
      return end({});
    case FrameKind::late:
      return note_late({frame.kind, frame.number, escape(frame.text)});
    case FrameKind::calls:
      peer.num_calls = frame.number;
      for (size_t at = 0, line_end = 0; at + sizeof(Signature) < frame.text.size(); at = line_end + 1) {
        Call& call = peer.calls.emplace_back();
        std::memcpy(&call.signature, &frame.text[at], sizeof(Signature));
        line_end = std::min(frame.text.find('\n', at + sizeof(Signature)), frame.text.size());
        call.description = frame.text.substr(at + sizeof(Signature), line_end - at - sizeof(Signature));
      }
      return;
    default:
      return;
  }
}

void Rendezvous::Impl::add_call(const Signature& signature, const std::string& description) {
  const std::lock_guard lock(mutex_);
  ++num_calls_;
  fresh_calls_.append(reinterpret_cast<const char*>(&signature), sizeof signature);
  fresh_calls_ += description + '\n';
}

/// Sends this rank's new calls to rank 0.
void Rendezvous::Impl::share_calls() {
  Frame calls{FrameKind::calls};
  {
    const std::lock_guard lock(mutex_);
    calls.number = num_calls_;
    calls.text.swap(fresh_calls_);
  }
  if (calls.text.empty()) return;
  if (rank_ == 0)
    handle(peers_[0], calls);
  else
    peers_[0].connection.send(calls);
}

/// Compares the calls that all ranks have made, on rank 0, and ends all processes if they differ.
void Rendezvous::Impl::compare_calls() {
  const auto has_call = [](const Peer& peer) { return !peer.calls.empty(); };
  while (rank_ == 0 && std::ranges::all_of(peers_, has_call)) {
    std::vector<Signature> signatures;
    std::vector<std::string> descriptions;
    for (Peer& peer : peers_) {
      signatures.push_back(peer.calls.front().signature);
      descriptions.push_back(escape(peer.calls.front().description));
      peer.calls.pop_front();
    }
    if (!calls_agree(signatures)) end(describe_disagreement(descriptions));
  }
}

/// Reports a late collective to rank 0, which names the missing ranks once it has the latest calls of the others.
void Rendezvous::Impl::note_late(const Frame& frame) {
  if (late_) return;
  late_ = frame;
  late_deadline_ = after(rank_ == 0 ? kCallsSeconds : kVerdictSeconds);
  if (rank_ != 0) peers_[0].connection.send(frame);
}

/// Names the ranks that have not made the call for which others wait, and ends all processes.
void Rendezvous::Impl::end_late() {
  std::vector<int> missing;
  for (size_t rank = 0; rank < peers_.size(); ++rank)
    if (rank_ != 0 || peers_[rank].num_calls < late_->number) missing.push_back(static_cast<int>(rank));
  end(missing.empty() ? concat("all ranks came to ", late_->text, ", but it did not end")
                      : concat(list_ranks(missing), " did not come to ", late_->text));
}

/// Ends this process and, by way of rank 0, all others.
void Rendezvous::Impl::end(const std::string& what) {
  if (!what.empty()) print_failure(rank_, size_, what);
  tell_all({FrameKind::end});
  flush(kFarewellSeconds);
  std::_Exit(1);
}

/// Ends all processes, because one is gone. If it is rank 0, rank 1 prints the cause.
void Rendezvous::Impl::end_without(size_t peer) {
  if (rank_ == 0) end(concat("rank ", peer, ": its process ended"));
  end(rank_ == 1 ? "rank 0: its process ended" : "");
}

void Rendezvous::Impl::end_others() {
  stop_watching();
  tell_all({FrameKind::end});
  flush(kFarewellSeconds);
}

/// Leaves in order. Rank 0 first compares the last calls of the others, which come with their farewells.
Rendezvous::Impl::~Impl() {
  stop_watching();
  share_calls();
  const bool has_calls = num_calls_ > 0;
  if (rank_ != 0) tell_all({FrameKind::bye});
  const auto is_present = [](const Peer& peer) { return peer.connection.is_open(); };
  const Deadline end = after(has_calls ? kFarewellSeconds : 0);
  while (Clock::now() < end && std::ranges::any_of(peers_, is_present)) {
    poll_connections(connections(), {}, end);
    for (Peer& peer : peers_)
      while (const auto frame = peer.connection.next()) handle(peer, *frame);
    compare_calls();
  }
  if (rank_ == 0) tell_all({FrameKind::bye});
  flush(kFarewellSeconds);
}

Rendezvous::Rendezvous(const Listener& listener, int size, const std::string& message, double seconds)
    : impl_(std::make_unique<Impl>(0, size)), message_(message) {
  impl_->gather(listener, message, seconds);
}

Rendezvous::Rendezvous(int rank, int size, const std::string& host, int port, const std::string& token, double seconds)
    : impl_(std::make_unique<Impl>(rank, size)) {
  message_ = impl_->join(host, port, token, seconds);
}

Rendezvous::~Rendezvous() = default;

void Rendezvous::watch(std::function<Progress()> progress) { impl_->watch(std::move(progress)); }

void Rendezvous::add_call(const Signature& signature, const std::string& description) {
  impl_->add_call(signature, description);
}

void Rendezvous::end_others() { impl_->end_others(); }

}  // namespace voxgrad::parallel
