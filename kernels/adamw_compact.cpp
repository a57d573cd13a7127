// Host AdamW over 8-bit moments and a short master; see outcore_kernels.h for the formats.

#include "host_kernel.h"

namespace {

using namespace outcore;

constexpr int kBlock = OC_BLOCK;
static_assert(kChunk % kBlock == 0, "a chunk must not end within a block");

// ---------------------------------------------------------------------------------------------
// Random bits
// ---------------------------------------------------------------------------------------------

struct Keys {
  uint32_t k0;
  uint32_t k1;
};

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

Keys keys_of(uint64_t seed, uint64_t step) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const uint64_t z = mix(mix(seed + kGolden) + step + kGolden);
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

// What is hashed for the first element of a block; its others follow by counting, since a block
// does not cross a multiple of 2^32.
OC_INLINE uint32_t counter_of(int64_t element) {
  const uint64_t e = static_cast<uint64_t>(element);
  return static_cast<uint32_t>(e) + static_cast<uint32_t>(e >> 32) * 0x9e3779b1u;
}

OC_INLINE uint32_t random_of(uint32_t counter, Keys keys) {
  uint32_t x = counter + keys.k0;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15) ^ keys.k1) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Each takes its own bits first; where they overlap, low bits of one are high bits of another.
OC_INLINE uint32_t random_for_m(uint32_t random) { return random >> 12; }
OC_INLINE uint32_t random_for_v(uint32_t random) { return (random >> 5) & 0x7ffff; }

// ---------------------------------------------------------------------------------------------
// Codes
// ---------------------------------------------------------------------------------------------

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr float kOffset = 0x1p-15f;
constexpr uint32_t kOffsetBits = 0x38000000u;

struct Format {
  int shift;
  uint32_t top;
};
constexpr Format kM = {20, 127};
constexpr Format kV = {19, 255};

OC_INLINE float decode(uint32_t magnitude, float scale, Format format) {
  return (float_of(kOffsetBits + (magnitude << format.shift)) - kOffset) * scale;
}

// The code in the low bits, and those of the offset above them, which a caller cuts off. A NaN is
// large, thus the top: multiplying and adding leave the sign of a positive one alone.
OC_INLINE uint32_t encode(uint32_t magnitude_bits, float inverse_scale, uint32_t random,
                          Format format) {
  const uint32_t t = bits_of((float_of(magnitude_bits) * inverse_scale) + kOffset);
  const uint32_t offset = kOffsetBits >> format.shift;
  return std::min((t + random) >> format.shift, offset + format.top);
}
static_assert((kOffsetBits >> kM.shift) % 128 == 0 && (kOffsetBits >> kV.shift) % 256 == 0,
              "a code must be the low bits of what is encoded");

OC_INLINE uint32_t scale_of(uint32_t largest_bits) {
  return std::max(32u, (std::min(largest_bits, 0x7e800000u) + 0x200000u) >> 23);
}

OC_INLINE float power_of_two(uint32_t biased_exponent) { return float_of(biased_exponent << 23); }

// A NaN whose payload is not the hardware's choice, and that no carry can turn into a number.
OC_INLINE uint32_t bits_for_rounding(float p) { return p != p ? 0x7fc00000u : bits_of(p); }

enum class Master { kCompact, kMinimal };

template <Master kMaster>
OC_INLINE float join(uint16_t weight, const int8_t* remainder, int64_t i) {
  const uint32_t high = static_cast<uint32_t>(weight) << 16;
  if (kMaster == Master::kMinimal) return float_of(high);
  return float_of(high + (static_cast<uint32_t>(static_cast<int32_t>(remainder[i])) << 8));
}

// ---------------------------------------------------------------------------------------------
// One block
// ---------------------------------------------------------------------------------------------

template <typename Grad>
struct Arrays {
  uint16_t* weight;
  int8_t* remainder;  // null for the minimal state
  uint8_t* exp_avg;
  uint8_t* exp_avg_sq;
  uint8_t* exp_avg_scale;
  uint8_t* exp_avg_sq_scale;
  const Grad* grad;

  Arrays at(int64_t i) const {
    return {weight + i,
            remainder == nullptr ? nullptr : remainder + i,
            exp_avg + i,
            exp_avg_sq + i,
            exp_avg_scale + i / kBlock,
            exp_avg_sq_scale + i / kBlock,
            grad + i};
  }
};

