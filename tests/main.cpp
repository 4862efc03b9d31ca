// Runs the tests of one program. Ends with 77, which ctest shows as "Skipped", if all of those chosen skipped
// themselves: tests of a GPU are never counted as passed where there is none.
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int code = RUN_ALL_TESTS();
  const testing::UnitTest& run = *testing::UnitTest::GetInstance();
  constexpr int kSkipped = 77;
  return code == 0 && run.skipped_test_count() > 0 && run.successful_test_count() == 0 ? kSkipped : code;
}
