// Gather and pool in one pass. A row is decoded to registers, if its format and dim are common ones
// and else to a buffer, validated, and only then added to its bag. pool_rows pools rows of an
// array. Every kernel, for every instruction set, format and dim, adds a bag's rows one by one in
// the order of the keys and rounds each operation to float32: so the bits of a vector do not depend
// on the kernel.
#include <cstring>
#include <memory>

#include "cache_reader.hpp"
#include "hps/cache_read.hpp"
#include "row_values.hpp"

namespace hps {
namespace HPS_ISA {
namespace {

// A row, or the sum of a bag, in registers.
template <RowFormat F, std::size_t Dim>
struct RegisterRow {
  static constexpr std::size_t kParts = Dim / kLanes;
  Floats parts[kParts];

  // The start of a sum: -0 + x is x for either sign of zero.
  HPS_INLINE static RegisterRow zero() {
    RegisterRow row;
    for (std::size_t i = 0; i < kParts; ++i) row.parts[i] = -Floats{};
    return row;
  }

  HPS_INLINE static RegisterRow at(const std::uint8_t* shared) {
    RegisterRow row;
    decode_to<F, Dim>(row.parts, shared);
    return row;
  }

  HPS_INLINE static RegisterRow of(const float* vector) {
    RegisterRow row;
    std::memcpy(row.parts, vector, sizeof row.parts);
    return row;
  }

  HPS_INLINE void add(const RegisterRow& other) {
    for (std::size_t i = 0; i < kParts; ++i) parts[i] += other.parts[i];
  }

  HPS_INLINE void add(const RegisterRow& other, float weight) {
    for (std::size_t i = 0; i < kParts; ++i) parts[i] += other.parts[i] * weight;
  }

  HPS_INLINE void put(std::uint8_t* to, bool halves, float divisor) const {
    for (std::size_t i = 0; i < kParts; ++i) {
      const Floats part = divisor == 0 ? Floats{} : divisor == 1 ? parts[i] : parts[i] / divisor;
      if (halves) {
        const Shorts rounded = halves_of(part);
        std::memcpy(to + i * sizeof rounded, &rounded, sizeof rounded);
      } else {
        std::memcpy(to + i * kVectorBytes, &part, kVectorBytes);
      }
    }
  }
};

// The sum of a bag in memory, for rows of any format and dim.
class MemorySum {
 public:
  explicit MemorySum(const PoolRequest& request)
      : request_(request), sum_(new float[request.dim]), values_(new float[request.dim]) {
    clear();
  }

  void add_row(const std::uint8_t* row, std::int64_t position) {
    decode_row(request_.format, row, request_.dim, values_.get());
    add(values_.get(), position);
  }

  HPS_INLINE void add(const float* __restrict values, std::int64_t position) {
    float* __restrict sum = sum_.get();
    if (request_.weights == nullptr) {
      for (std::size_t i = 0; i < request_.dim; ++i) sum[i] += values[i];
    } else {
      const float weight = request_.weights[position];
      for (std::size_t i = 0; i < request_.dim; ++i) sum[i] += values[i] * weight;
    }
  }

  // After the last row of a bag.
  void put(std::size_t bag) {
    float* sum = sum_.get();
    if (request_.begin_of(bag) == request_.begin_of(bag + 1)) {
      std::memset(sum, 0, request_.dim * sizeof *sum);
    } else if (request_.divisors != nullptr) {
      const float by = request_.divisors[bag];
      for (std::size_t i = 0; i < request_.dim; ++i) sum[i] = by == 0 ? 0 : sum[i] / by;
    }
    put_values(sum, request_.dim, request_.halves, request_.out_of(bag));
    clear();
  }

 private:
  void clear() {
    for (std::size_t i = 0; i < request_.dim; ++i) sum_[i] = -0.0F;
  }

