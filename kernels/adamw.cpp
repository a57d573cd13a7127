// Host AdamW and the split fp32 master; see outcore_kernels.h for the arithmetic.

#include "host_kernel.h"

namespace {

using namespace outcore;

// ---------------------------------------------------------------------------------------------
// One element
// ---------------------------------------------------------------------------------------------

OC_INLINE float join(uint16_t weight, int16_t remainder) {
  const uint32_t sign_extended = static_cast<uint32_t>(static_cast<int32_t>(remainder));
  return float_of((static_cast<uint32_t>(weight) << 16) + sign_extended);
}

OC_INLINE uint16_t weight_of(float master) {
  return static_cast<uint16_t>((bits_of(master) + 0x8000u) >> 16);
}

// What the weight takes away is a multiple of 2^16, so the remainder is the master's low half.
OC_INLINE int16_t remainder_of(float master) { return static_cast<int16_t>(bits_of(master)); }

// ---------------------------------------------------------------------------------------------
// One chunk
// ---------------------------------------------------------------------------------------------

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
  constexpr Kernels kernels = {adamw_split<uint16_t>,                                            \
                               adamw_split<float>,                                               \
                               adamw_fp32<uint16_t>,                                             \
                               adamw_fp32<float>,                                                \
                               split,                                                            \
                               join};                                                            \
  }

OC_FOR_EACH_ISA(OC_DEFINE_KERNELS)

constexpr const Kernels* kAll[] = {OC_FOR_EACH_ISA(OC_TABLE_ENTRY)};

const Kernels& active() { return *kAll[active_isa()]; }

// ---------------------------------------------------------------------------------------------
// Sharing out
// ---------------------------------------------------------------------------------------------

template <typename Grad>
void adamw_split_all(uint16_t* weight, int16_t* remainder, float* exp_avg, float* exp_avg_sq,
                     const Grad* grad, int64_t n, const Scalars& scalars, int threads) {
  const auto step = active().adamw_split(grad);
  for_each_chunk(n, threads, [&](int64_t i, int64_t length) {
    step(weight + i, remainder + i, exp_avg + i, exp_avg_sq + i, grad + i, length, scalars);
  });
}

template <typename Grad>
void adamw_fp32_all(float* weight, float* exp_avg, float* exp_avg_sq, const Grad* grad, int64_t n,
                    const Scalars& scalars, int threads) {
  const auto step = active().adamw_fp32(grad);
  for_each_chunk(n, threads, [&](int64_t i, int64_t length) {
    step(weight + i, exp_avg + i, exp_avg_sq + i, grad + i, length, scalars);
  });
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// Entry points
// ---------------------------------------------------------------------------------------------

extern "C" {

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
  const auto split = active().split;
  for_each_chunk(n, threads, [&](int64_t i, int64_t length) {
    split(master + i, weight + i, remainder + i, length);
  });
  return OC_OK;
}

int oc_join_master(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n,
                   int threads) {
  const int status = check(n, threads, master, weight, remainder);
  if (status != OC_OK) return status;
  const auto join = active().join;
  for_each_chunk(n, threads, [&](int64_t i, int64_t length) {
    join(weight + i, remainder + i, master + i, length);
  });
  return OC_OK;
}

}  // extern "C"
