// Decodes stored rows (hps/native/include/hps/row_format.hpp) to float32. Every operation is
// rounded, so the bits are those of hps/native/src/row_values.hpp.
#pragma once

#include "hash_table.cuh"

constexpr u32 FLOAT32 = 0;  // hps/row_format.py's codes
constexpr u32 FLOAT16 = 1;
constexpr u32 BFLOAT16 = 2;
constexpr u32 FLOAT8 = 3;
constexpr u32 INT8 = 4;
constexpr u32 INT4 = 5;

__device__ __forceinline__ float widen(u32 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)half));
  return value;
}

__device__ __forceinline__ unsigned short narrow(float value) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

__device__ __forceinline__ constexpr bool is_scaled(u32 format) { return format >= FLOAT8; }

// The bits of a value, without the scale.
__device__ __forceinline__ constexpr u32 value_bits(u32 format) {
  return format == FLOAT32 ? 32 : format <= BFLOAT16 ? 16 : format == INT4 ? 4 : 8;
}

// The bytes of a row's values: the scale begins there.
__device__ __forceinline__ constexpr u32 value_bytes(u32 format, u32 dim) {
  return (dim * value_bits(format) + 7) / 8;
}

__device__ __forceinline__ constexpr u32 row_bytes(u32 format, u32 dim) {
  return value_bytes(format, dim) + (is_scaled(format) ? 4 : 0);
}

// The factors of a row: value = stored * scale + bias.
struct Scale {
  float scale, bias;
};

// `word`: the last four bytes of a row.
__device__ __forceinline__ Scale scale_of(u32 format, u32 word) {
  Scale found = {__uint_as_float(word), 0};
  if (format != FLOAT8) found.scale = widen(word & 0xffff), found.bias = widen(word >> 16);
  return found;
}

// The byte `k` of a word as float. 2^23 + byte is exact, and so is the difference.
__device__ __forceinline__ float float_of_byte(u32 word, int k) {
  return __fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 | k)), 8388608.0f);
}

__device__ __forceinline__ float float_of_float8(u32 code) {
  const u32 magnitude = code & 0x7f;
  u32 bits = (magnitude << 20) + (120u << 23);
  if (magnitude < 8) bits = __float_as_uint(__fmul_rn((float)magnitude, 0.001953125f));
  if (magnitude == 0x7f) bits = 0x7fc00000;
  return __uint_as_float(bits | (code & 0x80) << 24);
}

// One rounding is as good as two: the product of 8 bits and a float16 is exact.
__device__ __forceinline__ float scaled(float stored, Scale by) {
  return __fmaf_rn(stored, by.scale, by.bias);
}

// The value `k` of stored ones that begin with the words at `raw`.
__device__ __forceinline__ float value_of(u32 format, const u32* raw, int k, Scale by) {
  if (format == FLOAT32) return __uint_as_float(raw[k]);
  if (format == FLOAT16) return widen(raw[k / 2] >> 16 * (k & 1));
  if (format == BFLOAT16)
    return __uint_as_float(k & 1 ? raw[k / 2] & 0xffff0000 : raw[k / 2] << 16);
  if (format == FLOAT8)
    return __fmul_rn(float_of_float8(raw[k / 4] >> 8 * (k & 3) & 255), by.scale);
  if (format == INT8) return scaled(float_of_byte(raw[k / 4], k & 3), by);
  return scaled(float_of_byte(raw[k / 8] >> 4 * (k & 7) & 15, 0), by);
}

// Loads `BYTES` bytes, aligned to as many up to 16, to words; the rest of the last word is zero.
template <int BYTES>
__device__ __forceinline__ void load_words(u32* to, const char* from) {
  if constexpr (BYTES > 16) {
    load_words<16>(to, from);
    load_words<BYTES - 16>(to + 4, from + 16);
  } else if constexpr (BYTES == 16) {
    const uint4 raw = __ldg((const uint4*)from);
    to[0] = raw.x, to[1] = raw.y, to[2] = raw.z, to[3] = raw.w;
  } else if constexpr (BYTES == 8) {
    const uint2 raw = __ldg((const uint2*)from);
    to[0] = raw.x, to[1] = raw.y;
  } else if constexpr (BYTES == 4) {
    to[0] = __ldg((const u32*)from);
  } else if constexpr (BYTES == 2) {
    to[0] = __ldg((const unsigned short*)from);
  } else {
    to[0] = __ldg((const u8*)from);
  }
}

// The last four bytes of a row, which are aligned to `ALIGN`.
template <int ALIGN>
__device__ __forceinline__ u32 load_tail(const char* at) {
  u32 word = 0;
#pragma unroll
  for (int k = 0; k < 4 / ALIGN; k++) {
    u32 part;
    load_words<ALIGN>(&part, at + k * ALIGN);
    word |= part << 8 * ALIGN * k;
  }
  return word;
}
