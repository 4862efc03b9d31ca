// Tests of the rendezvous, by which ranks find each other without MPI, and of the shutdown of the ranks. The ranks are
// threads or forked processes. The tests need no GPU.
#include "nn/distributed/detail/rendezvous.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "nn/distributed/detail/connection.h"
#include "tests/support.h"

namespace voxgrad::distributed {
namespace {

using Clock = std::chrono::steady_clock;

void wait_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

/// Returns the message of the Error that f throws, or an empty string if f throws no Error.
template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// Runs the rendezvous of rank 0, which expects `size` ranks, and one more thread for each entry of `others`: the rank
/// and the world size of that thread. Returns the error of rank 0, followed by the errors of these threads.
std::vector<std::string> errors_of(int size, const std::vector<std::pair<int, int>>& others, double seconds) {
  const Listener listener("localhost", 0, "secret");
  std::vector<std::string> errors(others.size() + 1);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < others.size(); ++i)
    threads.emplace_back([&, i] {
      errors[i + 1] = error_of([&] {
        const Rendezvous met(others[i].first, others[i].second, "localhost", listener.port(), "secret", seconds);
        EXPECT_EQ(met.message(), "id");
      });
    });
  errors[0] = error_of([&] { const Rendezvous met(listener, size, "id", seconds); });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(Rendezvous, ParsesHellos) {
  const Frame frame{FrameKind::hello, int64_t{3} << 32 | 4, "to\nken\nno\x1b" + std::string(300, 'x')};
  const auto hello = parse_hello(frame);
  ASSERT_TRUE(hello);
  EXPECT_EQ(hello->rank, 3);
  EXPECT_EQ(hello->size, 4);
  EXPECT_EQ(hello->token, "to\nken");
  EXPECT_EQ(hello->host, "no\\x1b" + std::string(252, 'x'));
  const Frame negative{FrameKind::hello, -1, "token"};
  EXPECT_EQ(parse_hello(negative)->rank, -1);
  EXPECT_EQ(parse_hello(negative)->token, "token");
  EXPECT_EQ(parse_hello(negative)->host, "");
  EXPECT_FALSE(parse_hello({FrameKind::calls}));
}

TEST(Rendezvous, ParsesCalls) {
  std::string text;
  append_call(text, {{1, 2}, "all_reduce"});
  append_call(text, {{3, UINT64_MAX}, ""});
  // (bytes cut off at the end, number of complete calls that remain)
  for (const auto& [cut, count] : {std::pair<size_t, size_t>{0, 2}, {1, 1}, {17, 1}, {18, 1}, {28, 0}}) {
    const std::vector<Call> calls = parse_calls(text.substr(0, text.size() - cut));
    ASSERT_EQ(calls.size(), count) << cut;
    for (size_t i = 0; i < count; ++i) {
      EXPECT_EQ(calls[i].signature.messages, i == 0 ? 2 : UINT64_MAX);
      EXPECT_EQ(calls[i].description, i == 0 ? "all_reduce" : "");
    }
  }
}

TEST(Rendezvous, AllRanksReceiveTheMessageOfRank0) {
  for (const std::string& error : errors_of(3, {{2, 3}, {1, 3}}, 10)) EXPECT_EQ(error, "");
  EXPECT_EQ(errors_of(1, {}, 10)[0], "");
}

TEST(Rendezvous, NamesMissingRanks) {
  const auto start = Clock::now();
  for (const std::string& error : errors_of(4, {{2, 4}}, 0.5))
    EXPECT_NE(error.find("ranks 1, 3 of 4 did not connect to rank 0 on host"), std::string::npos) << error;
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
  const int port = Listener("localhost", 0, "").port();
  const std::string error = error_of([&] { const Rendezvous met(1, 2, "localhost", port, "", 0.2); });
  EXPECT_NE(error.find(concat("rank 1 cannot reach rank 0 at localhost, port ", port)), std::string::npos) << error;
}

TEST(Rendezvous, RejectsInconsistentRanks) {
  for (const std::string& error : errors_of(3, {{1, 3}, {1, 3}}, 0.5))
    EXPECT_NE(error.find("two processes are rank 1, the second one on host"), std::string::npos) << error;
  for (const std::string& error : errors_of(2, {{2, 3}}, 0.5))
    EXPECT_NE(error.find("has WORLD_SIZE 3, but rank 0 has 2"), std::string::npos) << error;
  for (const std::string& error : errors_of(2, {{0, 2}}, 0.5))
    EXPECT_NE(error.find("is also rank 0"), std::string::npos) << error;
}

TEST(Rendezvous, RejectsAPortInUse) {
  const Listener first("localhost", 0, "");
  const std::string error = error_of([&] { const Listener second("localhost", first.port(), ""); });
  EXPECT_NE(error.find(concat("rank 0 cannot listen on port ", first.port())), std::string::npos) << error;
}

/// A TCP client that connects to a listener but is not a rank.
class Stranger {
 public:
  explicit Stranger(int port) : handle_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(handle_, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
  }
  Stranger(Stranger&& other) noexcept : handle_(std::exchange(other.handle_, -1)) {}
  ~Stranger() { ::close(handle_); }