  const PoolRequest& request_;
  const std::unique_ptr<float[]> sum_, values_;
};

std::size_t pool_in_memory(const CacheView& view, const PoolRequest& request, std::int64_t* left) {
  Reader<0, false> reader(view);
  MemorySum sum(request);
  const std::unique_ptr<std::uint8_t[]> row(new std::uint8_t[view.row_bytes]);
  std::size_t unanswered = 0, bag = request.first, supplied = 0;
  const std::int64_t first = request.begin_of(request.first), end = request.begin_of(request.last);
  while (supplied < request.n_supplied && request.supplied[supplied] < first) ++supplied;
  reader.look_up(
      static_cast<std::size_t>(end - first),
      [&](std::size_t i) { return request.keys[first + static_cast<std::int64_t>(i)]; },
      [&](std::size_t) { return row.get(); },
      [&](std::size_t i, Outcome outcome, std::uint64_t) {
        const std::int64_t position = first + static_cast<std::int64_t>(i);
        while (request.begin_of(bag + 1) <= position) sum.put(bag++);
        if (supplied < request.n_supplied && request.supplied[supplied] == position) {
          sum.add(request.vectors + supplied++ * request.dim, position);
        } else if (outcome == Outcome::kRow) {
          sum.add_row(row.get(), position);
        } else {
          left[unanswered++] = position;
        }
        return true;
      });
  while (bag < request.last) sum.put(bag++);
  return unanswered;
}

// pool_in_memory for rows that fit into registers, and their sum too.
template <RowFormat F, std::size_t Dim>
std::size_t pool_in_registers(const CacheView& view, const PoolRequest& request,
                              std::int64_t* left) {
  using Vector = RegisterRow<F, Dim>;
  constexpr std::size_t kRowBytes = row_bytes(F, Dim);
  const Vector zero = Vector::zero();
  Reader<kRowBytes, false> reader(view);
  std::size_t unanswered = 0, bag = request.first, supplied = 0;
  const std::int64_t begin = request.begin_of(request.first), end = request.begin_of(request.last);
  std::int64_t bag_end = begin;  // of the current bag
  Vector sum = zero;
  const auto key_at = [&](std::size_t i) {
    return request.keys[begin + static_cast<std::int64_t>(i)];
  };
  const auto put = [&](std::int64_t from) HPS_INLINE_CALLBACK {
    const bool empty = bag_end == from;
    const float divisor = empty ? 0 : request.divisors == nullptr ? 1 : request.divisors[bag];
    sum.put(request.out_of(bag), request.halves, divisor);
    sum = zero;
    ++bag;
  };
  std::int64_t bag_begin = begin;
  if (bag < request.last) bag_end = request.begin_of(bag + 1);
  while (supplied < request.n_supplied && request.supplied[supplied] < begin) ++supplied;
  reader.find_all(
      static_cast<std::size_t>(end - begin), key_at,
      [&](std::size_t i, const Found& at) HPS_INLINE_CALLBACK {
        const std::int64_t position = begin + static_cast<std::int64_t>(i);
        while (bag_end <= position) {
          put(bag_begin);
          bag_begin = bag_end;
          bag_end = request.begin_of(bag + 1);
        }
        Vector row;
        if (__builtin_expect(
                supplied < request.n_supplied && request.supplied[supplied] == position, 0)) {
          row = Vector::of(request.vectors + supplied++ * Dim);
        } else {
          bool whole = at.score != nullptr;
          if (__builtin_expect(whole, 1)) {
            row = Vector::at(at.row);
            whole = reader.is_unchanged(at);
          }
          if (__builtin_expect(whole, 1)) {
            reader.touch(*at.score);
          } else {
            alignas(kVectorBytes) std::uint8_t copied[kRowBytes];
            std::uint64_t version = 0;
            if (reader.retry(key_at(i), copied, version) != Outcome::kRow) {
              left[unanswered++] = position;
              return true;
            }
            row = Vector::at(copied);
          }
        }
        if (request.weights == nullptr) {
          sum.add(row);
        } else {
          sum.add(row, request.weights[position]);
        }
        return true;
      });
  while (bag < request.last) {
    put(bag_begin);
    bag_begin = bag_end;
    if (bag < request.last) bag_end = request.begin_of(bag + 1);
  }
  return unanswered;
}

HPS_INLINE const std::uint8_t* row_of(const PoolRequest& request, std::int64_t position,
                                      std::size_t row_bytes) {
  const std::int64_t number = request.keys != nullptr ? request.keys[position] : position;
  return request.rows + static_cast<std::size_t>(number) * row_bytes;
}

void sum_in_memory(const PoolRequest& request) {
  MemorySum sum(request);
  const std::size_t bytes = row_bytes(request.format, request.dim);
  const std::int64_t last = request.begin_of(request.last);
  for (std::size_t bag = request.first; bag < request.last; ++bag) {
    const std::int64_t begin = request.begin_of(bag), end = request.begin_of(bag + 1);
    for (std::int64_t position = begin; position < end; ++position) {
      if (position + static_cast<std::int64_t>(kAhead) < last)
        prefetch_row(row_of(request, position + kAhead, bytes), bytes);
      sum.add_row(row_of(request, position, bytes), position);
    }
    sum.put(bag);
  }
}

// sum_in_memory for rows that fit into registers.
template <RowFormat F, std::size_t Dim>
void sum_in_registers(const PoolRequest& request) {
  using Vector = RegisterRow<F, Dim>;
  constexpr std::size_t kRowBytes = row_bytes(F, Dim);
  const std::int64_t last = request.begin_of(request.last);
  for (std::size_t bag = request.first; bag < request.last; ++bag) {
    const std::int64_t begin = request.begin_of(bag), end = request.begin_of(bag + 1);
    Vector sum = Vector::zero();
    for (std::int64_t position = begin; position < end; ++position) {
      if (position + static_cast<std::int64_t>(kAhead) < last)
        prefetch_row(row_of(request, position + kAhead, kRowBytes), kRowBytes);
      const Vector row = Vector::at(row_of(request, position, kRowBytes));
      if (request.weights == nullptr) {
        sum.add(row);
      } else {
        sum.add(row, request.weights[position]);
      }
    }
    const float divisor = begin == end                  ? 0
                          : request.divisors == nullptr ? 1
                                                        : request.divisors[bag];
    sum.put(request.out_of(bag), request.halves, divisor);
  }
}

// Calls use.in_registers<format, dim>() for common formats and dims, else use.in_memory().
template <typename Use>
auto by_format(RowFormat format, std::size_t dim, Use use) {
  switch (format) {
    case RowFormat::kFloat32:
      if (dim == 16) return use.template in_registers<RowFormat::kFloat32, 16>();
      if (dim == 32) return use.template in_registers<RowFormat::kFloat32, 32>();
      if (dim == 64) return use.template in_registers<RowFormat::kFloat32, 64>();
      if (dim == 128) return use.template in_registers<RowFormat::kFloat32, 128>();
      break;
    case RowFormat::kFloat16:
      if (dim == 32) return use.template in_registers<RowFormat::kFloat16, 32>();
      if (dim == 64) return use.template in_registers<RowFormat::kFloat16, 64>();
      if (dim == 128) return use.template in_registers<RowFormat::kFloat16, 128>();
      break;
    case RowFormat::kInt8:
      if (dim == 32) return use.template in_registers<RowFormat::kInt8, 32>();
      if (dim == 64) return use.template in_registers<RowFormat::kInt8, 64>();
      if (dim == 128) return use.template in_registers<RowFormat::kInt8, 128>();
      break;
    case RowFormat::kInt4:
      if (dim == 32) return use.template in_registers<RowFormat::kInt4, 32>();
      if (dim == 64) return use.template in_registers<RowFormat::kInt4, 64>();
      if (dim == 128) return use.template in_registers<RowFormat::kInt4, 128>();
      break;
    default:
      break;
  }
  return use.in_memory();
}

struct PoolTable {
  const CacheView& view;
  const PoolRequest& request;
  std::int64_t* left;

  template <RowFormat F, std::size_t Dim>
  std::size_t in_registers() const {
    return pool_in_registers<F, Dim>(view, request, left);
  }
  std::size_t in_memory() const { return pool_in_memory(view, request, left); }
};

struct PoolArray {
  const PoolRequest& request;

  template <RowFormat F, std::size_t Dim>
  void in_registers() const {
    sum_in_registers<F, Dim>(request);
  }
  void in_memory() const { sum_in_memory(request); }
};

}  // namespace

void pool_rows(const PoolRequest& request);
void pool_rows(const PoolRequest& request) {
  by_format(request.format, request.dim, PoolArray{request});
}

std::size_t pool(const CacheView& view, const PoolRequest& request, std::int64_t* left);
std::size_t pool(const CacheView& view, const PoolRequest& request, std::int64_t* left) {
  return by_format(request.format, request.dim, PoolTable{view, request, left});
}

}  // namespace HPS_ISA
}  // namespace hps
