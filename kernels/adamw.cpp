// Host AdamW and the split fp32 master; see outcore_kernels.h for the arithmetic.
//
// From the inside out: the arithmetic of one element, a serial loop over one chunk, that loop
// compiled once per instruction set, and the C entry points that check their arguments and share
// the chunks out over threads.
//
// Build with -ffp-contract=off: AVX-512 and NEON have fused multiply-adds, and a compiler left free
// to use them would change the bits. -fno-math-errno and -fno-trapping-math change no bits; without
// them sqrt is not vectorised.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "outcore_kernels.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

using Scalars = oc_adamw_scalars;

// A loop takes on the instruction set of the function it is inlined into, so it must be inlined.
#define OC_INLINE inline __attribute__((always_inline))

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

OC_INLINE float join(uint16_t weight, int16_t remainder) {
  const uint32_t sign_extended = static_cast<uint32_t>(static_cast<int32_t>(remainder));
  return float_of((static_cast<uint32_t>(weight) << 16) + sign_extended);
}

OC_INLINE uint16_t weight_of(float master) {
  return static_cast<uint16_t>((bits_of(master) + 0x8000u) >> 16);
}

// What the weight takes away is a multiple of 2^16, so the remainder is the master's low half.
OC_INLINE int16_t remainder_of(float master) { return static_cast<int16_t>(bits_of(master)); }

OC_INLINE float adamw(float p, float& m, float& v, float grad, const Scalars& s) {
  const float g = s.grad_scale * grad;
  m = (s.beta1 * m) + (s.one_minus_beta1 * g);
  v = (s.beta2 * v) + (s.one_minus_beta2 * (g * g));
  const float d = (std::sqrt(v) * s.inv_sqrt_bc2) + s.eps;
  return (p * s.decay) - (s.step_size * (m / d));
}

// ---------------------------------------------------------------------------------------------
// One chunk
// ---------------------------------------------------------------------------------------------

enum class Loop { kVector, kScalar };

// Compilers do not vectorise a loop that holds an asm statement, so the scalar build really goes
// element by element and the tests have something independent to compare vector code with.
template <Loop kLoop>
OC_INLINE void keep_scalar() {
  if (kLoop == Loop::kScalar) asm volatile("");
}

template <Loop kLoop, typename Grad>
OC_INLINE void adamw_split_loop(uint16_t* __restrict weight, int16_t* __restrict remainder,
                                float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                const Grad* __restrict grad, int64_t n, const Scalars s) {
  for (int64_t i = 0; i < n; ++i) {
    keep_scalar<kLoop>();
    float m = exp_avg[i];
    float v = exp_avg_sq[i];
    const float p = adamw(join(weight[i], remainder[i]), m, v, widen(grad[i]), s);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    weight[i] = weight_of(p);
    remainder[i] = remainder_of(p);
  }
}

template <Loop kLoop, typename Grad>
OC_INLINE void adamw_fp32_loop(float* __restrict weight, float* __restrict exp_avg,
                               float* __restrict exp_avg_sq, const Grad* __restrict grad, int64_t n,
                               const Scalars s) {
  for (int64_t i = 0; i < n; ++i) {
    keep_scalar<kLoop>();
    float m = exp_avg[i];
    float v = exp_avg_sq[i];
    weight[i] = adamw(weight[i], m, v, widen(grad[i]), s);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
  }
}

template <Loop kLoop>
OC_INLINE void split_loop(const float* __restrict master, uint16_t* __restrict weight,
                          int16_t* __restrict remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    keep_scalar<kLoop>();
    const float p = master[i];
    weight[i] = weight_of(p);
    remainder[i] = remainder_of(p);
  }
}

template <Loop kLoop>
OC_INLINE void join_loop(const uint16_t* __restrict weight, const int16_t* __restrict remainder,
                         float* __restrict master, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    keep_scalar<kLoop>();
    master[i] = join(weight[i], remainder[i]);
  }
}

// ---------------------------------------------------------------------------------------------
// One table per instruction set
// ---------------------------------------------------------------------------------------------

