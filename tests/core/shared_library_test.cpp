// Tests the loading of shared libraries at run time.
#include "core/detail/shared_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>

#include "tests/support.h"

namespace voxgrad {
namespace {

namespace fs = std::filesystem;

/// The C library. Each process has already loaded it.
struct LibC : SharedLibrary {
  using SharedLibrary::SharedLibrary;
  VG_LIBRARY_FUNCTION(getpid);
};

TEST(SharedLibrary, LoadsByName) {
  const LibC library("op", "libc.so.6", "/no/such/folder", "glibc");
  EXPECT_EQ(library.getpid(), ::getpid());
}

TEST(SharedLibrary, LoadsFromTheFolder) {
  Dl_info info{};
  ASSERT_NE(::dladdr(::dlsym(RTLD_DEFAULT, "getpid"), &info), 0);
  const std::string name = concat("libvoxgrad-test-", ::getpid(), ".so");
  const fs::path link = fs::temp_directory_path() / name;
  fs::create_symlink(fs::canonical(info.dli_fname), link);
  EXPECT_EQ(LibC("op", name, link.parent_path().string(), "glibc").getpid(), ::getpid());
  fs::remove(link);
}

TEST(SharedLibrary, NamesTheMissingFileAndThePackage) {
  EXPECT_ERROR(LibC("matmul", "libnone.so.7", "/no/such/folder", "none 7 (package libnone7)"),
               "matmul: cannot load libnone.so.7 (libnone.so.7: cannot open shared object file: No such file or "
               "directory; /no/such/folder/libnone.so.7: cannot open shared object file: No such file or directory); "
               "install none 7 (package libnone7), or add the folder of the file to LD_LIBRARY_PATH");
}

TEST(SharedLibrary, NamesTheMissingFunction) {
  EXPECT_ERROR(LibC("op", "libc.so.6", "/no/such/folder", "glibc").address("no_such_function"),
               "op: libc.so.6 has no function no_such_function");
}

}  // namespace
}  // namespace voxgrad
