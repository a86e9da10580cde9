// CRC-32 as zlib computes it (IEEE 802.3, reflected), at the speed at which memory is read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// Of data[0..size), continuing `crc`, which is 0 at first.
std::uint32_t crc32(const std::uint8_t* data, std::size_t size, std::uint32_t crc = 0);

}  // namespace hps