template <Loop kLoop, Master kMaster, typename Grad>
OC_INLINE void step_block(uint16_t* __restrict weight, int8_t* __restrict remainder,
                          uint8_t* __restrict exp_avg, uint8_t* __restrict exp_avg_sq,
                          uint8_t* __restrict exp_avg_scale, uint8_t* __restrict exp_avg_sq_scale,
                          const Grad* __restrict grad, int64_t count, uint32_t counter, Keys keys,
                          const Scalars s) {
  // The new scales are known when all of the block is, so its fp32 numbers wait here, in the L1
  // cache. Short loops rather than one: on mixed widths that one would run out of registers.
  alignas(64) float ms[kBlock];
  alignas(64) float vs[kBlock];
  alignas(64) uint32_t randoms[kBlock];

  const float old_m_scale = power_of_two(*exp_avg_scale);
  const float old_v_scale = power_of_two(*exp_avg_sq_scale);
  for (int64_t i = 0; i < count; ++i) {
    keep_scalar<kLoop>();
    const uint32_t code = exp_avg[i];
    const float magnitude = decode(code & 0x7f, old_m_scale, kM);
    ms[i] = float_of(bits_of(magnitude) | ((code & 0x80) << 24));
    vs[i] = decode(exp_avg_sq[i], old_v_scale, kV);
  }

  for (int64_t i = 0; i < count; ++i) {
    keep_scalar<kLoop>();
    randoms[i] = random_of(counter + static_cast<uint32_t>(i), keys);
  }

  uint32_t largest_m = 0;
  uint32_t largest_v = 0;
  for (int64_t i = 0; i < count; ++i) {
    keep_scalar<kLoop>();
    float m = ms[i];
    float v = vs[i];
    const float p = adamw(join<kMaster>(weight[i], remainder, i), m, v, widen(grad[i]), s);
    ms[i] = m;
    vs[i] = v;
    largest_m = std::max(largest_m, bits_of(m) & kMagnitude);
    largest_v = std::max(largest_v, bits_of(v) & kMagnitude);
    if (kMaster == Master::kMinimal) {
      weight[i] = static_cast<uint16_t>((bits_for_rounding(p) + (randoms[i] & 0xffff)) >> 16);
    } else {
      const uint32_t q = bits_for_rounding(p) + (randoms[i] & 0xff);
      weight[i] = static_cast<uint16_t>(((q & ~0xffu) + 0x8000u) >> 16);
      remainder[i] = static_cast<int8_t>(q >> 8);
    }
  }

  const uint32_t m_scale = scale_of(largest_m);
  const uint32_t v_scale = scale_of(largest_v);
  *exp_avg_scale = static_cast<uint8_t>(m_scale);
  *exp_avg_sq_scale = static_cast<uint8_t>(v_scale);
  const float inverse_m_scale = power_of_two(254 - m_scale);
  const float inverse_v_scale = power_of_two(254 - v_scale);
  // The sign of a NaN is the hardware's choice, so a block with one has no signs.
  const uint32_t sign_mask = largest_m > kInfinity ? 0 : 0x80;
  for (int64_t i = 0; i < count; ++i) {
    keep_scalar<kLoop>();
    const uint32_t m_bits = bits_of(ms[i]);
    const uint32_t v_bits = bits_of(vs[i]) & kMagnitude;
    const uint32_t m_code =
        encode(m_bits & kMagnitude, inverse_m_scale, random_for_m(randoms[i]), kM) & 0x7f;
    const uint32_t v_code = encode(v_bits, inverse_v_scale, random_for_v(randoms[i]), kV);
    const uint32_t v_smallest = (kOffsetBits >> kV.shift) + std::min(v_bits | m_code, 1u);
    exp_avg[i] = static_cast<uint8_t>(m_code | ((m_bits >> 24) & sign_mask));
    exp_avg_sq[i] = static_cast<uint8_t>(std::max(v_code, v_smallest));
  }
}

template <Loop kLoop, Master kMaster, typename Grad>
OC_INLINE void step_chunk(const Arrays<Grad>& arrays, int64_t n, int64_t first_element, Keys keys,
                          const Scalars& s) {
  const auto step = [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Arrays<Grad> a = arrays.at(i);
    step_block<kLoop, kMaster>(a.weight, a.remainder, a.exp_avg, a.exp_avg_sq, a.exp_avg_scale,
                               a.exp_avg_sq_scale, a.grad, count, counter_of(first_element + i),
                               keys, s);
  };
  // Whole blocks apart from the last one: a constant number of turns makes better loops.
  const int64_t whole = n - n % kBlock;
  for (int64_t i = 0; i < whole; i += kBlock) step(i, kBlock);
  if (whole < n) step(whole, n - whole);
}

// ---------------------------------------------------------------------------------------------
// One table per instruction set
// ---------------------------------------------------------------------------------------------

template <typename Grad>
using Step = void (*)(const Arrays<Grad>&, int64_t, int64_t, Keys, const Scalars&);

struct Kernels {
  Step<uint16_t> compact_bf16;
  Step<float> compact_fp32;
  Step<uint16_t> minimal_bf16;
  Step<float> minimal_fp32;

