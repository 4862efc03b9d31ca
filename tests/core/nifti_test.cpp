// Tests of NIfTI-1 files: headers, voxel types, gzip, affines, saving, and damaged files.
#include "core/io/nifti.h"

#include <cmath>
#include <limits>
#include <tuple>

#include "tests/core/file_support.h"

namespace voxgrad {
namespace {

using NiftiTest = FileTest;
using Affine = std::array<std::array<double, 4>, 4>;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The bytes of a NIfTI-1 file that holds 4 x 3 x 2 (W x H x D) voxels of type u8 with the values 0 to 23. put()
/// writes a header field, given its byte offset in the struct of nifti1.h, the format's official header.
struct Volume {
  bool big_endian = false;
  std::string bytes = std::string(352, '\0');

  explicit Volume(bool big = false) : big_endian(big) {
    put<int32_t>(0, 348);
    for (int i = 0; const int size : {3, 4, 3, 2, 1, 1, 1, 1}) put<int16_t>(40 + 2 * i++, static_cast<int16_t>(size));
    type(2, 8);
    for (int i = 0; const float size : {1.f, 0.5f, 2.f, 3.f}) put<float>(76 + 4 * i++, size);
    put<float>(108, 352);
    bytes.replace(344, 4, std::string("n+1\0", 4));
    for (char i = 0; i < 24; ++i) bytes += i;
  }
  template <class T>
  Volume& put(size_t offset, std::type_identity_t<T> value) {
    bytes.replace(offset, sizeof(T), bytes_of(value, big_endian));
    return *this;
  }
  Volume& type(int16_t code, int16_t bits) { return put<int16_t>(70, code).put<int16_t>(72, bits); }
  template <class T>
  Volume& voxels(const std::vector<T>& values) {
    bytes.resize(352);
    for (const T value : values) bytes += bytes_of(value, big_endian);
    return *this;
  }
};

/// Returns data in the gzip format without compression, as one stored block (RFC 1951, RFC 1952).
std::string gzip(const std::string& data) {
  uint32_t crc = ~0u;
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1u)));
  }
  const auto length = static_cast<uint16_t>(data.size());
  return std::string("\x1f\x8b\x08\0\0\0\0\0\0\xff", 10) + '\1' + bytes_of(length) +
         bytes_of(static_cast<uint16_t>(~length)) + data + bytes_of(~crc) +
         bytes_of(static_cast<uint32_t>(data.size()));
}

TEST_F(NiftiTest, ReadsVoxelsSpacingAndAffine) {
  const NiftiImage image = load_nifti(put("v.nii", Volume().bytes));
  EXPECT_EQ(concat(describe(image.data)), "[2, 3, 4] f32 on cpu");
  for (int64_t k = 0; k < 2; ++k)
    for (int64_t j = 0; j < 3; ++j)
      for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(image.data.at({k, j, i}), (k * 3 + j) * 4 + i);
  EXPECT_EQ(image.spacing, (std::array<double, 3>{3, 2, 0.5}));
  EXPECT_EQ(image.affine, (Affine{{{0.5, 0, 0, 0}, {0, 2, 0, 0}, {0, 0, 3, 0}, {0, 0, 0, 1}}}));
  EXPECT_EQ(image.descrip, "");
}

template <class T>
class NiftiTypeTest : public NiftiTest {};
using VoxelTypes = ::testing::Types<uint8_t, int8_t, int16_t, uint16_t, int32_t, uint32_t, float, double>;
TYPED_TEST_SUITE(NiftiTypeTest, VoxelTypes);