  void send(const std::string& bytes) const { ::send(handle_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  /// Returns the bytes that arrive until the connection is closed or no byte has arrived for `seconds`.
  std::string receive(int seconds) const {
    const timeval time{seconds, 0};
    ::setsockopt(handle_, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    std::string all;
    char bytes[256];
    for (ssize_t got; (got = ::recv(handle_, bytes, sizeof bytes, 0)) > 0;) all.append(bytes, static_cast<size_t>(got));
    return all;
  }

 private:
  int handle_;
};

/// Returns the hello message that rank 1 of 2 would send.
std::string hello(const std::string& token, const std::string& host) {
  const std::string text = token + '\n' + host;
  const std::array<int64_t, 3> head{static_cast<int64_t>(FrameKind::hello), int64_t{1} << 32 | 2, std::ssize(text)};
  return std::string(reinterpret_cast<const char*>(head.data()), sizeof head) + text;
}

/// Runs rank 0 of two ranks. Meanwhile, a second thread calls connect_strangers(port), waits 0.3 seconds and joins as
/// rank 1. Returns rank 0's error.
std::string rank0_error_with(const std::function<void(int port)>& connect_strangers, double seconds) {
  const Listener listener("127.0.0.1", 0, "secret");
  std::thread others([&] {
    connect_strangers(listener.port());
    wait_ms(300);
    EXPECT_EQ(error_of([&] { const Rendezvous met(1, 2, "127.0.0.1", listener.port(), "secret", seconds); }), "");
  });
  const std::string error = error_of([&] { const Rendezvous met(listener, 2, "id", seconds); });
  others.join();
  return error;
}

TEST(Rendezvous, IgnoresInvalidHellos) {
  const std::string good = hello("secret", "host");
  for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), std::string(1000, '\xff'),
                                   good.substr(0, 24), std::string(good).replace(16, 8, 8, '\x7f'), hello("", "host"),
                                   hello("secre", "host"), hello("secret2", "host")})
    EXPECT_EQ(rank0_error_with(
                  [&](int port) {
                    const Stranger stranger(port);
                    stranger.send(bytes);
                    EXPECT_EQ(stranger.receive(1).find("id"), std::string::npos);
                  },
                  10),
              "");
}

TEST(Rendezvous, SilentAndSlowConnectionsCauseNoDelay) {
  std::vector<Stranger> strangers;
  std::atomic<bool> done = false;
  std::thread slow;
  const auto start = Clock::now();
  EXPECT_EQ(rank0_error_with(
                [&](int port) {
                  for (int i = 0; i < 100; ++i) strangers.emplace_back(port);
                  slow = std::thread([&] {
                    for (const char byte : hello("secret", "host")) {
                      if (!done) strangers[0].send(std::string(1, byte));
                      wait_ms(done ? 0 : 200);
                    }
                  });
                },
                10),
            "");
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(3));
  done = true;
  slow.join();
}

/// The peer sends the right token but reads nothing. Rank 0 sends more bytes than the socket's buffers can hold.
TEST(Rendezvous, APeerThatDoesNotReadCausesNoDelay) {
  const Listener listener("127.0.0.1", 0, "secret");
  const Stranger peer(listener.port());
  peer.send(hello("secret", "host"));
  const auto start = Clock::now();
  { const Rendezvous met(listener, 2, std::string(1 << 23, 'x'), 10); }
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(4));
}

