// The C interface of Outcore's host kernels: raw pointers and sizes in, an error code out.
//
// Owns the arithmetic contract. It does not own memory, or any knowledge of Python and torch, so
// one build serves every version of both. No thread that a call starts outlives it, but for
// OpenMP's.
//
// Contract. Every product, sum, difference, square root and quotient below is rounded to fp32 on
// its own (nothing is fused), so each instruction set, plain torch operations and the device kernel
// give the same bits:
//
//   g = grad_scale * float(grad)
//   m = (beta1 * m) + (one_minus_beta1 * g)
//   v = (beta2 * v) + (one_minus_beta2 * (g * g))
//   d = (sqrt(v) * inv_sqrt_bc2) + eps
//   p = (p * decay) - (step_size * (m / d))
//
// The payload and the sign of a NaN are the one thing that hardware is free to choose.
//
// Split master. An fp32 master value is stored as a bf16 weight and a 16-bit remainder:
//
//   bits(weight) = (bits(master) + 0x8000) >> 16                  nearest, ties away from zero
//   remainder    = int16(bits(master) - (bits(weight) << 16))
//   bits(master) = (bits(weight) << 16) + sign_extend(remainder)  modulo 2^32
//
// Ties away from zero, unlike ties to even, keep the remainder within 16 bits for every pattern.
//
// Checksum of pages. A page is 512 little-endian 64-bit words in 16 rows of 32 lanes. With
//
//   scramble(x) = (x ^ (x >> 32)) * 0xd6e8feb86659fd93
//   mix(x)      = the finaliser of splitmix64
//   G           = 0x9e3779b97f4a7c15
//
// all modulo 2^64, lane l starts at G * (l + 1); each row makes lane = scramble(lane ^ word); then
// for half = 16, 8, 4, 2, 1: lane[l] = scramble(lane[l]) ^ lane[l + half] for l < half. Page number
// p of a record adds mix(lane[0] ^ mix(seed + G * p)) to the sum. All steps are bijections of each
// operand, so a change within one word of a record always changes the sum; anything else (more
// words, pages that changed places, another seed) leaves it the same once in about 2^64 times.
// Parts of a record are summed by whoever holds them, in any order.
//
// Compact state. The same arithmetic on fp32 numbers that are stored in fewer bits: moments as
// 8-bit codes with one scale for each block of OC_BLOCK elements, the master as 24 bits (bf16
// weight and 8-bit remainder, "compact") or as the bf16 weight alone ("minimal"). All rounding is
// stochastic, by r, random bits that depend on seed, step and element and on nothing else: to the
// nearest would leave averages where they are, since one step moves v by far less than half a code.
//
//   scale        = max(32, (min(largest bits(|x|) of the block, 0x7e800000) + 0x200000) >> 23)
//   t            = bits(|x| * 2^(127 - scale) + 2^-15)
//   magnitude    = min((t - bits(2^-15) + r) >> shift, top)
//   |x|          = (float(bits(2^-15) + (magnitude << shift)) - 2^-15) * 2^(scale - 127)
//
// with shift = 20 and top = 127 for m, whose sign is in bit 7 of its code, and 19 and 255 for v.
// Adding 2^-15 makes what would be a small floating-point format (16 binades of 8 or 16 steps each)
// linear near zero, so that it needs no subnormals of its own.
// v is never stored as zero unless it and the code of m are zero: m / eps would be a huge update.
// The scale leaves the largest number of a block below 1.75, so that it can be rounded up as well:
// cut off at the top, it could not grow by small steps. Zeroed memory is a state of zeros.
//
//   bits(weight) = (bits(p) + (r & 0xffff)) >> 16                   minimal
//   q            = (bits(p) + (r & 0xff)) & ~0xff                   compact
//   bits(weight) = (q + 0x8000) >> 16, remainder = int8(q >> 8)
//
// The random bits of an element, in 32-bit arithmetic, with two keys from (seed, step):
//
//   z  = mix(mix(seed + G) + step + G)    mix: the finaliser of splitmix64, G = 0x9e3779b97f4a7c15
//   k0 = low half of z, k1 = high half
//   x  = low half of element + high half of element * 0x9e3779b1 + k0
//   x ^= x >> 16, x *= 0x7feb352d, x ^= x >> 15, x ^= k1, x *= 0x846ca68b, x ^= x >> 16
//   r  = x for p, x >> 12 for m, (x >> 5) & 0x7ffff for v
//
// An element that is not finite makes its weight NaN (0x7fc0) or infinite and its block's moments
// useless, in the same bits everywhere; callers look for such gradients before.
//
// Arrays of one call must not overlap. Each function may be called from many threads at once.

#ifndef OUTCORE_KERNELS_H_
#define OUTCORE_KERNELS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a signature, a struct or the meaning of a value in this file changes.
#define OC_ABI_VERSION 4