TYPED_TEST(NiftiTypeTest, ReadsBothByteOrdersScalingAndGzip) {
  using T = TypeParam;
  const int16_t code = std::is_same_v<T, uint8_t>    ? 2
                       : std::is_same_v<T, int16_t>  ? 4
                       : std::is_same_v<T, int32_t>  ? 8
                       : std::is_same_v<T, float>    ? 16
                       : std::is_same_v<T, double>   ? 64
                       : std::is_same_v<T, int8_t>   ? 256
                       : std::is_same_v<T, uint16_t> ? 512
                                                     : 768;
  std::vector<T> values(24);
  for (size_t i = 0; i < 24; ++i) values[i] = static_cast<T>(i * 3);
  values[0] = std::numeric_limits<T>::lowest();
  values[1] = std::numeric_limits<T>::max();
  for (const bool big : {false, true}) {
    Volume volume(big);
    volume.type(code, 8 * sizeof(T)).voxels(values);
    const auto plain = load_nifti(this->put("v.nii", volume.bytes)).data.template to_vector<float>();
    const auto packed = load_nifti(this->put("v.nii", gzip(volume.bytes))).data.template to_vector<float>();
    volume.template put<float>(112, 0.5f).template put<float>(116, -2);
    const auto scaled = load_nifti(this->put("v.nii", volume.bytes)).data.template to_vector<float>();
    for (size_t i = 0; i < 24; ++i) {
      EXPECT_EQ(plain[i], static_cast<float>(values[i]));
      EXPECT_EQ(packed[i], plain[i]);
      EXPECT_EQ(scaled[i], static_cast<float>(0.5 * static_cast<double>(values[i]) - 2));
    }
  }
}

TEST_F(NiftiTest, IgnoresIdentityAndInvalidSlopes) {
  for (const float slope : {0.f, 1.f, kNan, kInfinity}) {
    const auto file = put("v.nii", Volume().put<float>(112, slope).put<float>(116, slope == 1 ? 0 : 7).bytes);
    EXPECT_EQ(load_nifti(file).data.at({0, 0, 3}), 3) << slope;
  }
  EXPECT_ERROR(load_nifti(put("v.nii", Volume().put<float>(112, 2).put<float>(116, kNan).bytes)), "scl_inter");
}

TEST_F(NiftiTest, ReadsSform) {
  Volume volume;
  volume.put<int16_t>(254, 1).put<int16_t>(252, 1);  // the sform takes precedence over the qform
  for (int i = 0; i < 12; ++i) volume.put<float>(280 + 4 * i, i + 0.25f);
  const NiftiImage image = load_nifti(put("v.nii", volume.bytes));
  EXPECT_EQ(image.affine,
            (Affine{{{0.25, 1.25, 2.25, 3.25}, {4.25, 5.25, 6.25, 7.25}, {8.25, 9.25, 10.25, 11.25}, {0, 0, 0, 1}}}));
  EXPECT_ERROR(load_nifti(put("v.nii", volume.put<float>(280, kNan).bytes)), "matrix is not finite");
}

TEST_F(NiftiTest, ReadsQform) {
  // A quarter turn about z: i points along y and j along -x. pixdim[0] < 0 reverses k.
  const float half = std::sqrt(0.5f);
  Volume volume;
  volume.put<int16_t>(252, 1).put<float>(264, half).put<float>(76, -1);
  for (int i = 0; i < 3; ++i) volume.put<float>(268 + 4 * i, static_cast<float>(10 * i));
  const Affine expected{{{0, -2, 0, 0}, {0.5, 0, 0, 10}, {0, 0, -3, 20}, {0, 0, 0, 1}}};
  const NiftiImage image = load_nifti(put("v.nii", volume.bytes));
  for (size_t i = 0; i < 4; ++i)
    for (size_t j = 0; j < 4; ++j) EXPECT_NEAR(image.affine[i][j], expected[i][j], 1e-6) << i << ' ' << j;
  EXPECT_ERROR(load_nifti(put("v.nii", volume.put<float>(256, 1).bytes)), "quaternion");
  EXPECT_ERROR(load_nifti(put("v.nii", volume.put<float>(256, kNan).bytes)), "quaternion");
}