TEST(Rendezvous, ReportsAPeerThatDisconnectedAsMissing) {
  const Listener listener("127.0.0.1", 0, "secret");
  Stranger(listener.port()).send(hello("secret", "host"));
  const std::string error = error_of([&] { const Rendezvous met(listener, 2, "id", 1); });
  EXPECT_NE(error.find("rank 1 of 2 did not connect"), std::string::npos) << error;
}

TEST(Rendezvous, EscapesHostNamesInErrors) {
  const Listener listener("127.0.0.1", 0, "secret");
  const Stranger first(listener.port()), second(listener.port());
  for (const Stranger* peer : {&first, &second}) {
    std::string bytes = hello("secret", "\x1b[2J\r");
    bytes[8] = 3;  // a world size of 3
    peer->send(bytes);
  }
  const std::string error = error_of([&] { const Rendezvous met(listener, 2, "id", 0.5); });
  EXPECT_NE(error.find("refused: rank 1 on host "), std::string::npos) << error;
  EXPECT_TRUE(std::ranges::all_of(error, [](char c) { return c >= ' ' && c <= '~'; })) << error;
}

TEST(Rendezvous, RejectsAWrongToken) {
  const Listener listener("localhost", 0, "secret");
  std::string refused;
  std::thread other(
      [&] { refused = error_of([&] { const Rendezvous met(1, 2, "localhost", listener.port(), "other", 10); }); });
  const std::string error = error_of([&] { const Rendezvous met(listener, 2, "id", 0.5); });
  other.join();
  for (const std::string& text : {error, refused})
    EXPECT_NE(text.find("a token (VOXGRAD_TOKEN) that differs from rank 0's"), std::string::npos) << text;
}

TEST(Rendezvous, TimesOutIfTheAddressDoesNotAnswer) {
  const auto start = Clock::now();
  // 192.0.2.1 is in TEST-NET-1 (RFC 5737), which has no hosts.
  const std::string error = error_of([&] { const Rendezvous met(1, 2, "192.0.2.1", 29500, "", 0.5); });
  EXPECT_NE(error.find("rank 1 cannot reach rank 0 at 192.0.2.1, port 29500, within 0.5 s"), std::string::npos)
      << error;
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(3));
}

/// Rank 0 closes connections if too many of them arrive. Here, rank 0 closes the first connection of rank 1.
TEST(Rendezvous, ReconnectsAfterAClosedConnection) {
  auto listener = std::make_unique<Listener>("127.0.0.1", 0, "secret");
  const int port = listener->port();
  std::thread rank1(
      [&] { EXPECT_EQ(error_of([&] { const Rendezvous met(1, 2, "127.0.0.1", port, "secret", 10); }), ""); });
  wait_ms(200);
  listener = nullptr;  // closing the listener resets the connection
  listener = std::make_unique<Listener>("127.0.0.1", port, "secret");
  EXPECT_EQ(error_of([&] { const Rendezvous met(*listener, 2, "id", 10); }), "");
  rank1.join();
}

