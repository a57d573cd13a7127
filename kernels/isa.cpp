// The instruction set that all host kernels use: found at load, and changed only by request.

#include <atomic>
#include <cstring>

#include "host_kernel.h"

namespace {

bool always() { return true; }

#if defined(__x86_64__)

bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2");
}

#endif

struct Isa {
  const char* name;
  bool (*supported)();
};

#define OC_ISA(isa, target, loop, supported) {#isa, supported},

// Best first; the last one runs anywhere.
constexpr Isa kAll[] = {OC_FOR_EACH_ISA(OC_ISA)};
constexpr int kNone = -1;

// "auto" finds the best.
int find(const char* name) {
  const bool any = std::strcmp(name, "auto") == 0;
  int place = 0;
  for (const Isa& isa : kAll) {
    if ((any || std::strcmp(name, isa.name) == 0) && isa.supported()) return place;
    ++place;
  }
  return kNone;
}

std::atomic<int> active{find("auto")};

}  // namespace

int outcore::active_isa() { return active.load(); }

extern "C" {

int oc_abi_version(void) { return OC_ABI_VERSION; }

const char* oc_isa(void) { return kAll[active.load()].name; }

int oc_set_isa(const char* name) {
  if (name == nullptr) return OC_ERROR_NULL;
  const int place = find(name);
  if (place == kNone) return OC_ERROR_ISA;
  active.store(place);
  return OC_OK;
}

}  // extern "C"