enum oc_status {
  OC_OK = 0,
  OC_ERROR_NULL = -1,       // a pointer is null though n > 0
  OC_ERROR_SIZE = -2,       // a size is negative, or not of whole pages where it must be
  OC_ERROR_DTYPE = -3,      // grad_dtype is none of enum oc_dtype
  OC_ERROR_THREADS = -4,    // threads is negative, or zero where there is no default
  OC_ERROR_ALIGNMENT = -5,  // an array is not aligned to its element type
  OC_ERROR_ISA = -6,        // the name is unknown, or this CPU lacks the instructions
  OC_ERROR_BLOCK = -7,      // first_element is negative or no multiple of OC_BLOCK
};

enum oc_dtype { OC_BF16 = 0, OC_FP32 = 1 };

struct oc_adamw_scalars {
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float decay;         // 1 - lr * weight_decay
  float step_size;     // lr / (1 - beta1^step)
  float inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^step)
  float grad_scale;
};

int oc_abi_version(void);

// The instruction set in use: "avx512", "avx2", "neon" or "scalar". The best one at load.
const char* oc_isa(void);

// Chooses another instruction set by name, or the best one with "auto", for the whole process.
// For tests and benchmarks: the bits are the same with each.
int oc_set_isa(const char* name);

// In every function below that computes, threads == 0 means the OpenMP default of the calling
// thread.

// One AdamW step over n parameters whose fp32 master is split.
int oc_adamw_split(uint16_t* weight, int16_t* remainder, float* exp_avg, float* exp_avg_sq,
                   const void* grad, int grad_dtype, int64_t n,
                   const struct oc_adamw_scalars* scalars, int threads);

// One AdamW step over n fp32 parameters.
int oc_adamw_fp32(float* weight, float* exp_avg, float* exp_avg_sq, const void* grad,
                  int grad_dtype, int64_t n, const struct oc_adamw_scalars* scalars, int threads);

// Elements that share the scales of compact moments. The last block of an array may be shorter.
#define OC_BLOCK 128

// One AdamW step over n parameters in the compact state; the scale arrays have ceil(n / OC_BLOCK)
// elements. first_element is the index of the first parameter in whatever seed stands for, so that
// the bits do not depend on how an array is split into calls.
int oc_adamw_compact(uint16_t* weight, int8_t* remainder, uint8_t* exp_avg, uint8_t* exp_avg_sq,
                     uint8_t* exp_avg_scale, uint8_t* exp_avg_sq_scale, const void* grad,
                     int grad_dtype, int64_t n, const struct oc_adamw_scalars* scalars,
                     uint64_t seed, uint64_t step, int64_t first_element, int threads);

// The same without remainders: the minimal state.
int oc_adamw_minimal(uint16_t* weight, uint8_t* exp_avg, uint8_t* exp_avg_sq,
                     uint8_t* exp_avg_scale, uint8_t* exp_avg_sq_scale, const void* grad,
                     int grad_dtype, int64_t n, const struct oc_adamw_scalars* scalars,
                     uint64_t seed, uint64_t step, int64_t first_element, int threads);

int oc_split_master(const float* master, uint16_t* weight, int16_t* remainder, int64_t n,
                    int threads);

int oc_join_master(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n,
                   int threads);

#define OC_PAGE_BYTES 4096

// Sets *sum to that of num_pages pages whose first one is page first_page of its record. Runs on
// the calling thread alone.
int oc_checksum_pages(const void* data, int64_t num_pages, uint64_t first_page, uint64_t seed,
                      uint64_t* sum);

// Whole pages in memory and at an offset of a file.
struct oc_disk_record {
  void* memory;
  int64_t num_bytes;
  int64_t offset;
  uint64_t seed;
  uint64_t sum;            // set to the checksum of the pieces that moved
  unsigned char* is_done;  // a byte for each piece of at most piece_bytes, set to 1 if it moved
};

// Reads records of an open file in pieces on at most that many threads. A piece that does not move
// as a whole is not tried again, and none is begun after it; the status does not tell.
int oc_read_records(int fd, struct oc_disk_record* records, int64_t num_records,
                    int64_t piece_bytes, int threads);

// The same from memory to the file. The memory is only read.
int oc_write_records(int fd, struct oc_disk_record* records, int64_t num_records,
                     int64_t piece_bytes, int threads);

// Bytes [start, end) of those that are read, and where they go.
struct oc_copy_run {
  int64_t start;
  int64_t end;
  void* memory;
};

// Reads num_bytes of an open file from offset on, as much at a time as the buffer has, and copies
// them to where the runs say. Whole pages are read, also past num_bytes. Stops where less can be
// read; *num_done is set to the bytes that were handed out. Runs on the calling thread alone.
int oc_read_and_copy(int fd, int64_t offset, int64_t num_bytes, void* buffer, int64_t buffer_bytes,
                     const struct oc_copy_run* runs, int64_t num_runs, int64_t* num_done);

#ifdef __cplusplus
}
#endif

#endif  // OUTCORE_KERNELS_H_