TEST(Rendezvous, ReceivesTheLastFramesOfAClosedConnection) {
  std::array<int, 2> sockets;
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
  Connection connection(sockets[0]);
  Connection(sockets[1]).send({FrameKind::bye});
  connection.send({FrameKind::calls});
  poll_connections({&connection}, {}, after(1));
  const auto frame = connection.next();
  ASSERT_TRUE(frame.has_value());
  EXPECT_EQ(frame->kind, FrameKind::bye);
  EXPECT_FALSE(connection.is_open());
}

TEST(Rendezvous, ErrorExplainsLoopbackAddresses) {
  const Listener listener("127.0.0.1", 0, "");
  const std::string error = error_of([&] { const Rendezvous met(listener, 2, "id", 0.1); });
  EXPECT_NE(error.find("set MASTER_ADDR to an address"), std::string::npos) << error;
}

TEST(Rendezvous, ListensOnAllInterfacesOnlyWithAToken) {
  const Listener loopback("127.0.0.1", 0, "");
  EXPECT_EQ(loopback.describe(), concat("127.0.0.1, port ", loopback.port()));
  for (const std::string host : {"localhost", "127.0.0.1"}) {
    const Listener with_token(host, 0, "secret");
    EXPECT_EQ(with_token.describe().find("0.0.0.0"), std::string::npos) << with_token.describe();
  }
  const std::string error = error_of([] { const Listener listener("192.0.2.1", 0, ""); });
  EXPECT_NE(error.find("rank 0 cannot listen on 192.0.2.1, port 0"), std::string::npos) << error;
  const Listener everywhere("192.0.2.1", 0, "secret");
  EXPECT_NE(everywhere.describe().find("0.0.0.0"), std::string::npos) << everywhere.describe();
}

