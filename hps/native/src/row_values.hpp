// Conversions between rows and float32. Part of cache_pool.cpp and row_convert.cpp, compiled once
// per HPS_ISA. Every instruction set and the NumPy twin give the same bits, so the compiler must
// not fuse multiplications and additions; where products are exact, `scaled` does.
#pragma once

#include <cstring>

#include "hps/relaxed.hpp"
#include "hps/row_format.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef HPS_INLINE
#define HPS_INLINE __attribute__((always_inline)) inline
#endif

namespace hps {
namespace HPS_ISA {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif
constexpr std::size_t kLanes = kVectorBytes / 4;
using Floats = float __attribute__((vector_size(kVectorBytes)));
using Ints = std::int32_t __attribute__((vector_size(kVectorBytes)));
using Shorts = std::uint16_t __attribute__((vector_size(kVectorBytes / 2)));
using Octets = std::uint8_t __attribute__((vector_size(kLanes)));

// The factors of a row: value = stored * scale + bias.
struct Scale {
  float scale, bias;
};

template <RowFormat F>
HPS_INLINE Scale scale_of(const std::uint8_t* shared, std::size_t dim) {
  Scale found{1, 0};
  const std::uint8_t* at = shared + value_bytes(F, dim);
  if constexpr (F == RowFormat::kFloat8) {
    copy_from_shared(reinterpret_cast<std::uint8_t*>(&found.scale), at, sizeof found.scale);
  } else if constexpr (is_scaled(F)) {
    Half halves[2];
    copy_from_shared(reinterpret_cast<std::uint8_t*>(halves), at, sizeof halves);
    found = {static_cast<float>(halves[0]), static_cast<float>(halves[1])};
  }
  return found;
}

// The value of a float8, without a scale.
HPS_INLINE float from_float8(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7f, sign = static_cast<std::uint32_t>(code & 0x80) << 24;
  std::uint32_t bits = (magnitude << 20) + (120U << 23);
  if (magnitude < 8) {  // a subnormal
    const float value = static_cast<float>(magnitude) * 0x1p-9F;
    std::memcpy(&bits, &value, sizeof bits);
  }
  if (magnitude == 0x7f) bits = 0x7fc00000;
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// By intrinsics, because g++ 12 converts vectors of bytes one by one.
HPS_INLINE Ints ints_of(Octets octets) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32((__m128i)octets);
#elif defined(__AVX2__)
  std::int64_t bits;
  std::memcpy(&bits, &octets, sizeof bits);
  return (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits));
#else
  return __builtin_convertvector(octets, Ints);
#endif
}

HPS_INLINE Ints ints_of(Shorts shorts) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu16_epi32((__m256i)shorts);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu16_epi32((__m128i)shorts);
#else
  return __builtin_convertvector(shorts, Ints);
#endif
}

HPS_INLINE Floats floats_of(Octets octets) {
  return __builtin_convertvector(ints_of(octets), Floats);
}

HPS_INLINE Floats floats_of_float8(Octets octets) {
  const Ints code = ints_of(octets), magnitude = code & 0x7f;
  const Ints normal = (magnitude << 20) + (120 << 23);
  const Floats small = __builtin_convertvector(magnitude, Floats) * 0x1p-9F;
  Ints subnormal;
  std::memcpy(&subnormal, &small, sizeof subnormal);
  Ints bits = magnitude < 8 ? subnormal : normal;
  bits = magnitude == 0x7f ? Ints{} + 0x7fc00000 : bits;
  bits |= (code & 0x80) << 24;
  Floats values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}

HPS_INLINE Floats floats_of_halves(Shorts halves) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#else
  Floats values;
  for (std::size_t i = 0; i < kLanes; ++i) {
    Half half;
    const std::uint16_t bits = halves[i];
    std::memcpy(&half, &bits, sizeof half);
    values[i] = static_cast<float>(half);
  }
  return values;
#endif
}

HPS_INLINE Shorts halves_of(Floats values) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  return (Shorts)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT);
#else
  Shorts halves;
  for (std::size_t i = 0; i < kLanes; ++i) {
    const Half half = static_cast<Half>(values[i]);
    std::uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    halves[i] = bits;
  }
  return halves;
#endif
}

// codes * scale + bias, for codes of 8 bits and a scale of float16: the product has 19 bits and is
// exact, so that a fused operation rounds as two do.
HPS_INLINE Floats scaled(Octets codes, const Scale& by) {
  const Floats values = floats_of(codes);
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)values, _mm512_set1_ps(by.scale), _mm512_set1_ps(by.bias));
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)values, _mm256_set1_ps(by.scale), _mm256_set1_ps(by.bias));
#else
  return values * by.scale + by.bias;
#endif
}

template <typename Vector>
HPS_INLINE Vector vector_at(const std::uint8_t* shared) {
  Vector vector;
  copy_from_shared(reinterpret_cast<std::uint8_t*>(&vector), shared, sizeof vector);
  return vector;
}

// The nibbles of kLanes / 2 bytes, the low one of a byte first.
HPS_INLINE Octets nibbles_at(const std::uint8_t* shared) {
#if defined(__AVX2__)
  std::int64_t bits = 0;
  copy_from_shared(reinterpret_cast<std::uint8_t*>(&bits), shared, kLanes / 2);
  const __m128i pairs = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(bits));
  const __m128i split =
      _mm_or_si128(_mm_and_si128(pairs, _mm_set1_epi16(0xf)),
                   _mm_and_si128(_mm_slli_epi16(pairs, 4), _mm_set1_epi16(0xf00)));
  Octets nibbles;
  std::memcpy(&nibbles, &split, sizeof nibbles);
  return nibbles;
