// What the host kernels share: the arithmetic of one element, the instruction sets, the sharing out
// over threads and the checks of arguments. Internal; outcore_kernels.h is the interface.
//
// A kernel file goes from the inside out: the arithmetic of one element, a serial loop over one
// chunk, that loop compiled once per instruction set, and the C entry points that check their
// arguments and share the chunks out over threads.
//
// Build with -ffp-contract=off: AVX-512 and NEON have fused multiply-adds, and a compiler left free
// to use them would change the bits. -fno-math-errno and -fno-trapping-math change no bits; without
// them sqrt is not vectorised.

#ifndef OUTCORE_HOST_KERNEL_H_
#define OUTCORE_HOST_KERNEL_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "outcore_kernels.h"

#ifdef _OPENMP
#include <omp.h>
#endif

// A loop takes on the instruction set of the function it is inlined into, so it must be inlined.
#define OC_INLINE inline __attribute__((always_inline))

namespace outcore {

using Scalars = oc_adamw_scalars;

// ---------------------------------------------------------------------------------------------
// One element
// ---------------------------------------------------------------------------------------------

OC_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

OC_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

OC_INLINE float widen(uint16_t bf16) { return float_of(static_cast<uint32_t>(bf16) << 16); }
OC_INLINE float widen(float x) { return x; }

OC_INLINE float adamw(float p, float& m, float& v, float grad, const Scalars& s) {
  const float g = s.grad_scale * grad;
  m = (s.beta1 * m) + (s.one_minus_beta1 * g);
  v = (s.beta2 * v) + (s.one_minus_beta2 * (g * g));
  const float d = (std::sqrt(v) * s.inv_sqrt_bc2) + s.eps;
  return (p * s.decay) - (s.step_size * (m / d));
}

// ---------------------------------------------------------------------------------------------
// Instruction sets
// ---------------------------------------------------------------------------------------------

enum class Loop { kVector, kScalar };

// Compilers do not vectorise a loop that holds an asm statement, so the scalar build really goes
// element by element and the tests have something independent to compare vector code with.
template <Loop kLoop>
OC_INLINE void keep_scalar() {
  if (kLoop == Loop::kScalar) asm volatile("");
}

// OC_FOR_EACH_ISA(define) calls define(name, target attribute, loop, supported) for each, the best
// first; the last one runs anywhere. Macros, because an attribute cannot be a template parameter.
#if defined(__x86_64__)

// GCC's generic tuning would stay at 256 bits; clang's goes to 512 and does not know the option.
#if defined(__clang__)
#define OC_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define OC_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#define OC_AVX2 __attribute__((target("avx2")))

#define OC_FOR_EACH_ISA(define)                        \
  define(avx512, OC_AVX512, Loop::kVector, has_avx512) \
      define(avx2, OC_AVX2, Loop::kVector, has_avx2) define(scalar, , Loop::kScalar, always)

#elif defined(__aarch64__)

// NEON is part of every aarch64 CPU: no attribute and no check.
#define OC_FOR_EACH_ISA(define) \
  define(neon, , Loop::kVector, always) define(scalar, , Loop::kScalar, always)

#else

#define OC_FOR_EACH_ISA(define) define(scalar, , Loop::kScalar, always)

#endif

// For a table of all variants of a file: {OC_FOR_EACH_ISA(OC_TABLE_ENTRY)}.
#define OC_TABLE_ENTRY(isa, target, loop, supported) &isa::kernels,

// The place in such a table of the instruction set in use.
__attribute__((visibility("hidden"))) int active_isa();

// ---------------------------------------------------------------------------------------------
// Sharing out
// ---------------------------------------------------------------------------------------------

// Long enough to hide the call, short enough to spread a small block over all cores.
constexpr int64_t kChunk = 16 * 1024;

// Calls run(begin, length) for every chunk of [0, n).
template <typename Run>
void for_each_chunk(int64_t n, int threads, const Run& run) {
#ifdef _OPENMP
  // A team keeps its size even when there are fewer chunks than threads: libgomp ends and restarts
  // its threads when the size changes, which costs more than a few that wake for nothing.
  if (threads == 0) threads = omp_get_max_threads();
  const bool parallel = threads > 1 && n > kChunk;
// Dynamic: a thread that shares its core with whoever launches work on the device would hold up
// all others under a static split.
#pragma omp parallel for schedule(dynamic, 2) num_threads(threads) if (parallel)
#else
  (void)threads;
#endif
  for (int64_t begin = 0; begin < n; begin += kChunk) run(begin, std::min(kChunk, n - begin));
}

// ---------------------------------------------------------------------------------------------
// Checking
// ---------------------------------------------------------------------------------------------

template <typename Pointer>
int check_array(Pointer array) {
  if (array == nullptr) return OC_ERROR_NULL;
  const bool aligned = reinterpret_cast<uintptr_t>(array) % sizeof(*array) == 0;
  return aligned ? OC_OK : OC_ERROR_ALIGNMENT;
}

template <typename... Pointers>
int check(int64_t n, int threads, Pointers... arrays) {
  if (n < 0) return OC_ERROR_SIZE;
  if (threads < 0) return OC_ERROR_THREADS;
  if (n == 0) return OC_OK;
  int status = OC_OK;
  ((status = status == OC_OK ? check_array(arrays) : status), ...);
  return status;
}

}  // namespace outcore

#endif  // OUTCORE_HOST_KERNEL_H_
