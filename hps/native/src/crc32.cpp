#include "hps/crc32.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hps {

namespace {

constexpr std::size_t kSlices = 8;
using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xEDB88320U : 0);
    tables[0][i] = value;
  }
  for (std::size_t slice = 1; slice < kSlices; ++slice)
    for (std::size_t i = 0; i < 256; ++i) {
      const std::uint32_t before = tables[slice - 1][i];
      tables[slice][i] = (before >> 8) ^ tables[0][before & 255];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

// Eight bytes per step, by tables (Kounavis and Berry, "slicing by 8"). `state` is the inverted
// sum.
std::uint32_t by_tables(const std::uint8_t* data, std::size_t size, std::uint32_t state) {
  for (; size >= 8; data += 8, size -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (std::size_t i = 0; i < 8; ++i) state ^= kTables[7 - i][(word >> (8 * i)) & 255];
  }
  for (; size != 0; ++data, --size) state = (state >> 8) ^ kTables[0][(state ^ *data) & 255];
  return state;
}

#if defined(__x86_64__)
constexpr std::size_t kFoldFrom = 128;

#define HPS_CLMUL __attribute__((target("pclmul,sse2")))

HPS_CLMUL inline __m128i load(const std::uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

HPS_CLMUL inline __m128i fold(__m128i sum, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(sum, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Four times 16 bytes per step by carry-less multiplication, folded to 16 bytes that have the same
// remainder (Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ", whose
// constants these are). Takes the multiple of 16 bytes that `size` holds; at least 64.
HPS_CLMUL std::uint32_t by_folding(const std::uint8_t* data, std::size_t size,
                                   std::uint32_t state) {
  const __m128i by_64 = _mm_set_epi64x(0x1C6E41596, 0x154442BD4);
  const __m128i by_16 = _mm_set_epi64x(0x0CCAA009E, 0x1751997D0);
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
    a = fold(a, by_64, load(data));
    b = fold(b, by_64, load(data + 16));
    c = fold(c, by_64, load(data + 32));
    d = fold(d, by_64, load(data + 48));
  }
  a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
  for (; size >= 16; data += 16, size -= 16) a = fold(a, by_16, load(data));
  std::uint8_t rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), a);
  return by_tables(rest, 16, 0);
}

const bool kCanFold = __builtin_cpu_supports("pclmul") != 0;
#endif

}  // namespace

std::uint32_t crc32(const std::uint8_t* data, std::size_t size, std::uint32_t crc) {
  std::uint32_t state = ~crc;
#if defined(__x86_64__)
  if (kCanFold && size >= kFoldFrom) {
    const std::size_t folded = size & ~static_cast<std::size_t>(15);
    state = by_folding(data, folded, state);
    data += folded;
    size -= folded;
  }
#endif
  return ~by_tables(data, size, state);
}

}  // namespace hps
