// Reads and writes NIfTI-1 files.
#include "core/io/nifti.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/io/atomic_file.h"
#include "core/io/detail/gzip_file.h"
#include "core/io/detail/input_file.h"

namespace voxgrad {
namespace {

static_assert(std::endian::native == std::endian::little, "headers are written in the byte order of memory");

// Byte offsets of the header's fields (nifti1.h).
namespace field {
constexpr size_t kSizeofHdr = 0, kDim = 40, kDatatype = 70, kBitpix = 72, kPixdim = 76, kVoxOffset = 108,
                 kSclSlope = 112, kSclInter = 116, kXyztUnits = 123, kDescrip = 148, kQformCode = 252, kSformCode = 254,
                 kQuatern = 256, kQoffset = 268, kSrow = 280, kMagic = 344;
}
constexpr size_t kHeaderBytes = 348;
constexpr size_t kDescripBytes = 80;
constexpr int64_t kDataStart = 352;  // bytes of the header and the extension flags
constexpr size_t kChunk = 1 << 16;
constexpr int64_t kMaxGzipRatio = 1032;  // gzip compresses at most this many bytes to one byte
constexpr char kMillimeters = 2;

/// The 348 bytes of the header and their byte order.
struct RawHeader {
  std::array<char, kHeaderBytes> bytes{};
  bool swapped = false;