/// In float32, the quaternion of a half turn is not exactly a unit quaternion.
TEST_F(NiftiTest, QformOfAHalfTurnIsAccurate) {
  Volume volume;
  volume.put<int16_t>(252, 1);
  const std::array<std::array<float, 3>, 4> turns{
      {{.70710677f, -.70710677f, 0}, {.70710677f, 0, .70710677f}, {.57735026f, .57735026f, .57735026f}, {0, 0, 1}}};
  for (const auto& turn : turns) {
    for (size_t i = 0; i < 3; ++i) volume.put<float>(256 + 4 * i, turn[i]);
    const NiftiImage image = load_nifti(put("v.nii", volume.bytes));
    const double squares = turn[0] * turn[0] + turn[1] * turn[1] + turn[2] * turn[2];
    for (size_t row = 0; row < 3; ++row)
      for (size_t column = 0; column < 3; ++column) {
        const double expected = 2 * turn[row] * turn[column] / squares - (row == column ? 1 : 0);
        EXPECT_NEAR(image.affine[row][column], expected * image.spacing[2 - column], 1e-6) << row << ' ' << column;
      }
  }
}

TEST_F(NiftiTest, ReadsWideIntegersThatFitI32) {
  const std::vector<double> expected{-2147483648.0, 2147483647.0, 0, -1};
  for (const bool big : {false, true}) {
    Volume volume(big);
    volume.put<int16_t>(42, 2).put<int16_t>(44, 2).put<int16_t>(46, 1);
    volume.type(1024, 64).voxels<int64_t>({INT32_MIN, INT32_MAX, 0, -1});
    const Tensor read = load_nifti(put("v.nii", volume.bytes)).data;
    for (size_t i = 0; i < 4; ++i)
      EXPECT_EQ(read.flatten().at({static_cast<int64_t>(i)}), static_cast<float>(expected[i]));
    EXPECT_ERROR(load_nifti(put("v.nii", volume.voxels<int64_t>({0, 1, 2147483648, 3}).bytes)),
                 "voxel value 2147483648 does not fit in i32");
    EXPECT_ERROR(load_nifti(put("v.nii", volume.voxels<int64_t>({INT64_MIN, 1, 2, 3}).bytes)), "-9223372036854775808");
    volume.type(1280, 64).voxels<uint64_t>({7, 8, 9, INT32_MAX});
    EXPECT_EQ(load_nifti(put("v.nii", volume.bytes)).data.at({0, 1, 0}), 9);
    EXPECT_ERROR(load_nifti(put("v.nii", volume.voxels<uint64_t>({UINT64_MAX, 1, 2, 3}).bytes)),
                 "voxel value 18446744073709551615 does not fit in i32");
  }
}

TEST_F(NiftiTest, ConvertsUnits) {
  const auto spacing = [&](char unit) {
    return load_nifti(put("v.nii", Volume().put<char>(123, unit).bytes)).spacing[0];
  };
  EXPECT_DOUBLE_EQ(spacing(0), 3);
  EXPECT_DOUBLE_EQ(spacing(2 + 8), 3);  // the upper bits hold the unit of time
  EXPECT_DOUBLE_EQ(spacing(1), 3000);
  EXPECT_DOUBLE_EQ(spacing(3), 0.003);
}

TEST_F(NiftiTest, ReadsOneToSevenAxes) {
  const auto shape = [&](std::initializer_list<int> dim) {
    Volume volume;
    for (int i = 0; const int size : dim) volume.put<int16_t>(40 + 2 * i++, static_cast<int16_t>(size));
    return load_nifti(put("v.nii", volume.bytes)).data.shape();
  };
  EXPECT_EQ(shape({1, 24, 9, 9}), Shape({1, 1, 24}));
  EXPECT_EQ(shape({2, 4, 6, 9}), Shape({1, 6, 4}));
  EXPECT_EQ(shape({4, 2, 2, 2, 3}), Shape({3, 2, 2, 2}));
  EXPECT_EQ(shape({4, 2, 4, 3, 1}), Shape({3, 4, 2}));
  EXPECT_EQ(shape({7, 2, 4, 3, 1, 1, 1, 1}), Shape({3, 4, 2}));
}

