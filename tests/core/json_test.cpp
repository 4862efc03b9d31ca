// Tests of the JSON writer. The tests of safetensors and of nnU-Net's dataset folders cover the reader.
#include "core/io/detail/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace voxgrad {
namespace {

TEST(Json, EscapesStrings) {
  EXPECT_EQ(to_json("plain / \x7f"), "\"plain / \x7f\"");
  EXPECT_EQ(to_json("\" \\ \b\f\n\r\t"), R"("\" \\ \b\f\n\r\t")");
  EXPECT_EQ(to_json(std::string_view("\0\x1f", 2)), R"("\u0000\u001f")");
  EXPECT_EQ(to_json("\u00fc\u20ac\U0001f600"), "\"\u00fc\u20ac\U0001f600\"");
}

TEST(Json, ReplacesBytesThatAreNotUtf8) {
  // Stray bytes, overlong encodings, a surrogate, a code point above U+10FFFF and truncated characters.
  for (const char* bad : {"\xff", "\x80", "\xc0\x80", "\xe0\x9f\x80", "\xf0\x8f\x80\x80", "\xed\xa0\x80",
                          "\xf4\x90\x80\x80", "\xc3", "\xe2\x82", "\xf0\x9f\x98"}) {
    EXPECT_FALSE(is_utf8(bad)) << bad;
    EXPECT_EQ(to_json(std::string("a") + bad).substr(0, 5), "\"a\xef\xbf\xbd") << bad;
  }
  EXPECT_EQ(to_json("\xc3z"), "\"\xef\xbf\xbdz\"");
  for (const char* good :
       {"", "z", "\u0080", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff"})
    EXPECT_TRUE(is_utf8(good)) << good;
}

TEST(Json, WritesNumbersAndStructures) {
  EXPECT_EQ(to_json(std::numeric_limits<int64_t>::min()), "-9223372036854775808");
  EXPECT_EQ(to_json(uint64_t{18446744073709551615u}), "18446744073709551615");
  EXPECT_EQ(to_json(0.1), "0.1");
  EXPECT_EQ(to_json(1e300), "1e+300");
  EXPECT_EQ(to_json(std::nan("")), "null");
  EXPECT_EQ(to_json(-std::numeric_limits<double>::infinity()), "null");
  EXPECT_EQ(json_object({}), "{}");
  EXPECT_EQ(json_object({{"a\"", to_json(1)}, {"b", json_array({to_json("x"), json_array({})})}}),
            R"({"a\"":1,"b":["x",[]]})");
}

}  // namespace
}  // namespace voxgrad