  template <class T>
  T get(size_t offset, size_t index = 0) const {
    T value;
    std::memcpy(&value, bytes.data() + offset + index * sizeof(T), sizeof(T));
    if (swapped) swap_bytes(&value, sizeof(T), 1);
    return value;
  }
  template <class T>
  void set(size_t offset, std::type_identity_t<T> value, size_t index = 0) {
    std::memcpy(bytes.data() + offset + index * sizeof(T), &value, sizeof(T));
  }
};

struct Scaling {
  double slope = 1;
  double intercept = 0;
};

/// Converts `count` voxels at `from` to f32. Throws Error if a 64-bit integer does not fit in i32. i64 and u64 are
/// supported because i64 is NumPy's default dtype, although f32 cannot represent their full range.
using Decode = void (*)(const InputFile& file, const char* from, float* to, int64_t count, Scaling scaling);

template <class T>
void decode(const InputFile& file, const char* from, float* to, int64_t count, Scaling scaling) {
  const bool scaled = scaling.slope != 1 || scaling.intercept != 0;  // adding 0 would change -0.0f
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    if constexpr (std::is_integral_v<T> && sizeof(T) == 8)
      file.check(std::in_range<int32_t>(value), "voxel value ", value, " does not fit in i32; convert the file to f32");
    to[i] = static_cast<float>(scaled ? scaling.slope * static_cast<double>(value) + scaling.intercept
                                      : static_cast<double>(value));
  }
}

struct VoxelType {
  int code;          ///< the value of the field `datatype`
  const char* name;  ///< for messages
  int64_t bytes;     ///< size of a voxel; 0 if it is not a whole number of bytes
  Decode decode;     ///< null if the format defines the type but voxgrad does not read it
};
constexpr VoxelType kVoxelTypes[] = {
    {2, "u8", 1, decode<uint8_t>},      {4, "i16", 2, decode<int16_t>},    {8, "i32", 4, decode<int32_t>},
    {16, "f32", 4, decode<float>},      {64, "f64", 8, decode<double>},    {256, "i8", 1, decode<int8_t>},
    {512, "u16", 2, decode<uint16_t>},  {768, "u32", 4, decode<uint32_t>}, {1, "binary", 0, nullptr},
    {32, "complex64", 8, nullptr},      {128, "rgb24", 3, nullptr},        {1024, "i64", 8, decode<int64_t>},
    {1280, "u64", 8, decode<uint64_t>}, {1536, "f128", 16, nullptr},       {1792, "complex128", 16, nullptr},
    {2048, "complex256", 32, nullptr},  {2304, "rgba32", 4, nullptr},
};

/// The checked contents of the header.
struct Layout {
  Shape shape;
  const VoxelType* type = nullptr;
  int64_t offset = 0;  ///< position of the first voxel in the decompressed file
  Scaling scaling;
};

RawHeader read_header(const InputFile& file, UnpackedFile& unpacked) {
  RawHeader header;
  const size_t got = unpacked.read(header.bytes.data(), kHeaderBytes);
  file.check(got == kHeaderBytes, "truncated: a NIfTI-1 header has ", kHeaderBytes, " bytes, but the file ends after ",
             in_bytes(static_cast<int64_t>(got)));
  const auto size = header.get<int32_t>(field::kSizeofHdr);
  header.swapped = size != static_cast<int32_t>(kHeaderBytes);
  const auto other = header.get<int32_t>(field::kSizeofHdr);
  file.check(size != 540 && other != 540, "NIfTI-2 is not supported");
  file.check(other == static_cast<int32_t>(kHeaderBytes), "not a NIfTI-1 file: sizeof_hdr is ", size, ", not 348",
             unpacked.is_packed() ? "" : file.other_format());
  const std::string_view magic(header.bytes.data() + field::kMagic, 4);
  file.check(magic != std::string_view("ni1\0", 4),
             "this file is the header of a .hdr/.img pair; convert it to a single .nii file");
  file.check(magic == std::string_view("n+1\0", 4), "not a NIfTI-1 file: the magic string is missing");
  return header;
}

/// Returns (D, H, W), or (T, D, H, W) if there are several volumes.
Shape read_shape(const InputFile& file, const RawHeader& header) {
  const int rank = header.get<int16_t>(field::kDim);
  file.check(rank >= 1 && rank <= 7, "dim[0] must be 1 to 7, got ", rank);
  std::array<int64_t, 7> sizes;
  sizes.fill(1);
  for (int i = 0; i < rank; ++i) {
    sizes[i] = header.get<int16_t>(field::kDim, i + 1);
    file.check(sizes[i] > 0, "dim[", i + 1, "] must be positive, got ", sizes[i]);
    file.check(i < 4 || sizes[i] == 1, "dim[", i + 1, "] is ", sizes[i], "; more than four axes are not supported");
  }
  if (sizes[3] > 1) return {sizes[3], sizes[2], sizes[1], sizes[0]};
  return {sizes[2], sizes[1], sizes[0]};
}

Layout read_layout(const InputFile& file, const RawHeader& header) {
  Layout layout;
  layout.shape = read_shape(file, header);
  const int code = header.get<int16_t>(field::kDatatype);
  layout.type = std::find_if(std::begin(kVoxelTypes), std::end(kVoxelTypes), [&](auto& t) { return t.code == code; });
  file.check(layout.type != std::end(kVoxelTypes), "unknown datatype ", code);
  file.check(layout.type->decode != nullptr, "voxels of ", layout.type->name, " are not supported");
  const int bits = header.get<int16_t>(field::kBitpix);
  file.check(bits == 8 * layout.type->bytes, "bitpix is ", bits, ", but voxels of ", layout.type->name, " have ",
             8 * layout.type->bytes);

  const auto offset = header.get<float>(field::kVoxOffset);
  const bool whole = offset >= kDataStart && offset < 0x1p53f && offset == std::floor(offset);
  file.check(whole, "vox_offset must be a whole number of at least ", kDataStart, ", got ", offset);
  layout.offset = static_cast<int64_t>(offset);

  // As in the reference implementation, a slope that is 0 or not finite means that there is no scaling.
  const auto slope = header.get<float>(field::kSclSlope), intercept = header.get<float>(field::kSclInter);
  if (slope != 0 && std::isfinite(slope)) {
    file.check(std::isfinite(intercept), "scl_inter is not finite");
    layout.scaling = {slope, intercept};
  }
  return layout;
}

/// Returns the spacing along the axes i, j, k of the file. Some programs write negative values, so the absolute values
/// are returned.
std::array<double, 3> read_pixdim(const InputFile& file, const RawHeader& header) {
  std::array<double, 3> pixdim;
  const int rank = header.get<int16_t>(field::kDim);
  for (int i = 0; i < 3; ++i) {
    pixdim[i] = std::abs(header.get<float>(field::kPixdim, i + 1));
    const bool single = i >= rank || header.get<int16_t>(field::kDim, i + 1) == 1;
    if (single && !(pixdim[i] > 0 && std::isfinite(pixdim[i]))) pixdim[i] = 1;  // an axis of size 1 may lack a spacing
    file.check(std::isfinite(pixdim[i]), "pixdim[", i + 1, "] is not finite");
    file.check(pixdim[i] > 0, "pixdim[", i + 1, "] is 0");
  }
  return pixdim;
}

/// Computes the qform (method 2 of nifti1.h) from a unit quaternion and an offset. The header stores the imaginary part
/// of the quaternion.
void set_from_qform(const InputFile& file, const RawHeader& header, const std::array<double, 3>& pixdim,
                    NiftiImage& image) {
  double b = header.get<float>(field::kQuatern, 0), c = header.get<float>(field::kQuatern, 1),
         d = header.get<float>(field::kQuatern, 2);
  double rest = 1 - (b * b + c * c + d * d);
  file.check(rest >= -1e-5, "the quaternion of the qform (", b, ", ", c, ", ", d, ") is longer than 1 or not finite");
  // For a rotation by 180 degrees, `a` is 0. Rounding to float32 can leave a^2 = 1e-7 instead, and the root of this
  // value is 3e-4. As in the reference implementation (nifti_quatern_to_mat44), smaller values of a^2 are therefore set
  // to 0.
  if (rest < 1e-7) {
    const double length = std::sqrt(b * b + c * c + d * d);
    for (double* x : {&b, &c, &d}) *x /= length;
    rest = 0;
  }
  const double a = std::sqrt(rest);
  const double rotation[3][3] = {{a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)},
                                 {2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)},
                                 {2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c}};
  const double handedness = header.get<float>(field::kPixdim, 0) < 0 ? -1 : 1;
  const double scale[3] = {pixdim[0], pixdim[1], pixdim[2] * handedness};
  for (size_t row = 0; row < 3; ++row) {
    for (size_t column = 0; column < 3; ++column) image.affine[row][column] = rotation[row][column] * scale[column];
    image.affine[row][3] = header.get<float>(field::kQoffset, row);
  }
}

