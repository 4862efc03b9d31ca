// Shared libraries that are loaded at run time. Private to the library.
#pragma once

#include <dlfcn.h>

#include <string>

#include "../error.h"

namespace voxgrad {

/// A shared library that is loaded when the object is constructed. A program that does not use the library therefore
/// starts on machines that do not have the library. The library stays loaded until the process ends.
///
/// A derived class declares the functions that it needs with VG_LIBRARY_FUNCTION. The library stores the only object of
/// the class in a static variable of a function: the first call of the function loads the library, in one thread. If
/// this throws, the next call tries again.
class SharedLibrary {
 public:
  /// Loads the file `name`, for example "libnccl.so.2". The dynamic linker returns a library of this name that the
  /// process has already loaded, or searches LD_LIBRARY_PATH, the run path of the program, and the system's folders. If
  /// this fails, the constructor loads the file from `folder`. Throws Error if both fail: the message starts with
  /// "<op>: cannot load <name>", contains the errors of the dynamic linker, and asks to install `package`.
  SharedLibrary(const char* op, const std::string& name, const std::string& folder, const std::string& package)
      : op_(op), name_(name) {
    // RTLD_LOCAL keeps the library's names away from other libraries of the process.
    constexpr int kFlags = RTLD_LAZY | RTLD_LOCAL;
    handle_ = ::dlopen(name.c_str(), kFlags);
    if (handle_ != nullptr) return;
    const std::string error = ::dlerror();
    // The linker searches the run path of the program, but an installed program usually has none. The absolute path
    // works for all programs on the machine on which voxgrad was built. The user's choice, LD_LIBRARY_PATH, comes
    // first.
    handle_ = ::dlopen(concat(folder, "/", name).c_str(), kFlags);
    if (handle_ == nullptr)
      fail(op, "cannot load ", name, " (", error, "; ", ::dlerror(), "); install ", package,
           ", or add the folder of the file to LD_LIBRARY_PATH");
  }

  /// Returns the address of the function `function`. Throws Error if the library does not contain the function.
  void* address(const char* function) const {
    void* const found = ::dlsym(handle_, function);
    check(found != nullptr, op_, name_, " has no function ", function, "; install a newer version of the library");
    return found;
  }

 private:
  const char* op_;
  std::string name_;
  void* handle_;
};

/// Declares a member of a class derived from SharedLibrary: a pointer to the library's function of the same name. A
/// header of the library must declare the function, whose type is that of the pointer.
#define VG_LIBRARY_FUNCTION(name) decltype(&::name) name = reinterpret_cast<decltype(&::name)>(address(#name))

}  // namespace voxgrad
