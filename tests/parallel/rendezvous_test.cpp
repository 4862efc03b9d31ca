// How processes find each other without MPI, and how they end together: by threads and forked processes, without GPUs.
#include "nn/parallel/rendezvous.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "tests/support.h"

namespace voxgrad::parallel {
namespace {

using Clock = std::chrono::steady_clock;

void wait_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

/// What() of the Error that f throws; empty if it throws none.
template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// What each rank meets that comes to rank 0, as (rank, the number of ranks that it counts).
std::vector<std::string> errors_of(int size, const std::vector<std::pair<int, int>>& others, double seconds) {
  const Listener listener(0);
  std::vector<std::string> errors(others.size() + 1);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < others.size(); ++i)
    threads.emplace_back([&, i] {
      errors[i + 1] = error_of([&] {
        const Rendezvous met(others[i].first, others[i].second, "localhost", listener.port(), seconds);
        EXPECT_EQ(met.message(), "id");
      });
    });
  errors[0] = error_of([&] { const Rendezvous met(listener, size, "id", seconds); });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(Rendezvous, GivesAllTheMessageOfRank0) {
  for (const std::string& error : errors_of(3, {{2, 3}, {1, 3}}, 10)) EXPECT_EQ(error, "");
  EXPECT_EQ(errors_of(1, {}, 10)[0], "");
}

TEST(Rendezvous, NamesTheRanksThatDoNotCome) {
  const auto start = Clock::now();
  for (const std::string& error : errors_of(4, {{2, 4}}, 0.5))
    EXPECT_NE(error.find("ranks 1, 3 of 4 did not come to rank 0 on host"), std::string::npos) << error;
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
  const int port = Listener(0).port();
  const std::string error = error_of([&] { const Rendezvous met(1, 2, "localhost", port, 0.2); });
  EXPECT_NE(error.find(concat("rank 1 cannot reach rank 0 at localhost, port ", port)), std::string::npos) << error;
}

TEST(Rendezvous, RefusesRanksThatDoNotFit) {
  for (const std::string& error : errors_of(3, {{1, 3}, {1, 3}}, 10))
    EXPECT_NE(error.find("two processes are rank 1, the second one on host"), std::string::npos) << error;
  for (const std::string& error : errors_of(2, {{2, 3}}, 10))
    EXPECT_NE(error.find("counts 3 ranks (WORLD_SIZE), rank 0 counts 2"), std::string::npos) << error;
  for (const std::string& error : errors_of(2, {{0, 2}}, 10))
    EXPECT_NE(error.find("is rank 0, too"), std::string::npos) << error;
}

TEST(Rendezvous, APortInUseIsRefused) {
  const Listener first(0);
  const std::string error = error_of([&] { const Listener second(first.port()); });
  EXPECT_NE(error.find(concat("rank 0 cannot listen on port ", first.port())), std::string::npos) << error;
}

TEST(Rendezvous, PassesOverStrangers) {
  const Listener listener(0);
  std::thread stranger([&] {
    const int handle = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(listener.port()));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(handle, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
    EXPECT_GT(::send(handle, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 36, 0), 0);
    ::close(handle);
    const Rendezvous met(1, 2, "localhost", listener.port(), 10);
  });
  EXPECT_EQ(error_of([&] { const Rendezvous met(listener, 2, "id", 10); }), "");
  stranger.join();
}

/// Three processes, of which each does `body` when all have met. What they wrote on stderr, and their exit codes.
struct Ended {
  std::string output;
  std::vector<int> codes;
};
Ended run_three(const std::function<void(int rank, Rendezvous& met)>& body) {
  std::string path = (std::filesystem::temp_directory_path() / "voxgrad-rendezvous-XXXXXX").string();
  const int file = ::mkstemp(path.data());
  const Listener listener(0);
  std::vector<pid_t> children;
  for (int rank = 0; rank < 3; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(file, STDERR_FILENO);
      ::alarm(20);
      {
        const auto met = rank == 0 ? std::make_unique<Rendezvous>(listener, 3, "id", 10)
                                   : std::make_unique<Rendezvous>(rank, 3, "localhost", listener.port(), 10);
        body(rank, *met);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  Ended ended;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    ended.codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  ended.output = text.str();
  ::close(file);
  ::unlink(path.c_str());
  return ended;
}

int count(const std::string& text, const std::string& words) {
  int found = 0;
  for (size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) ++found;
  return found;
}

TEST(Rendezvous, RanksLeaveInAnyOrder) {
  for (const int first : {0, 1, 2}) {
    const Ended ended = run_three([&](int rank, Rendezvous& met) {
      met.watch([] { return Progress{}; });
      wait_ms(rank == first ? 0 : 400);
    });
    EXPECT_EQ(ended.codes, (std::vector<int>{0, 0, 0})) << ended.output;
    EXPECT_EQ(ended.output, "");
  }
}

TEST(Rendezvous, AProcessThatIsKilledEndsAll) {
  for (const int killed : {0, 1, 2}) {
    const auto start = Clock::now();
    const Ended ended = run_three([&](int rank, Rendezvous& met) {
      met.watch([] { return Progress{}; });
      wait_ms(100);
      if (rank == killed) ::kill(::getpid(), SIGKILL);
      wait_ms(15000);
    });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(ended.codes[static_cast<size_t>(rank)], rank == killed ? -SIGKILL : 1) << ended.output;
    EXPECT_EQ(count(ended.output, concat("rank ", killed, ": its process ended\n")), 1) << ended.output;
    EXPECT_EQ(count(ended.output, "\n"), 1) << ended.output;
    EXPECT_EQ(ended.output.find(concat("rank ", killed == 0 ? 1 : 0, " of 3 on host ")), 0U) << ended.output;
  }
}

TEST(Rendezvous, ARankThatIsLateIsNamed) {
  for (const int late : {0, 1, 2})
    for (const bool stopped : {false, true}) {
      if (stopped && late == 0) continue;
      const Ended ended = run_three([&](int rank, Rendezvous& met) {
        met.watch([&, rank] {
          return rank == late ? Progress{.collectives = 4}
                              : Progress{.collectives = 5, .late = "all_reduce within 1 s"};
        });
        if (rank == late && stopped) {  // until the others are over
          if (::fork() == 0) {
            wait_ms(4000);
            ::kill(::getppid(), SIGKILL);
            ::_exit(0);
          }
          ::kill(::getpid(), SIGSTOP);
        }
        wait_ms(4000);
      });
      EXPECT_EQ(count(ended.output, concat("rank ", late, " did not come to all_reduce within 1 s\n")), 1)
          << ended.output;
      EXPECT_EQ(count(ended.output, "\n"), 1) << ended.output;
    }
}

TEST(Rendezvous, AnErrorOfACollectiveEndsAll) {
  const Ended ended = run_three([&](int rank, Rendezvous& met) {
    met.watch([rank] { return rank == 2 ? Progress{.error = "NCCL: lost"} : Progress{}; });
    wait_ms(10000);
  });
  EXPECT_EQ(ended.codes, (std::vector<int>{1, 1, 1}));
  EXPECT_EQ(count(ended.output, "rank 2 of 3 on host "), 1) << ended.output;
  EXPECT_EQ(count(ended.output, ": NCCL: lost\n"), 1) << ended.output;
}

}  // namespace
}  // namespace voxgrad::parallel