void read_geometry(const InputFile& file, const RawHeader& header, NiftiImage& image) {
  const auto pixdim = read_pixdim(file, header);
  if (header.get<int16_t>(field::kSformCode) > 0) {
    for (size_t row = 0; row < 3; ++row)
      for (size_t column = 0; column < 4; ++column)
        image.affine[row][column] = header.get<float>(field::kSrow, row * 4 + column);
  } else if (header.get<int16_t>(field::kQformCode) > 0) {
    set_from_qform(file, header, pixdim, image);
  } else {
    for (size_t i = 0; i < 3; ++i) image.affine[i][i] = pixdim[i];
  }

  const int unit = header.bytes[field::kXyztUnits] & 7;
  const double to_mm = unit == 1 ? 1000 : unit == 3 ? 0.001 : 1;  // meters, micrometers, millimeters or unknown
  for (size_t i = 0; i < 3; ++i) image.spacing[i] = pixdim[2 - i] * to_mm;
  for (size_t row = 0; row < 3; ++row) {
    for (double& value : image.affine[row]) {
      file.check(std::isfinite(value), "the voxel-to-world matrix is not finite");
      value *= to_mm;
    }
  }
}

/// Returns the voxels as f32. Throws unless the file ends with the last voxel.
Tensor read_voxels(const InputFile& file, UnpackedFile& unpacked, const Layout& layout, bool swapped) {
  const auto& [shape, type, offset, scaling] = layout;
  // The product cannot overflow: four axes are below 2^15 each, and a voxel has at most 8 bytes.
  const int64_t bytes = numel(shape) * type->bytes;
  const std::string end = concat(shape, ' ', type->name, " end at byte ", offset, " + ", bytes);
  int64_t max_size = file.size();  // upper bound of the decompressed size
  if (unpacked.is_packed() && __builtin_mul_overflow(max_size, kMaxGzipRatio, &max_size)) max_size = INT64_MAX;
  file.check(offset <= max_size && bytes <= max_size - offset, "truncated: ", end, ", but the file has at most ",
             max_size);
  file.check_limit(numel(shape) * item_size(f32), shape, " f32");

  std::vector<char> chunk(kChunk);
  const auto read = [&](int64_t count) {
    const auto wanted = static_cast<size_t>(count);
    file.check(unpacked.read(chunk.data(), wanted) == wanted, "truncated: ", end, ", but the file ends earlier");
  };
  for (int64_t gap = offset - static_cast<int64_t>(kHeaderBytes); gap > 0; gap -= static_cast<int64_t>(kChunk))
    read(std::min(gap, static_cast<int64_t>(kChunk)));
  Tensor tensor = empty(shape);
  float* to = tensor.mutable_data<float>();
  const int64_t count = tensor.numel(), per_chunk = static_cast<int64_t>(kChunk) / type->bytes;
  for (int64_t done = 0; done < count; done += per_chunk) {
    const int64_t now = std::min(per_chunk, count - done);
    read(now * type->bytes);
    if (swapped) swap_bytes(chunk.data(), type->bytes, now);
    type->decode(file, chunk.data(), to + done, now, scaling);
  }
  file.check(unpacked.read(chunk.data(), 1) == 0, "trailing bytes: ", end, ", but the file is longer");
  return tensor;
}

bool ends_with(const std::filesystem::path& path, std::string_view suffix) {
  return path.filename().string().ends_with(suffix);
}