#else
  std::uint8_t pairs[kLanes / 2];
  copy_from_shared(pairs, shared, sizeof pairs);
  Octets nibbles;
  for (std::size_t k = 0; k < kLanes; ++k)
    nibbles[k] = static_cast<std::uint8_t>(pairs[k / 2] >> 4 * (k % 2) & 15);
  return nibbles;
#endif
}

// The values of a row of `Dim` values, a multiple of kLanes, in registers.
template <RowFormat F, std::size_t Dim>
HPS_INLINE void decode_to(Floats (&parts)[Dim / kLanes], const std::uint8_t* shared) {
  constexpr std::size_t kParts = Dim / kLanes;
  const Scale by = scale_of<F>(shared, Dim);
  for (std::size_t i = 0; i < kParts; ++i) {
    if constexpr (F == RowFormat::kFloat32) {
      parts[i] = vector_at<Floats>(shared + i * kVectorBytes);
    } else if constexpr (F == RowFormat::kFloat16) {
      parts[i] = floats_of_halves(vector_at<Shorts>(shared + i * sizeof(Shorts)));
    } else if constexpr (F == RowFormat::kInt8) {
      parts[i] = scaled(vector_at<Octets>(shared + i * kLanes), by);
    } else {
      static_assert(F == RowFormat::kInt4, "other formats are decoded in memory");
      parts[i] = scaled(nibbles_at(shared + i * kLanes / 2), by);
    }
  }
}

template <RowFormat F>
HPS_INLINE void decode_values(const std::uint8_t* row, std::size_t dim, float* __restrict to) {
  const Scale by = scale_of<F>(row, dim);
  std::size_t i = 0;
  if constexpr (F == RowFormat::kFloat32) {
    std::memcpy(to, row, 4 * dim);
    return;
  }
  for (; i + kLanes <= dim; i += kLanes) {
    Floats values{};
    if constexpr (F == RowFormat::kFloat16) {
      values = floats_of_halves(vector_at<Shorts>(row + 2 * i));
    } else if constexpr (F == RowFormat::kBfloat16) {
      const Ints bits = ints_of(vector_at<Shorts>(row + 2 * i)) << 16;
      std::memcpy(&values, &bits, sizeof values);
    } else if constexpr (F == RowFormat::kFloat8) {
      values = floats_of_float8(vector_at<Octets>(row + i)) * by.scale;
    } else if constexpr (F == RowFormat::kInt8) {
      values = scaled(vector_at<Octets>(row + i), by);
    } else if constexpr (F == RowFormat::kInt4) {
      values = scaled(nibbles_at(row + i / 2), by);
    }
    std::memcpy(to + i, &values, sizeof values);
  }
  for (; i < dim; ++i) {
    if constexpr (F == RowFormat::kFloat16) {
      Half half;
      std::memcpy(&half, row + 2 * i, sizeof half);
      to[i] = static_cast<float>(half);
    } else if constexpr (F == RowFormat::kBfloat16) {
      std::uint16_t half;
      std::memcpy(&half, row + 2 * i, sizeof half);
      const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
      std::memcpy(to + i, &bits, sizeof bits);
    } else if constexpr (F == RowFormat::kFloat8) {
      to[i] = from_float8(row[i]) * by.scale;
    } else if constexpr (F == RowFormat::kInt8) {
      to[i] = static_cast<float>(row[i]) * by.scale + by.bias;
    } else if constexpr (F == RowFormat::kInt4) {
      to[i] = static_cast<float>(row[i / 2] >> 4 * (i % 2) & 15) * by.scale + by.bias;
    }
  }
}

// Decodes a row that no other thread writes.
HPS_INLINE void decode_row(RowFormat format, const std::uint8_t* row, std::size_t dim, float* to) {
  switch (format) {
    case RowFormat::kFloat32:
      return decode_values<RowFormat::kFloat32>(row, dim, to);
    case RowFormat::kFloat16:
      return decode_values<RowFormat::kFloat16>(row, dim, to);
    case RowFormat::kBfloat16:
      return decode_values<RowFormat::kBfloat16>(row, dim, to);
    case RowFormat::kFloat8:
      return decode_values<RowFormat::kFloat8>(row, dim, to);
    case RowFormat::kInt8:
      return decode_values<RowFormat::kInt8>(row, dim, to);
    case RowFormat::kInt4:
      return decode_values<RowFormat::kInt4>(row, dim, to);
  }
}

// Writes `dim` values as float32 or float16.
HPS_INLINE void put_values(const float* __restrict values, std::size_t dim, bool halves,
                           std::uint8_t* __restrict to) {
  if (!halves) {
    std::memcpy(to, values, 4 * dim);
    return;
  }
  std::size_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    Floats part;
    std::memcpy(&part, values + i, sizeof part);
    const Shorts rounded = halves_of(part);
    std::memcpy(to + 2 * i, &rounded, sizeof rounded);
  }
  for (; i < dim; ++i) {
    const Half half = static_cast<Half>(values[i]);
    std::memcpy(to + 2 * i, &half, sizeof half);
  }
}

}  // namespace
}  // namespace HPS_ISA
}  // namespace hps