TEST_F(NiftiTest, IgnoresZeroPixdimOfAnAxisWithOneVoxel) {
  Volume slice;
  slice.put<int16_t>(44, 6).put<int16_t>(46, 1).put<float>(88, 0).put<float>(84, -2);
  EXPECT_EQ(load_nifti(put("v.nii", slice.bytes)).spacing, (std::array<double, 3>{1, 2, 0.5}));
  slice.put<int16_t>(40, 2).put<int16_t>(46, 7).put<float>(88, kNan);
  EXPECT_EQ(load_nifti(put("v.nii", slice.bytes)).spacing, (std::array<double, 3>{1, 2, 0.5}));
}

TEST_F(NiftiTest, SkipsExtensions) {
  Volume volume;
  volume.bytes.insert(352, std::string(32, 'x'));
  const auto bytes = volume.put<float>(108, 384).bytes;
  EXPECT_EQ(load_nifti(put("v.nii", bytes)).data.at({1, 2, 3}), 23);
  EXPECT_EQ(load_nifti(put("v.nii", gzip(bytes))).data.at({1, 2, 3}), 23);
}

TEST_F(NiftiTest, NamesTheActualFormatOfOtherFiles) {
  EXPECT_ERROR(load_nifti(put("v.nii", "\x93NUMPY" + std::string(400, 'x'))), ", not 348; it is NumPy's .npy");
}

TEST_F(NiftiTest, RejectsBadHeaders) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "truncated: a NIfTI-1 header has 348 bytes, but the file ends after 0 bytes"},
      {std::string(400, 'x'), "not a NIfTI-1 file: sizeof_hdr"},
      {Volume().put<int32_t>(0, 540).bytes, "NIfTI-2 is not supported"},
      {Volume(true).put<int32_t>(0, 540).bytes, "NIfTI-2 is not supported"},
      {Volume().bytes.replace(344, 3, "ni1"), ".hdr/.img pair"},
      {Volume().bytes.replace(344, 4, 4, '\0'), "the magic string is missing"},
      {Volume().put<int16_t>(40, 0).bytes, "dim[0] must be 1 to 7, got 0"},
      {Volume().put<int16_t>(40, 8).bytes, "dim[0] must be 1 to 7, got 8"},
      {Volume().put<int16_t>(42, 0).bytes, "dim[1] must be positive, got 0"},
      {Volume().put<int16_t>(46, -2).bytes, "dim[3] must be positive, got -2"},
      {Volume().put<int16_t>(40, 5).put<int16_t>(50, 3).bytes, "dim[5] is 3; more than four axes"},
      {Volume().type(0, 0).bytes, "unknown datatype 0"},
      {Volume().type(1, 1).bytes, "voxels of binary are not supported"},
      {Volume().type(128, 24).bytes, "voxels of rgb24 are not supported"},
      {Volume().type(32, 64).bytes, "voxels of complex64 are not supported"},
      {Volume().type(2, 16).bytes, "bitpix is 16, but voxels of u8 have 8"},
      {Volume().put<float>(80, kNan).bytes, "pixdim[1] is not finite"},
      {Volume().put<float>(88, kInfinity).bytes, "pixdim[3] is not finite"},
      {Volume().put<float>(84, 0).bytes, "pixdim[2] is 0"},
      {Volume().put<float>(108, 0).bytes, "vox_offset must be a whole number of at least 352, got 0"},
      {Volume().put<float>(108, 352.5f).bytes, "vox_offset"},
      {Volume().put<float>(108, kNan).bytes, "vox_offset"},
      {Volume().put<float>(108, 1e30f).bytes, "vox_offset"},
      {Volume().put<float>(108, 353).bytes, "truncated: [2, 3, 4] u8 end at byte 353 + 24, but the file"},
      {Volume().put<float>(108, 1e15f).bytes, "truncated"},
      {Volume().bytes + "x", "trailing bytes"},
  };
  for (const auto& [bytes, message] : cases) {
    SCOPED_TRACE(message);
    EXPECT_ERROR(load_nifti(put("v.nii", bytes)), message);
    EXPECT_ERROR(load_nifti(put("v.nii.gz", gzip(bytes))), message);
    EXPECT_ERROR(load_nifti(path("v.nii")), "load_nifti: '" + path("v.nii").string() + "': ");
  }
}