void check_image(const std::filesystem::path& path, const NiftiImage& image) {
  constexpr const char* op = "save_nifti";
  check(ends_with(path, ".nii") || ends_with(path, ".nii.gz"), op, "'", path.string(),
        "' must end with .nii or .nii.gz");
  check(image.data.defined(), op, "the image has no data");
  const Shape& shape = image.data.shape();
  check(shape.size() == 3 || shape.size() == 4, op, "expected (D, H, W) or (T, D, H, W), got ", shape);
  for (int64_t size : shape)
    check(size >= 1 && size <= INT16_MAX, op, "axes must have 1 to ", INT16_MAX, " voxels, got ", shape);
  for (double spacing : image.spacing)
    check(std::isfinite(static_cast<float>(spacing)) && static_cast<float>(spacing) > 0, op,
          "spacing must be positive, got ", spacing);
  for (const auto& row : image.affine)
    for (double value : row) check(std::isfinite(static_cast<float>(value)), op, "the affine is not finite");
  check(image.affine[3] == std::array<double, 4>{0, 0, 0, 1}, op, "the last row of the affine must be 0 0 0 1");
  check(image.descrip.size() < kDescripBytes, op, "descrip has ", image.descrip.size(), " bytes, at most ",
        kDescripBytes - 1, " fit");
}

/// Returns the dtype in which a tensor of `dtype` is saved, and the code of that dtype in the header.
std::pair<DType, int16_t> voxel_type_for(DType dtype) {
  if (dtype == u8) return {u8, 2};
  return dtype == i32 ? std::pair{i32, int16_t{8}} : std::pair{f32, int16_t{16}};
}

RawHeader make_header(const NiftiImage& image) {
  RawHeader header;
  const Shape& shape = image.data.shape();
  const auto rank = static_cast<size_t>(shape.size());
  header.set<int32_t>(field::kSizeofHdr, kHeaderBytes);
  header.set<int16_t>(field::kDim, static_cast<int16_t>(rank));
  header.set<float>(field::kPixdim, 1);
  for (size_t i = 0; i < 7; ++i) {
    const int64_t size = i < rank ? shape[static_cast<int64_t>(rank - 1 - i)] : 1;
    header.set<int16_t>(field::kDim, static_cast<int16_t>(size), i + 1);
    header.set<float>(field::kPixdim, i < 3 ? static_cast<float>(image.spacing[2 - i]) : 1.0f, i + 1);
  }
  const auto [dtype, code] = voxel_type_for(image.data.dtype());
  header.set<int16_t>(field::kDatatype, code);
  header.set<int16_t>(field::kBitpix, static_cast<int16_t>(8 * item_size(dtype)));
  header.set<float>(field::kVoxOffset, kDataStart);
  header.set<float>(field::kSclSlope, 1);
  header.bytes[field::kXyztUnits] = kMillimeters;
  std::copy(image.descrip.begin(), image.descrip.end(), header.bytes.begin() + field::kDescrip);
  header.set<int16_t>(field::kSformCode, 1);  // scanner coordinates
  for (size_t row = 0; row < 3; ++row)
    for (size_t column = 0; column < 4; ++column)
      header.set<float>(field::kSrow, static_cast<float>(image.affine[row][column]), row * 4 + column);
  std::copy_n("n+1", 4, header.bytes.begin() + field::kMagic);
  return header;
}

}  // namespace

NiftiImage load_nifti(const std::filesystem::path& path, Device device, const NiftiOptions& options) {
  runtime(device).require(device.index);
  const InputFile file(path, "load_nifti", options.max_bytes);
  UnpackedFile unpacked(file);
  const RawHeader header = read_header(file, unpacked);
  const Layout layout = read_layout(file, header);
  NiftiImage image;
  read_geometry(file, header, image);
  const char* descrip = header.bytes.data() + field::kDescrip;
  image.descrip.assign(descrip, strnlen(descrip, kDescripBytes));
  image.data = read_voxels(file, unpacked, layout, header.swapped).to(device);
  return image;
}

void save_nifti(const std::filesystem::path& path, const NiftiImage& image) {
  check_image(path, image);
  const RawHeader header = make_header(image);
  const Tensor voxels = image.data.detach().to(Device::cpu(), voxel_type_for(image.data.dtype()).first).contiguous();
  AtomicFile file(path, "save_nifti");
  GzHandle gz = open_gz(file.descriptor(), ends_with(path, ".gz") ? "wb6" : "wbT");  // T: without compression
  check(gz != nullptr, "save_nifti", "zlib cannot write '", path.string(), "'");
  const auto check_gz = [&](bool written) {
    check(written, "save_nifti", "cannot write '", path.string(), "': ", std::generic_category().message(errno));
  };
  const auto write = [&](const void* data, size_t bytes) { check_gz(gzfwrite(data, 1, bytes, gz.get()) == bytes); };
  const char no_extensions[kDataStart - kHeaderBytes] = {};
  write(header.bytes.data(), kHeaderBytes);
  write(no_extensions, sizeof(no_extensions));
  write(voxels.raw_data(), static_cast<size_t>(voxels.numel() * item_size(voxels.dtype())));
  check_gz(gzclose(gz.release()) == Z_OK);
  file.commit();
}

}  // namespace voxgrad
