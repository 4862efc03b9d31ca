// A fixture that runs the example programs in a temporary folder.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace voxgrad {
namespace fs = std::filesystem;

/// Returns the contents of a file, or an empty string if it cannot be read.
inline std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class Programs : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "voxgrad-examples-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  struct Result {
    int code;
    std::string output;  // stdout and stderr
  };

  /// Runs a program in the temporary folder. `streams` are shell redirections.
  Result run(const std::string& command, const std::string& streams = ">log 2>&1") const {
    const fs::path log = folder_ / "log";
    const std::string line =
        "cd '" + folder_.string() + "' && '" EXAMPLES_DIR "/'" + command + ' ' + streams + " </dev/null";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(log)};
  }

  /// Expects that the program exits with `code` and that its output contains `fragment`.
  void expect_failure(const std::string& command, int code, const std::string& fragment) const {
    const Result result = run(command);
    EXPECT_EQ(result.code, code) << command << '\n' << result.output;
    EXPECT_NE(result.output.find(fragment), std::string::npos) << command << '\n' << result.output;
  }

  /// Starts a program and sends it `signal` as soon as the shell command `ready` succeeds, or after a minute. Returns
  /// the exit code, which is 0 if the program succeeded before the signal arrived.
  int run_until(const std::string& ready, const std::string& signal, const std::string& command) const {
    fs::remove(folder_ / "log");  // written by an earlier run
    const std::string start = "sh -c '\"" EXAMPLES_DIR "/\"" + command + " >log 2>&1 & for i in $(seq 6000); do " +
                              ready + " && break; sleep 0.01; done; kill -" + signal + " $!; wait $!' 2>/dev/null";
    return WEXITSTATUS(std::system(("cd '" + folder_.string() + "' && " + start).c_str()));
  }

  /// Expects that a run that is interrupted by SIGINT and resumed writes the same files `model` and `history` as an
  /// uninterrupted run.
  void expect_same_bits_resumed(const std::string& program, const char* model, const char* history) const {
    ASSERT_EQ(run(program + "--steps 40 --out whole").code, 0);
    const int code = run_until("grep -qs ^step log", "INT", program + "--steps 40 --out parts");
    const std::string log = read(folder_ / "log");
    if (code != 0) {
      EXPECT_EQ(code, 130) << log;
      EXPECT_NE(log.find("--resume continues from"), std::string::npos) << log;
      expect_failure(program + "--steps 41 --out parts --resume", 1,
                     "was written with steps = 40, but this run has steps = 41");
      const Result resumed = run(program + "--steps 40 --out parts --resume");
      EXPECT_EQ(resumed.code, 0) << resumed.output;
    }
    for (const char* file : {model, history}) {
      EXPECT_NE(read(folder_ / "whole" / file), "");
      EXPECT_EQ(read(folder_ / "whole" / file), read(folder_ / "parts" / file));
    }
  }

  fs::path folder_;
};

}  // namespace voxgrad
