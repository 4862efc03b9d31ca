// A substitute for NVIDIA's driver library, libcuda.so.1, which supports only CUDA 11.8. The CUDA runtime looks up all
// functions with cuGetProcAddress.
#include <string.h>

static int get_version(int* version) {
  *version = 11080;
  return 0;
}

static int fail(void) { return 100; }  // CUDA_ERROR_NO_DEVICE

int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags, int* status) {
  (void)version;
  (void)flags;
  if (status) *status = 0;
  if (strcmp(name, "cuGetProcAddress") == 0) {
    *function = (void*)cuGetProcAddress_v2;
  } else if (strcmp(name, "cuDriverGetVersion") == 0) {
    *function = (void*)get_version;
  } else {
    *function = (void*)fail;
  }
  return 0;
}

int cuDriverGetVersion(int* version) { return get_version(version); }