template <typename Grad>
using AdamwSplit = void (*)(uint16_t*, int16_t*, float*, float*, const Grad*, int64_t,
                            const Scalars&);
template <typename Grad>
using AdamwFp32 = void (*)(float*, float*, float*, const Grad*, int64_t, const Scalars&);

struct Kernels {
  const char* name;
  bool (*supported)();
  AdamwSplit<uint16_t> adamw_split_bf16;
  AdamwSplit<float> adamw_split_fp32;
  AdamwFp32<uint16_t> adamw_fp32_bf16;
  AdamwFp32<float> adamw_fp32_fp32;
  void (*split)(const float*, uint16_t*, int16_t*, int64_t);
  void (*join)(const uint16_t*, const int16_t*, float*, int64_t);

  // So that a caller templated on the gradient type finds its kernel.
  AdamwSplit<uint16_t> adamw_split(const uint16_t*) const { return adamw_split_bf16; }
  AdamwSplit<float> adamw_split(const float*) const { return adamw_split_fp32; }
  AdamwFp32<uint16_t> adamw_fp32(const uint16_t*) const { return adamw_fp32_bf16; }
  AdamwFp32<float> adamw_fp32(const float*) const { return adamw_fp32_fp32; }
};

// A macro, because a target attribute cannot be a template parameter.
#define OC_DEFINE_KERNELS(isa, target, loop, supported)                                          \
  namespace isa {                                                                                \
  template <typename Grad>                                                                       \
  target void adamw_split(uint16_t* w, int16_t* r, float* m, float* v, const Grad* g, int64_t n, \
                          const Scalars& s) {                                                    \
    adamw_split_loop<loop>(w, r, m, v, g, n, s);                                                 \
  }                                                                                              \
  template <typename Grad>                                                                       \
  target void adamw_fp32(float* p, float* m, float* v, const Grad* g, int64_t n,                 \
                         const Scalars& s) {                                                     \
    adamw_fp32_loop<loop>(p, m, v, g, n, s);                                                     \
  }                                                                                              \
  target void split(const float* p, uint16_t* w, int16_t* r, int64_t n) {                        \
    split_loop<loop>(p, w, r, n);                                                                \
  }                                                                                              \
  target void join(const uint16_t* w, const int16_t* r, float* p, int64_t n) {                   \
    join_loop<loop>(w, r, p, n);                                                                 \
  }                                                                                              \
  constexpr Kernels kernels = {#isa,                                                             \
                               supported,                                                        \
                               adamw_split<uint16_t>,                                            \
                               adamw_split<float>,                                               \
                               adamw_fp32<uint16_t>,                                             \
                               adamw_fp32<float>,                                                \
                               split,                                                            \
                               join};                                                            \
  }

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

// GCC's generic tuning would stay at 256 bits; clang's goes to 512 and does not know the option.
#if defined(__clang__)
#define OC_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define OC_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#define OC_AVX2 __attribute__((target("avx2")))

OC_DEFINE_KERNELS(avx512, OC_AVX512, Loop::kVector, has_avx512)
OC_DEFINE_KERNELS(avx2, OC_AVX2, Loop::kVector, has_avx2)

#elif defined(__aarch64__)

// NEON is part of every aarch64 CPU: no attribute and no check.
OC_DEFINE_KERNELS(neon, , Loop::kVector, always)

#endif

OC_DEFINE_KERNELS(scalar, , Loop::kScalar, always)

// Best first; the last one runs anywhere.
constexpr const Kernels* kAll[] = {
#if defined(__x86_64__)
    &avx512::kernels,
    &avx2::kernels,
#elif defined(__aarch64__)
    &neon::kernels,
#endif
    &scalar::kernels,
};

// "auto" finds the best; nullptr when there is none of that name on this CPU.
const Kernels* find(const char* name) {
  const bool any = std::strcmp(name, "auto") == 0;
  for (const Kernels* kernels : kAll) {
    if ((any || std::strcmp(name, kernels->name) == 0) && kernels->supported()) return kernels;
  }
  return nullptr;
}

