// Runs the tests of one program. Ends with 77, which ctest shows as "Skipped", if all of those chosen skipped
// themselves: tests of a GPU are never counted as passed where there is none. A filter that chooses no test is a
// failure.
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int code = RUN_ALL_TESTS();
  const testing::UnitTest& run = *testing::UnitTest::GetInstance();
  if (run.test_to_run_count() == 0) {
    std::fprintf(stderr, "no test chosen by --gtest_filter=%s\n", GTEST_FLAG_GET(filter).c_str());
    return 1;
  }
  constexpr int kSkipped = 77;
  return code == 0 && run.skipped_test_count() > 0 && run.successful_test_count() == 0 ? kSkipped : code;
}
