// CRC-32 as in zlib (IEEE 802.3, reflected): by carry-less multiplication on x86-64 processors that
// have it, else by tables. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// Returns the sum of data[0..size), continuing `crc`, which is 0 at first.
std::uint32_t crc32(const std::uint8_t* data, std::size_t size, std::uint32_t crc = 0);

}  // namespace hps