TEST_F(NiftiTest, ChecksSizesBeforeAllocating) {
  Volume volume;
  volume.put<int16_t>(40, 4);
  for (size_t i = 1; i <= 4; ++i) volume.put<int16_t>(40 + 2 * i, INT16_MAX);
  const int64_t allocations = memory::stats().allocations;
  EXPECT_ERROR(load_nifti(put("v.nii", volume.bytes)), "truncated");
  EXPECT_ERROR(load_nifti(put("v.nii", gzip(volume.bytes))), "truncated");
  volume.type(64, 64);
  EXPECT_ERROR(load_nifti(put("v.nii", gzip(volume.bytes))), "");
  EXPECT_EQ(memory::stats().allocations, allocations);
}

TEST_F(NiftiTest, RespectsMaxBytes) {
  const std::string bytes = Volume().bytes;  // 24 u8 voxels, which load_nifti converts to f32
  for (const auto& file : {put("v.nii", bytes), put("v.nii.gz", gzip(bytes))}) {
    const int64_t allocations = memory::stats().allocations;
    EXPECT_ERROR(load_nifti(file, Device::cpu(), {.max_bytes = 95}),
                 "load_nifti: '" + file.string() + "': [2, 3, 4] f32 takes 96 bytes, more than max_bytes, which is 95");
    EXPECT_EQ(memory::stats().allocations, allocations);
    EXPECT_EQ(load_nifti(file, Device::cpu(), {.max_bytes = 96}).data.numel(), 24);
  }
}

TEST_F(NiftiTest, RejectsDamagedGzip) {
  const std::string packed = gzip(Volume().bytes);
  std::string wrong = packed;
  wrong[wrong.size() - 8] ^= 1;
  EXPECT_ERROR(load_nifti(put("v.nii.gz", wrong)),
               "load_nifti: '" + path("v.nii.gz").string() + "': damaged: incorrect data check");
  EXPECT_ERROR(load_nifti(put("v.nii.gz", packed.substr(0, packed.size() - 9))), "truncated");
  EXPECT_ERROR(load_nifti(put("v.nii.gz", packed.substr(0, 300))), "truncated");
  EXPECT_ERROR(load_nifti(put("v.nii.gz", packed.substr(0, 5))), "truncated");
}

NiftiImage example(const Shape& shape) {
  NiftiImage image;
  image.data = empty(shape);
  float* data = image.data.mutable_data<float>();
  for (int64_t i = 0; i < image.data.numel(); ++i) data[i] = static_cast<float>(i) * 0.1f - 1;
  data[0] = -0.0f;
  image.spacing = {1.5, 0.75, 0.25};
  image.affine = {{{-0.25, 0, 0, 90}, {0, 0.75, 0.5, -126}, {0, -0.5, 1.5, -72}, {0, 0, 0, 1}}};
  image.descrip = std::string(79, 'd');
  return image;
}

TEST_F(NiftiTest, SavedImagesLoadUnchanged) {
  for (const char* name : {"v.nii", "v.nii.gz"}) {
    for (const Shape& shape : {Shape{2, 3, 4}, Shape{2, 3, 1, 5}, Shape{1, 1, 1}}) {
      const NiftiImage image = example(shape);
      save_nifti(path(name), image);
      const NiftiImage loaded = load_nifti(path(name));
      EXPECT_EQ(loaded.data.shape(), shape);
      const auto bytes = static_cast<size_t>(image.data.numel()) * sizeof(float);
      EXPECT_EQ(std::memcmp(loaded.data.raw_data(), image.data.raw_data(), bytes), 0);
      EXPECT_EQ(loaded.spacing, image.spacing);
      EXPECT_EQ(loaded.affine, image.affine);
      EXPECT_EQ(loaded.descrip, image.descrip);
    }
  }
  EXPECT_EQ(get(path("v.nii")).size(), 356u);
  EXPECT_EQ(get(path("v.nii.gz")).substr(0, 2), "\x1f\x8b");
}

