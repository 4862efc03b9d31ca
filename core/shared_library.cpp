// Loads shared libraries at run time.
#include "core/detail/shared_library.h"

#include <dlfcn.h>

#include "core/error.h"

namespace voxgrad {

SharedLibrary::SharedLibrary(const char* op, const std::string& name, const std::string& folder,
                             const std::string& package)
    : op_(op), name_(name) {
  // RTLD_LOCAL keeps the library's names away from other libraries of the process.
  constexpr int kFlags = RTLD_LAZY | RTLD_LOCAL;
  handle_ = ::dlopen(name.c_str(), kFlags);
  if (handle_ != nullptr) return;
  const std::string error = ::dlerror();
  // The linker searches the run path of the program, but an installed program usually has none. The absolute path works
  // for all programs on the machine on which voxgrad was built. The user's choice, LD_LIBRARY_PATH, comes first.
  handle_ = ::dlopen(concat(folder, "/", name).c_str(), kFlags);
  if (handle_ == nullptr)
    fail(op, "cannot load ", name, " (", error, "; ", ::dlerror(), "); install ", package,
         ", or add the folder of the file to LD_LIBRARY_PATH");
}

void* SharedLibrary::address(const char* function) const {
  void* const found = ::dlsym(handle_, function);
  check(found != nullptr, op_, name_, " has no function ", function, "; install a newer version of the library");
  return found;
}

}  // namespace voxgrad
