// The partition hash of HPS (HugeCTR, `rrxmrrxmsx_0`; a mixer by Pelle Evensen). It spreads keys
// over Redis partitions and Kafka key groups, so its values are part of the data format: never
// change it.
#pragma once

#include <cstdint>

namespace hps {

constexpr std::uint64_t rotate_right(std::uint64_t x, unsigned r) {
  return (x >> r) | (x << (64 - r));
}

constexpr std::uint64_t partition_hash(std::uint64_t x) {
  x ^= rotate_right(x, 25) ^ rotate_right(x, 50);
  x *= 0xA24BAED4963EE407ULL;
  x ^= rotate_right(x, 24) ^ rotate_right(x, 49);
  x *= 0x9FB21C651E98DF25ULL;
  return x ^ (x >> 28);
}

}  // namespace hps