  // So that a caller templated on the gradient type finds its kernel.
  Step<uint16_t> find(Master master, const uint16_t*) const {
    return master == Master::kCompact ? compact_bf16 : minimal_bf16;
  }
  Step<float> find(Master master, const float*) const {
    return master == Master::kCompact ? compact_fp32 : minimal_fp32;
  }
};

#define OC_DEFINE_KERNELS(isa, target, loop, supported)                                          \
  namespace isa {                                                                                \
  template <Master kMaster, typename Grad>                                                       \
  target void step(const Arrays<Grad>& arrays, int64_t n, int64_t first, Keys keys,              \
                   const Scalars& s) {                                                           \
    step_chunk<loop, kMaster>(arrays, n, first, keys, s);                                        \
  }                                                                                              \
  constexpr Kernels kernels = {step<Master::kCompact, uint16_t>, step<Master::kCompact, float>,  \
                               step<Master::kMinimal, uint16_t>, step<Master::kMinimal, float>}; \
  }

OC_FOR_EACH_ISA(OC_DEFINE_KERNELS)

constexpr const Kernels* kAll[] = {OC_FOR_EACH_ISA(OC_TABLE_ENTRY)};

// ---------------------------------------------------------------------------------------------
// Sharing out
// ---------------------------------------------------------------------------------------------

struct Call {
  int64_t n;
  const Scalars* scalars;
  uint64_t seed;
  uint64_t step;
  int64_t first_element;
  int threads;
};

template <typename Grad>
void step_all(Master master, const Arrays<Grad>& arrays, const Call& call) {
  const auto step = kAll[active_isa()]->find(master, arrays.grad);
  const Keys keys = keys_of(call.seed, call.step);
  for_each_chunk(call.n, call.threads, [&](int64_t i, int64_t length) {
    step(arrays.at(i), length, call.first_element + i, keys, *call.scalars);
  });
}

template <typename Grad>
int check_and_step(Master master, const Arrays<Grad>& arrays, const Call& call) {
  if (call.scalars == nullptr) return OC_ERROR_NULL;
  int status = check(call.n, call.threads, arrays.weight, arrays.exp_avg, arrays.exp_avg_sq,
                     arrays.exp_avg_scale, arrays.exp_avg_sq_scale, arrays.grad);
  if (status == OC_OK && master == Master::kCompact) {
    status = check(call.n, call.threads, arrays.remainder);
  }
  if (status != OC_OK) return status;
  if (call.first_element < 0 || call.first_element % kBlock != 0) return OC_ERROR_BLOCK;
  step_all(master, arrays, call);
  return OC_OK;
}

int run(Master master, uint16_t* weight, int8_t* remainder, uint8_t* exp_avg, uint8_t* exp_avg_sq,
        uint8_t* exp_avg_scale, uint8_t* exp_avg_sq_scale, const void* grad, int grad_dtype,
        const Call& call) {
  const auto run_typed = [&](auto* typed_grad) -> int {
    using Grad = std::remove_const_t<std::remove_pointer_t<decltype(typed_grad)>>;
    const Arrays<Grad> arrays = {weight,        remainder,        exp_avg,   exp_avg_sq,
                                 exp_avg_scale, exp_avg_sq_scale, typed_grad};
    return check_and_step(master, arrays, call);
  };
  if (grad_dtype == OC_BF16) return run_typed(static_cast<const uint16_t*>(grad));
  if (grad_dtype == OC_FP32) return run_typed(static_cast<const float*>(grad));
  return OC_ERROR_DTYPE;
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// Entry points
// ---------------------------------------------------------------------------------------------

extern "C" {

int oc_adamw_compact(uint16_t* weight, int8_t* remainder, uint8_t* exp_avg, uint8_t* exp_avg_sq,
                     uint8_t* exp_avg_scale, uint8_t* exp_avg_sq_scale, const void* grad,
                     int grad_dtype, int64_t n, const oc_adamw_scalars* scalars, uint64_t seed,
                     uint64_t step, int64_t first_element, int threads) {
  return run(Master::kCompact, weight, remainder, exp_avg, exp_avg_sq, exp_avg_scale,
             exp_avg_sq_scale, grad, grad_dtype, {n, scalars, seed, step, first_element, threads});
}

int oc_adamw_minimal(uint16_t* weight, uint8_t* exp_avg, uint8_t* exp_avg_sq,
                     uint8_t* exp_avg_scale, uint8_t* exp_avg_sq_scale, const void* grad,
                     int grad_dtype, int64_t n, const oc_adamw_scalars* scalars, uint64_t seed,
                     uint64_t step, int64_t first_element, int threads) {
  return run(Master::kMinimal, weight, nullptr, exp_avg, exp_avg_sq, exp_avg_scale,
             exp_avg_sq_scale, grad, grad_dtype, {n, scalars, seed, step, first_element, threads});
}

}  // extern "C"