std::atomic<const Kernels*> active{find("auto")};

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

template <typename Grad>
void adamw_split_all(uint16_t* weight, int16_t* remainder, float* exp_avg, float* exp_avg_sq,
                     const Grad* grad, int64_t n, const Scalars& scalars, int threads) {
  const auto step = active.load()->adamw_split(grad);
  for_each_chunk(n, threads, [&](int64_t i, int64_t length) {
    step(weight + i, remainder + i, exp_avg + i, exp_avg_sq + i, grad + i, length, scalars);
  });
}

template <typename Grad>
void adamw_fp32_all(float* weight, float* exp_avg, float* exp_avg_sq, const Grad* grad, int64_t n,
                    const Scalars& scalars, int threads) {
  const auto step = active.load()->adamw_fp32(grad);
  for_each_chunk(n, threads, [&](int64_t i, int64_t length) {
    step(weight + i, exp_avg + i, exp_avg_sq + i, grad + i, length, scalars);
  });
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

}  // namespace

// ---------------------------------------------------------------------------------------------
// Entry points
// ---------------------------------------------------------------------------------------------

extern "C" {

int oc_abi_version(void) { return OC_ABI_VERSION; }

const char* oc_isa(void) { return active.load()->name; }

int oc_set_isa(const char* name) {
  if (name == nullptr) return OC_ERROR_NULL;
  const Kernels* kernels = find(name);
  if (kernels == nullptr) return OC_ERROR_ISA;
  active.store(kernels);
  return OC_OK;
}

int oc_adamw_split(uint16_t* weight, int16_t* remainder, float* exp_avg, float* exp_avg_sq,
                   const void* grad, int grad_dtype, int64_t n, const oc_adamw_scalars* scalars,
                   int threads) {
  if (scalars == nullptr) return OC_ERROR_NULL;
  const auto run = [&](auto* typed_grad) -> int {
    const int status = check(n, threads, weight, remainder, exp_avg, exp_avg_sq, typed_grad);
    if (status != OC_OK) return status;
    adamw_split_all(weight, remainder, exp_avg, exp_avg_sq, typed_grad, n, *scalars, threads);
    return OC_OK;
  };
  if (grad_dtype == OC_BF16) return run(static_cast<const uint16_t*>(grad));
  if (grad_dtype == OC_FP32) return run(static_cast<const float*>(grad));
  return OC_ERROR_DTYPE;
}

int oc_adamw_fp32(float* weight, float* exp_avg, float* exp_avg_sq, const void* grad,
                  int grad_dtype, int64_t n, const oc_adamw_scalars* scalars, int threads) {
  if (scalars == nullptr) return OC_ERROR_NULL;
  const auto run = [&](auto* typed_grad) -> int {
    const int status = check(n, threads, weight, exp_avg, exp_avg_sq, typed_grad);
    if (status != OC_OK) return status;
    adamw_fp32_all(weight, exp_avg, exp_avg_sq, typed_grad, n, *scalars, threads);
    return OC_OK;
  };
  if (grad_dtype == OC_BF16) return run(static_cast<const uint16_t*>(grad));
  if (grad_dtype == OC_FP32) return run(static_cast<const float*>(grad));
  return OC_ERROR_DTYPE;
}

int oc_split_master(const float* master, uint16_t* weight, int16_t* remainder, int64_t n,
                    int threads) {
  const int status = check(n, threads, master, weight, remainder);
  if (status != OC_OK) return status;
  const auto split = active.load()->split;
  for_each_chunk(n, threads, [&](int64_t i, int64_t length) {
    split(master + i, weight + i, remainder + i, length);
  });
  return OC_OK;
}

int oc_join_master(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n,
                   int threads) {
  const int status = check(n, threads, master, weight, remainder);
  if (status != OC_OK) return status;
  const auto join = active.load()->join;
  for_each_chunk(n, threads, [&](int64_t i, int64_t length) {
    join(weight + i, remainder + i, master + i, length);
  });
  return OC_OK;
}

}  // extern "C"
