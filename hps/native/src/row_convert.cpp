// Rows to vectors and back, in bulk.
#include <cmath>
#include <memory>

#include "hps/cache_read.hpp"
#include "row_values.hpp"

namespace hps {
namespace HPS_ISA {
namespace {

constexpr float kLargestFloat8 = 448;
constexpr float kLeastScale = 1 / (kLargestFloat8 * 512);  // of float8 rows, as in HPS

bool is_finite(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & 0x7f800000) != 0x7f800000;
}

float as_half(float value) { return static_cast<float>(static_cast<Half>(value)); }

// Rounds to nearest, ties to even; beyond the largest value, to that.
std::uint8_t to_float8(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  std::uint32_t code;
  if (magnitude < 0x1p-6F) {
    code = static_cast<std::uint32_t>(__builtin_rintf(magnitude * 512));
  } else {
    code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    if (code > 0x7e) code = 0x7e;
  }
  return static_cast<std::uint8_t>(sign | code);
}

bool encode_float8(const float* vector, std::size_t dim, std::uint8_t* row) {
  float largest = 0;
  for (std::size_t i = 0; i < dim; ++i) largest = std::fmax(largest, std::fabs(vector[i]));
  const float scale = std::fmax(largest / kLargestFloat8, kLeastScale), inverse = 1 / scale;
  for (std::size_t i = 0; i < dim; ++i) row[i] = to_float8(vector[i] * inverse);
  std::memcpy(row + dim, &scale, sizeof scale);
  return true;
}

// FBGEMM's rule: the bias is rounded before the range is taken, so that no value lies below it.
bool encode_int(const float* vector, std::size_t dim, int most, std::uint8_t* row) {
  float low = vector[0], high = vector[0];
  for (std::size_t i = 1; i < dim; ++i) {
    low = vector[i] < low ? vector[i] : low;
    high = vector[i] > high ? vector[i] : high;
  }
  const float bias = as_half(low), range = high - bias;
  float scale = as_half(range == 0 ? 1.0F : range / static_cast<float>(most));
  if (scale == 0) scale = 1;
  if (!is_finite(bias) || !is_finite(scale)) return false;
  const float inverse = 1 / scale;
  const bool four_bits = most == 15;
  const std::size_t bytes = four_bits ? (dim + 1) / 2 : dim;
  if (four_bits) std::memset(row, 0, bytes);
  for (std::size_t i = 0; i < dim; ++i) {
    float code = __builtin_rintf((vector[i] - bias) * inverse);
    code = code < 0 ? 0 : code > static_cast<float>(most) ? static_cast<float>(most) : code;
    const auto stored = static_cast<std::uint8_t>(code);
    if (four_bits) {
      row[i / 2] = static_cast<std::uint8_t>(row[i / 2] | stored << 4 * (i % 2));
    } else {
      row[i] = stored;
    }
  }
  const Half tail[2] = {static_cast<Half>(scale), static_cast<Half>(bias)};
  std::memcpy(row + bytes, tail, sizeof tail);
  return true;
}

bool encode_bfloat16(const float* vector, std::size_t dim, std::uint8_t* row) {
  bool finite = true;
  for (std::size_t i = 0; i < dim; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, vector + i, sizeof bits);
    const auto rounded = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    finite &= (rounded & 0x7f80) != 0x7f80;
    std::memcpy(row + 2 * i, &rounded, sizeof rounded);
  }
  return finite;
}

bool encode_float16(const float* vector, std::size_t dim, std::uint8_t* row) {
  bool finite = true;
  put_values(vector, dim, true, row);
  for (std::size_t i = 0; i < dim; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, row + 2 * i, sizeof bits);
    finite &= (bits & 0x7c00) != 0x7c00;
  }
  return finite;
}

bool encode_row(RowFormat format, const float* vector, std::size_t dim, std::uint8_t* row) {
  bool finite = true;
  for (std::size_t i = 0; i < dim; ++i) finite &= is_finite(vector[i]);
  if (!finite) return false;
  switch (format) {
    case RowFormat::kFloat32:
      std::memcpy(row, vector, 4 * dim);
      return true;
    case RowFormat::kFloat16:
      return encode_float16(vector, dim, row);
    case RowFormat::kBfloat16:
      return encode_bfloat16(vector, dim, row);
    case RowFormat::kFloat8:
      return encode_float8(vector, dim, row);
    case RowFormat::kInt8:
      return encode_int(vector, dim, 255, row);
    case RowFormat::kInt4:
      return encode_int(vector, dim, 15, row);
  }
  return false;
}

}  // namespace

void decode_rows(const DecodeRequest& request);
void decode_rows(const DecodeRequest& request) {
  const std::size_t bytes = row_bytes(request.format, request.dim);
  std::unique_ptr<float[]> values(new float[request.dim]);
  for (std::size_t i = 0; i < request.n; ++i) {
    const auto number = request.numbers ? static_cast<std::size_t>(request.numbers[i]) : i;
    const std::uint8_t* row = request.rows + number * bytes;
    std::uint8_t* to = request.out + i * request.dim * (request.halves ? 2 : 4);
    if (request.halves) {
      decode_row(request.format, row, request.dim, values.get());
      put_values(values.get(), request.dim, true, to);
    } else {
      decode_row(request.format, row, request.dim, reinterpret_cast<float*>(to));
    }
  }
}

void encode_rows(const EncodeRequest& request);
void encode_rows(const EncodeRequest& request) {
  const std::size_t bytes = row_bytes(request.format, request.dim);
  for (std::size_t i = 0; i < request.n; ++i)
    request.storable[i] = encode_row(request.format, request.vectors + i * request.dim, request.dim,
                                     request.rows + i * bytes);
}

}  // namespace HPS_ISA
}  // namespace hps
