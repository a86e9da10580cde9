// The formats of rows. Tables store and copy rows as bytes; decoding gives a row's `dim` values in
// float32.
//
//   float32, float16, bfloat16: the values.
//   float8: the values in E4M3 of the OCP 8-bit floating point specification (no infinities), then
//     a float32 scale: value = float8 * scale. The scheme of HPS's fp8_quant.
//   int8: a uint8 per value, then a float16 scale and a float16 bias: value = uint8 * scale + bias.
//     FBGEMM's fused 8-bit rows with half scale and bias, TorchEasyRec's QUint8RowwiseF16.
//   int4: likewise with two values a byte, the first one in the low half. FBGEMM's fused 4-bit
//   rows.
//
// Python's names and codes: hps/row_format.py. NumPy twin: hps/native/twin_rows.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

enum class RowFormat : std::uint8_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBfloat16 = 2,
  kFloat8 = 3,
  kInt8 = 4,
  kInt4 = 5,
};
constexpr std::uint8_t kRowFormats = 6;

// A stored float16. g++ 12 for ARM supports this name only.
#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

// The bytes of the values alone: scale and bias begin there.
constexpr std::size_t value_bytes(RowFormat format, std::size_t dim) {
  switch (format) {
    case RowFormat::kFloat32:
      return 4 * dim;
    case RowFormat::kFloat16:
    case RowFormat::kBfloat16:
      return 2 * dim;
    case RowFormat::kInt4:
      return (dim + 1) / 2;
    default:
      return dim;
  }
}

constexpr bool is_scaled(RowFormat format) { return format >= RowFormat::kFloat8; }

constexpr std::size_t row_bytes(RowFormat format, std::size_t dim) {
  return value_bytes(format, dim) + (is_scaled(format) ? 4 : 0);
}

}  // namespace hps