struct Outcome {
  std::string output;      // stderr of all processes
  std::vector<int> codes;  // exit code of each process, or minus the signal that ended it
};
/// Forks three processes. Each calls `body` after the rendezvous.
Outcome run_three(const std::function<void(int rank, Rendezvous& met)>& body) {
  std::string path = (std::filesystem::temp_directory_path() / "voxgrad-rendezvous-XXXXXX").string();
  const int file = ::mkstemp(path.data());
  const Listener listener("localhost", 0, "");
  std::vector<pid_t> children;
  for (int rank = 0; rank < 3; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(file, STDERR_FILENO);
      ::alarm(20);
      {
        const auto met = rank == 0 ? std::make_unique<Rendezvous>(listener, 3, "id", 10)
                                   : std::make_unique<Rendezvous>(rank, 3, "localhost", listener.port(), "", 10);
        body(rank, *met);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  Outcome outcome;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    outcome.codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  outcome.output = text.str();
  ::close(file);
  ::unlink(path.c_str());
  return outcome;
}

int count(const std::string& text, const std::string& words) {
  int found = 0;
  for (size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) ++found;
  return found;
}

TEST(Rendezvous, RanksLeaveInAnyOrder) {
  for (const int first : {0, 1, 2}) {
    const Outcome outcome = run_three([&](int rank, Rendezvous& met) {
      met.watch([] { return Progress{}; });
      wait_ms(rank == first ? 0 : 400);
    });
    EXPECT_EQ(outcome.codes, (std::vector<int>{0, 0, 0})) << outcome.output;
    EXPECT_EQ(outcome.output, "");
  }
}

TEST(Rendezvous, AKilledProcessEndsAllRanks) {
  for (const int killed : {0, 1, 2}) {
    const auto start = Clock::now();
    const Outcome outcome = run_three([&](int rank, Rendezvous& met) {
      met.watch([] { return Progress{}; });
      wait_ms(100);
      if (rank == killed) ::kill(::getpid(), SIGKILL);
      wait_ms(15000);
    });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(outcome.codes[static_cast<size_t>(rank)], rank == killed ? -SIGKILL : 1) << outcome.output;
    EXPECT_EQ(count(outcome.output, concat("rank ", killed, ": its process ended\n")), 1) << outcome.output;
    EXPECT_EQ(count(outcome.output, "\n"), 1) << outcome.output;
    EXPECT_EQ(outcome.output.find(concat("rank ", killed == 0 ? 1 : 0, " of 3 on host ")), 0U) << outcome.output;
  }
}

TEST(Rendezvous, NamesTheLateRank) {
  for (const int late : {0, 1, 2})
    for (const bool stopped : {false, true}) {
      if (stopped && late == 0) continue;
      const Outcome outcome = run_three([&](int rank, Rendezvous& met) {
        // A rank that is stopped below makes all five calls first.
        for (int call = 0; call < (rank == late && !stopped ? 4 : 5); ++call) met.add_call({{}, "all_reduce"});
        met.watch([&, rank] {
          return rank == late ? Progress{} : Progress{.late = "all_reduce within 1 s", .late_call = 5};
        });
        if (rank == late && stopped) {
          // A forked child kills the stopped process after 5 s, when the other ranks have ended.
          wait_ms(300);
          if (::fork() == 0) {
            wait_ms(5000);
            ::kill(::getppid(), SIGKILL);
            ::_exit(0);
          }
          ::kill(::getpid(), SIGSTOP);
        }
        wait_ms(5000);
      });
      EXPECT_EQ(count(outcome.output, concat("rank ", late, " did not join all_reduce within 1 s\n")), 1)
          << outcome.output;
      EXPECT_EQ(count(outcome.output, "\n"), 1) << outcome.output;
    }
}

TEST(Rendezvous, AnErrorOfACollectiveEndsAllRanks) {
  const Outcome outcome = run_three([&](int rank, Rendezvous& met) {
    met.watch([rank] { return rank == 2 ? Progress{.error = "NCCL: lost"} : Progress{}; });
    wait_ms(10000);
  });
  EXPECT_EQ(outcome.codes, (std::vector<int>{1, 1, 1}));
  EXPECT_EQ(count(outcome.output, "rank 2 of 3 on host "), 1) << outcome.output;
  EXPECT_EQ(count(outcome.output, ": NCCL: lost\n"), 1) << outcome.output;
}

TEST(Rendezvous, DifferentCallsEndAllRanks) {
  const Outcome outcome = run_three([&](int rank, Rendezvous& met) {
    met.watch([] { return Progress{}; });
    for (int call = 0; call < 5000; ++call) met.add_call({{.call = 1}, "all_reduce (sum) of [3] f32"});
    wait_ms(rank * 150);
    met.add_call(
        {{.call = rank == 1 ? 3U : 2U}, rank == 1 ? "all_reduce (max) of [3] f32" : "all_reduce (sum) of [3] f32"});
    wait_ms(10000);
  });
  EXPECT_EQ(outcome.codes, (std::vector<int>{1, 1, 1}));
  EXPECT_EQ(
      count(outcome.output,
            ": the ranks' calls differ: ranks 0, 2 call all_reduce (sum) of [3] f32; rank 1 calls all_reduce (max) of "
            "[3] f32\n"),
      1)
      << outcome.output;
  EXPECT_EQ(count(outcome.output, "\n"), 1) << outcome.output;
}

/// The ranks compare their last calls during the shutdown. If `differ` is true, the call of rank 2 differs.
TEST(Rendezvous, ComparesTheLastCalls) {
  for (const bool differ : {false, true}) {
    const Outcome outcome = run_three([&](int rank, Rendezvous& met) {
      met.watch([] { return Progress{}; });
      wait_ms(50);
      met.add_call({{.call = 1, .messages = differ && rank == 2}, "send_receive"});
    });
    EXPECT_EQ(outcome.codes[0], differ) << outcome.output;
    EXPECT_EQ(count(outcome.output, "the ranks' calls differ"), differ) << outcome.output;
  }
}

}  // namespace
}  // namespace voxgrad::distributed