TEST_F(NiftiTest, ImagesOfSeveralChunksLoadUnchanged) {
  const NiftiImage image = example({3, 300, 700});
  save_nifti(path("v.nii.gz"), image);
  EXPECT_EQ(load_nifti(path("v.nii.gz")).data.to_vector<float>(), image.data.to_vector<float>());
  save_nifti(path("v.nii"), image);
  EXPECT_EQ(load_nifti(path("v.nii")).data.to_vector<float>(), image.data.to_vector<float>());
}

TEST_F(NiftiTest, SavesAnyStridesDtypeAndDevice) {
  for (const Device device : devices()) {
    Tensor tensor = empty({2, 3, 4}, {.dtype = f64, .device = device});
    for (int64_t i = 0; i < 24; ++i) tensor.set({i / 12, i / 4 % 3, i % 4}, static_cast<double>(i));
    NiftiImage image;
    image.data = as_strided(tensor, {4, 3, 2}, {1, 4, 12}, 0);
    save_nifti(path("v.nii"), image);
    const Tensor loaded = load_nifti(path("v.nii"), device).data;
    EXPECT_EQ(loaded.device(), device);
    EXPECT_EQ(loaded.to_vector(), image.data.to_vector());
  }
}

TEST_F(NiftiTest, SavesIntegersAsIntegers) {
  for (const auto& [dtype, code, bytes] : {std::tuple{u8, 2, 1}, std::tuple{i32, 8, 4}, std::tuple{i64, 16, 4}}) {
    NiftiImage image = example({2, 3, 4});
    image.data = empty({2, 3, 4}, {.dtype = dtype});
    for (int64_t i = 0; i < 24; ++i) image.data.set({i / 12, i / 4 % 3, i % 4}, static_cast<double>(10 * i));
    save_nifti(path("v.nii"), image);
    const std::string file = get(path("v.nii"));
    EXPECT_EQ(file[70], code);
    EXPECT_EQ(file[72], 8 * bytes);
    EXPECT_EQ(file.size(), static_cast<size_t>(352 + 24 * bytes));
    EXPECT_EQ(load_nifti(path("v.nii")).data.to_vector(), image.data.to_vector());
  }
}

TEST_F(NiftiTest, RejectsInvalidImages) {
  const auto rejects = [&](auto change, const char* message) {
    NiftiImage image = example({2, 3, 4});
    change(image);
    EXPECT_ERROR(save_nifti(path("v.nii"), image), message);
  };
  rejects([](NiftiImage& image) { image.data = {}; }, "the image has no data");
  rejects([](NiftiImage& image) { image.data = empty({3, 4}); }, "expected (D, H, W) or (T, D, H, W), got [3, 4]");
  rejects([](NiftiImage& image) { image.data = empty({0, 3, 4}); }, "1 to 32767 voxels, got [0, 3, 4]");
  rejects([](NiftiImage& image) { image.data = empty({1, 1, 32768}); }, "1 to 32767 voxels, got [1, 1, 32768]");
  rejects([](NiftiImage& image) { image.spacing[1] = 0; }, "spacing must be positive, got 0");
  rejects([](NiftiImage& image) { image.spacing[1] = kNan; }, "spacing must be positive, got nan");
  rejects([](NiftiImage& image) { image.affine[1][2] = kNan; }, "the affine is not finite");
  rejects([](NiftiImage& image) { image.affine[3][0] = 1; }, "the last row of the affine");
  rejects([](NiftiImage& image) { image.descrip += 'd'; }, "descrip has 80 bytes");
  EXPECT_ERROR(save_nifti(path("v.img"), example({2, 3, 4})), "must end with .nii or .nii.gz");
  EXPECT_ERROR(save_nifti(path("none/v.nii"), example({2, 3, 4})), "No such file or directory");
  EXPECT_EQ(file_count(), 0);
}

TEST_F(NiftiTest, ThrowsOnlyErrorForDamagedFiles) {
  const auto load = [](const auto& file) { return load_nifti(file); };
  expect_loads_or_rejects_damaged("v.nii", Volume().bytes, load);
  expect_loads_or_rejects_damaged("v.nii", gzip(Volume(true).put<int16_t>(252, 1).bytes), load);
}

}  // namespace
}  // namespace voxgrad
