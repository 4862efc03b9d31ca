// Tests of AtomicFile: commits, permissions, concurrent and killed writers, and failed writes.
#include "core/io/atomic_file.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <thread>
#include <vector>

#include "tests/core/file_support.h"

namespace voxgrad {
namespace {

using AtomicFileTest = FileTest;
using std::filesystem::perms;

TEST_F(AtomicFileTest, FileAppearsOnCommit) {
  AtomicFile file(path("a"), "test");
  file.write("one ");
  file.write("two");
  EXPECT_FALSE(std::filesystem::exists(path("a")));
  file.commit();
  EXPECT_EQ(get(path("a")), "one two");
  EXPECT_EQ(file_count(), 1);
}

TEST_F(AtomicFileTest, KeepsTheOldFileWithoutCommit) {
  put("a", "old");
  {
    AtomicFile file(path("a"), "test");
    file.write("new");
    EXPECT_EQ(file_count(), 2);
  }
  EXPECT_EQ(get(path("a")), "old");
  EXPECT_EQ(file_count(), 1);
}

TEST_F(AtomicFileTest, ReplacesTheFileAndKeepsItsPermissions) {
  put("a", "old");
  std::filesystem::permissions(path("a"), perms::owner_read | perms::owner_write);
  write_file(path("a"), "new");
  EXPECT_EQ(get(path("a")), "new");
  EXPECT_EQ(std::filesystem::status(path("a")).permissions(), perms::owner_read | perms::owner_write);
}

TEST_F(AtomicFileTest, FollowsASymbolicLink) {
  put("a", "old");
  std::filesystem::create_symlink("a", path("link"));
  write_file(path("link"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  EXPECT_EQ(get(path("a")), "new");
}

TEST_F(AtomicFileTest, TheLastCommitOfTwoWritersWins) {
  AtomicFile first(path("a"), "test"), second(path("a"), "test");
  first.write("first");
  second.write("second");
  second.commit();
  first.commit();
  EXPECT_EQ(get(path("a")), "first");
  EXPECT_EQ(file_count(), 1);
}

/// Runs `work` in a child process and returns its status from waitpid().
template <class Work>
int in_child(Work work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST_F(AtomicFileTest, RemovesTemporaryFilesOfKilledWriters) {
  const std::string other = ".b.voxgrad-0.tmp", alike = ".a.voxgrad-0.tmp.gz";
  for (const std::string& name : {other, alike}) put(name, "belongs to another path");
  for (const bool first_is_ready : {false, true}) {
    const int status = in_child([&] {
      AtomicFile first(path("a"), "test"), second(path("a"), "test"), third(path("a"), "test");
      third.write("half");
      if (first_is_ready) first.commit();
      raise(SIGKILL);
    });
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(file_count(), 5);
    write_file(path("a"), "whole");
    EXPECT_EQ(get(path("a")), "whole");
    EXPECT_EQ(file_count(), 3);
  }
  for (const std::string& name : {other, alike}) EXPECT_TRUE(std::filesystem::exists(path(name)));
}

TEST_F(AtomicFileTest, KeepsTemporaryFilesOfLiveWriters) {
  AtomicFile file(path("a"), "test");
  file.write("slow");
  EXPECT_EQ(in_child([&] { write_file(path("a"), "quick"); }), 0);
  EXPECT_EQ(get(path("a")), "quick");
  file.commit();
  EXPECT_EQ(get(path("a")), "slow");
  EXPECT_EQ(file_count(), 1);
}

TEST_F(AtomicFileTest, WritesFromManyThreads) {
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 8; ++writer)
    writers.emplace_back([&, writer] {
      for (int i = 0; i < 20; ++i) write_file(path("a"), std::string(1000, static_cast<char>('a' + writer)));
    });
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(get(path("a")), std::string(1000, get(path("a"))[0]));
  EXPECT_EQ(file_count(), 1);
}

TEST_F(AtomicFileTest, SeekOverwritesEarlierBytes) {
  AtomicFile file(path("a"), "test");
  file.write("0000 data");
  file.seek(2);
  file.write("42");
  file.commit();
  EXPECT_EQ(get(path("a")), "0042 data");
  EXPECT_ERROR(file.seek(0), "is already closed");
}

TEST_F(AtomicFileTest, AcceptsTheLongestFileName) {
  write_file(path(std::string(255, 'n')), "x");
  EXPECT_EQ(get(path(std::string(255, 'n'))), "x");
  EXPECT_ERROR(write_file(path(std::string(256, 'n')), "x"), "cannot write");
  EXPECT_EQ(file_count(), 1);
}

/// Simulates a full disk: until the object is destroyed, files cannot grow beyond `bytes`.
struct FileSizeLimit {
  explicit FileSizeLimit(rlim_t bytes) : handler(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit limited{bytes, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limited);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
  }
  rlimit before{};
  void (*handler)(int);
};

TEST_F(AtomicFileTest, AFailedWriteKeepsTheOldFile) {
  put("a", "old");
  {
    const FileSizeLimit limit(1000);
    EXPECT_ERROR(write_file(path("a"), std::string(5000, 'x')), "cannot write '" + path("a").string() + "': ");
  }
  EXPECT_EQ(get(path("a")), "old");
  EXPECT_EQ(file_count(), 1);
}

TEST_F(AtomicFileTest, RejectsPathsThatAreNotRegularFiles) {
  std::filesystem::create_directory(path("d"));
  EXPECT_ERROR(write_file(path("d"), "x", "save"),
               "save: cannot write '" + path("d").string() + "': it is a directory");
  EXPECT_ERROR(write_file(path("d") / "", "x"), "the path has no file name");
  EXPECT_ERROR(write_file("", "x"), "the path has no file name");
  EXPECT_ERROR(write_file("/dev/null", "x"), "it is not a regular file");
  EXPECT_ERROR(write_file(path("none") / "a", "x"), "No such file or directory");
  put("a", "old");
  EXPECT_ERROR(write_file(path("a") / "b", "x"), "Not a directory");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST_F(AtomicFileTest, RejectsUnwritablePaths) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  put("a", "old");
  std::filesystem::permissions(path("a"), perms::owner_read);
  EXPECT_ERROR(write_file(path("a"), "x"), "Permission denied");
  std::filesystem::create_directory(path("d"));
  std::filesystem::permissions(path("d"), perms::owner_read | perms::owner_exec);
  EXPECT_ERROR(write_file(path("d") / "b", "x"), "Permission denied");
  std::filesystem::permissions(path("d"), perms::owner_all);
}

TEST_F(AtomicFileTest, RejectsWritesAfterCommit) {
  AtomicFile file(path("a"), "test");
  file.commit();
  EXPECT_ERROR(file.write("x"), "is already closed");
  EXPECT_ERROR(file.commit(), "is already closed");
}

}  // namespace
}  // namespace voxgrad
