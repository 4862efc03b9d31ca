// A library for LD_PRELOAD that makes an allocation of a program fail, for the part `allocations` of soak.py. It
// replaces malloc and its relatives, which operator new calls, and counts the allocations of all threads from the start
// of main() to its end. Environment variables:
//
//   VOXGRAD_FAIL_ALLOCATION=N        allocation number N (from 1) fails
//   VOXGRAD_FAIL_ALLOCATION=N+       allocation number N and all later ones fail
//   VOXGRAD_ALLOCATIONS_LOG=PATH     writes the number of allocations before each rename, and the new name
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static atomic_int counting;
static atomic_long count;
static long first_failure;  // 0: none
static int all_fail;        // allocations after the first failure fail too
static FILE* record;
static int (*program_main)(int, char**, char**);

static int fails(void) {
  if (!atomic_load(&counting)) return 0;
  const long number = atomic_fetch_add(&count, 1) + 1;
  const int fail = first_failure > 0 && (all_fail ? number >= first_failure : number == first_failure);
  if (fail) errno = ENOMEM;
  return fail;
}

void* malloc(size_t bytes) { return fails() ? NULL : __libc_malloc(bytes); }
void* calloc(size_t items, size_t bytes) { return fails() ? NULL : __libc_calloc(items, bytes); }
void* realloc(void* data, size_t bytes) { return fails() ? NULL : __libc_realloc(data, bytes); }
void* memalign(size_t alignment, size_t bytes) { return fails() ? NULL : __libc_memalign(alignment, bytes); }
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** data, size_t alignment, size_t bytes) {
  void* const found = memalign(alignment, bytes);
  if (!found) return ENOMEM;
  *data = found;
  return 0;
}

int rename(const char* from, const char* to) {
  static int (*next)(const char*, const char*);
  if (!next) *(void**)&next = dlsym(RTLD_NEXT, "rename");
  if (record) fprintf(record, "%ld %s\n", atomic_load(&count), to);
  return next(from, to);
}

static int counted_main(int argc, char** argv, char** environment) {
  if (getenv("VOXGRAD_ALLOCATIONS_LOG")) {
    record = fopen(getenv("VOXGRAD_ALLOCATIONS_LOG"), "w");
    if (record) setvbuf(record, NULL, _IONBF, 0);
  }
  if (getenv("VOXGRAD_FAIL_ALLOCATION")) {
    char* end;
    first_failure = strtol(getenv("VOXGRAD_FAIL_ALLOCATION"), &end, 10);
    all_fail = *end == '+';
  }
  atomic_store(&counting, 1);
  const int code = program_main(argc, argv, environment);
  atomic_store(&counting, 0);
  return code;
}

// Before main(), the dynamic loader and the initialization of static variables may fail without memory.
int __libc_start_main(int (*main)(int, char**, char**), int argc, char** argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void* stack_end) {
  int (*next)(int (*)(int, char**, char**), int, char**, void (*)(void), void (*)(void), void (*)(void), void*);
  *(void**)&next = dlsym(RTLD_NEXT, "__libc_start_main");
  program_main = main;
  return next(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}
