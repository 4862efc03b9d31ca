// The main function of the test programs. Returns 77, which ctest reports as "Skipped", if every selected test was
// skipped. GPU tests thus do not count as passed on a machine without a GPU. Fails if the filter selects no test.
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int code = RUN_ALL_TESTS();
  const testing::UnitTest& run = *testing::UnitTest::GetInstance();
  if (run.test_to_run_count() == 0) {
    std::fprintf(stderr, "--gtest_filter=%s selects no test\n", GTEST_FLAG_GET(filter).c_str());
    return 1;
  }
  constexpr int kSkipped = 77;
  return code == 0 && run.skipped_test_count() > 0 && run.successful_test_count() == 0 ? kSkipped : code;
}
