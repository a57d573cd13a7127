// The checksum of scratch pages; see outcore_kernels.h for its definition.
//
// Each page is digested by itself in 32 lanes that step through it side by side, which is what
// vector units and the multiplier's latency want. One thread: callers bring a thread per piece.

#include "host_kernel.h"

namespace {

using outcore::Loop;

constexpr int kLanes = 32;
constexpr int kRowBytes = 8 * kLanes;
constexpr int kRows = OC_PAGE_BYTES / kRowBytes;
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;    // 2^64 / golden ratio, odd
constexpr uint64_t kMultiply = 0xd6e8feb86659fd93u;  // odd, so that multiplying loses nothing

// Each of these is a bijection: whatever differs before it differs after it.
OC_INLINE uint64_t scramble(uint64_t x) { return (x ^ (x >> 32)) * kMultiply; }

OC_INLINE uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <Loop kLoop>
OC_INLINE uint64_t page_digest(const unsigned char* page) {
  uint64_t lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = kGolden * static_cast<uint64_t>(lane + 1);
  }
  for (int row = 0; row < kRows; ++row) {
    // The hardware's prefetcher stops at each page: fetch the same row of the next one by hand.
    // Past the last page this is without effect.
    for (int line = 0; line < kRowBytes; line += 64) {
      __builtin_prefetch(page + OC_PAGE_BYTES + row * kRowBytes + line);
    }
    uint64_t words[kLanes];
    std::memcpy(words, page + row * kRowBytes, kRowBytes);
    for (int lane = 0; lane < kLanes; ++lane) {
      outcore::keep_scalar<kLoop>();
      lanes[lane] = scramble(lanes[lane] ^ words[lane]);
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] = scramble(lanes[lane]) ^ lanes[lane + half];
    }
  }
  return lanes[0];
}

template <Loop kLoop>
OC_INLINE uint64_t sum_of_pages(const unsigned char* data, int64_t num_pages, uint64_t first_page,
                                uint64_t seed) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_pages; ++i) {
    const uint64_t place = mix(seed + kGolden * (first_page + static_cast<uint64_t>(i)));
    sum += mix(page_digest<kLoop>(data + i * OC_PAGE_BYTES) ^ place);
  }
  return sum;
}

using Sum = uint64_t (*)(const unsigned char*, int64_t, uint64_t, uint64_t);

#define OC_SUM(isa, target, loop, supported)                                              \
  target uint64_t sum_##isa(const unsigned char* data, int64_t num_pages, uint64_t first, \
                            uint64_t seed) {                                              \
    return sum_of_pages<loop>(data, num_pages, first, seed);                              \
  }
OC_FOR_EACH_ISA(OC_SUM)

#define OC_SUM_ENTRY(isa, target, loop, supported) sum_##isa,
constexpr Sum kSums[] = {OC_FOR_EACH_ISA(OC_SUM_ENTRY)};

}  // namespace

extern "C" int oc_checksum_pages(const void* data, int64_t num_pages, uint64_t first_page,
                                 uint64_t seed, uint64_t* sum) {
  if (sum == nullptr || (data == nullptr && num_pages > 0)) return OC_ERROR_NULL;
  if (num_pages < 0) return OC_ERROR_SIZE;
  *sum = kSums[outcore::active_isa()](static_cast<const unsigned char*>(data), num_pages,
                                      first_page, seed);
  return OC_OK;
}
