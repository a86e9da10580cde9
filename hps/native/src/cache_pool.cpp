// Gather and pool in one pass. A row is copied, to registers if its length is a common one and else
// to a buffer, validated, and only then added to its bag. pool_rows pools rows of an array. Every
// kernel, for every instruction set and row length, adds a bag's rows one by one in the order of
// the keys and rounds each operation to float32: so the bits of a vector do not depend on the
// kernel.
#include <cstring>
#include <memory>

#include "cache_reader.hpp"
#include "hps/cache_read.hpp"

namespace hps {
namespace HPS_ISA {
namespace {

template <typename Element, std::size_t RowBytes>
struct Pooling {
  const PoolRequest& request;
  std::size_t dim;
  std::unique_ptr<float[]> sum;  // the sum of a bag of float16 rows

  std::int64_t begin_of(std::size_t bag) const {
    return request.offsets != nullptr ? request.offsets[bag]
                                      : static_cast<std::int64_t>(bag) * request.hotness;
  }

  HPS_INLINE std::size_t width() const { return RowBytes != 0 ? RowBytes / sizeof(Element) : dim; }

  Element* out_of(std::size_t bag) const {
    return reinterpret_cast<Element*>(request.out) + bag * width();
  }

  float* sum_of(std::size_t bag) {
    if constexpr (sizeof(Element) == sizeof(float)) return out_of(bag);
    return sum.get();
  }

  HPS_INLINE void add(float* __restrict to, const Element* __restrict row, std::int64_t position,
                      bool first) const {
    if (request.weights == nullptr) {
      if (first) {
        for (std::size_t i = 0; i < width(); ++i) to[i] = static_cast<float>(row[i]);
      } else {
        for (std::size_t i = 0; i < width(); ++i) to[i] += static_cast<float>(row[i]);
      }
      return;
    }
    const float weight = request.weights[position];
    if (first) {
      for (std::size_t i = 0; i < width(); ++i) to[i] = static_cast<float>(row[i]) * weight;
    } else {
      for (std::size_t i = 0; i < width(); ++i) to[i] += static_cast<float>(row[i]) * weight;
    }
  }

  // After the last row of a bag.
  void finish(std::size_t bag) {
    float* total = sum_of(bag);
    const bool empty = begin_of(bag) == begin_of(bag + 1);
    if (empty) {
      for (std::size_t i = 0; i < width(); ++i) total[i] = 0;
    } else if (request.divisors != nullptr) {
      const float by = request.divisors[bag];
      for (std::size_t i = 0; i < width(); ++i) total[i] = by == 0 ? 0 : total[i] / by;
    }
    if constexpr (sizeof(Element) != sizeof(float)) {
      Element* to = out_of(bag);
      for (std::size_t i = 0; i < width(); ++i) to[i] = static_cast<Element>(total[i]);
    }
  }
};

template <typename Element, std::size_t RowBytes>
std::size_t pool_rows(const CacheView& view, const PoolRequest& request, std::int64_t* left) {
  Reader<RowBytes, false> reader(view);
  Pooling<Element, RowBytes> pooling{request, view.row_bytes / sizeof(Element), {}};
  if (sizeof(Element) != sizeof(float)) pooling.sum.reset(new float[pooling.width()]);
  const std::unique_ptr<Element[]> row(new Element[pooling.width()]);
  std::size_t unanswered = 0, bag = request.first, supplied = 0;
  const std::int64_t first = pooling.begin_of(request.first), end = pooling.begin_of(request.last);
  while (supplied < request.n_supplied && request.supplied[supplied] < first) ++supplied;
  reader.look_up(
      static_cast<std::size_t>(end - first),
      [&](std::size_t i) { return request.keys[first + static_cast<std::int64_t>(i)]; },
      [&](std::size_t) { return reinterpret_cast<std::uint8_t*>(row.get()); },
      [&](std::size_t i, Outcome outcome, std::uint64_t) {
        const std::int64_t position = first + static_cast<std::int64_t>(i);
        while (pooling.begin_of(bag + 1) <= position) pooling.finish(bag++);
        const Element* found = row.get();
        if (supplied < request.n_supplied && request.supplied[supplied] == position) {
          found = reinterpret_cast<const Element*>(request.rows) + supplied++ * pooling.width();
        } else if (outcome != Outcome::kRow) {
          left[unanswered++] = position;
          return true;
        }
        pooling.add(pooling.sum_of(bag), found, position, position == pooling.begin_of(bag));
        return true;
      });
  while (bag < request.last) pooling.finish(bag++);
  return unanswered;
}

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif
using Floats = float __attribute__((vector_size(kVectorBytes)));

// A row, or the sum of a bag, in registers.
template <std::size_t RowBytes>
struct Row {
  static constexpr std::size_t kParts = RowBytes / kVectorBytes;
  Floats parts[kParts];

  // The start of a sum: -0 + x is x for either sign of zero.
  HPS_INLINE static Row zero() {
    Row row;
    for (std::size_t i = 0; i < kParts; ++i) row.parts[i] = -Floats{};
    return row;
  }

  HPS_INLINE static Row at(const std::uint8_t* shared) {
    Row row;
    for (std::size_t i = 0; i < kParts; ++i)
      copy_from_shared(reinterpret_cast<std::uint8_t*>(&row.parts[i]), shared + i * kVectorBytes,
                       kVectorBytes);
    return row;
  }

  HPS_INLINE void add(const Row& other) {
    for (std::size_t i = 0; i < kParts; ++i) parts[i] += other.parts[i];
  }

  HPS_INLINE void add(const Row& other, float weight) {
    for (std::size_t i = 0; i < kParts; ++i) parts[i] += other.parts[i] * weight;
  }

  HPS_INLINE void put(std::uint8_t* to, float divisor) const {
    for (std::size_t i = 0; i < kParts; ++i) {
      const Floats part = divisor == 0 ? Floats{} : divisor == 1 ? parts[i] : parts[i] / divisor;
      std::memcpy(to + i * kVectorBytes, &part, kVectorBytes);
    }
  }
};

// pool_rows for float32 rows that fit into registers, and their sum too.
template <std::size_t RowBytes>
std::size_t pool_in_registers(const CacheView& view, const PoolRequest& request,
                              std::int64_t* left) {
  using Vector = Row<RowBytes>;
  const Vector zero = Vector::zero();
  Reader<RowBytes, false> reader(view);
  const Pooling<float, RowBytes> bags{request, RowBytes / sizeof(float), {}};
  std::size_t unanswered = 0, bag = request.first, supplied = 0;
  const std::int64_t begin = bags.begin_of(request.first), end = bags.begin_of(request.last);
  std::int64_t bag_end = begin;  // of the current bag
  Vector sum = zero;
  const auto key_at = [&](std::size_t i) {
    return request.keys[begin + static_cast<std::int64_t>(i)];
  };
  const auto put = [&](std::int64_t from) HPS_INLINE_CALLBACK {
    const bool empty = bag_end == from;
    const float divisor = empty ? 0 : request.divisors == nullptr ? 1 : request.divisors[bag];
    sum.put(request.out + bag * RowBytes, divisor);
    sum = zero;
    ++bag;
  };
  std::int64_t bag_begin = begin;
  if (bag < request.last) bag_end = bags.begin_of(bag + 1);
  while (supplied < request.n_supplied && request.supplied[supplied] < begin) ++supplied;
  reader.find_all(
      static_cast<std::size_t>(end - begin), key_at,
      [&](std::size_t i, const Found& at) HPS_INLINE_CALLBACK {
        const std::int64_t position = begin + static_cast<std::int64_t>(i);
        while (bag_end <= position) {
          put(bag_begin);
          bag_begin = bag_end;
          bag_end = bags.begin_of(bag + 1);
        }
        Vector row;
        if (__builtin_expect(
                supplied < request.n_supplied && request.supplied[supplied] == position, 0)) {
          row = Vector::at(request.rows + supplied++ * RowBytes);
        } else {
          bool whole = at.score != nullptr;
          if (__builtin_expect(whole, 1)) {
            row = Vector::at(at.row);
            whole = reader.is_unchanged(at);
          }
          if (__builtin_expect(whole, 1)) {
            reader.touch(*at.score);
          } else {
            alignas(kVectorBytes) std::uint8_t copied[RowBytes];
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
    if (bag < request.last) bag_end = bags.begin_of(bag + 1);
  }
  return unanswered;
}

template <typename Element>
std::size_t pool_elements(const CacheView& view, const PoolRequest& request, std::int64_t* left) {
  switch (view.row_bytes) {
    case 64:
      return pool_rows<Element, 64>(view, request, left);
    case 128:
      return pool_rows<Element, 128>(view, request, left);
    default:
      return pool_rows<Element, 0>(view, request, left);
  }
}

std::size_t pool_floats(const CacheView& view, const PoolRequest& request, std::int64_t* left) {
  switch (view.row_bytes) {
    case 64:
      return pool_in_registers<64>(view, request, left);
    case 128:
      return pool_in_registers<128>(view, request, left);
    case 256:
      return pool_in_registers<256>(view, request, left);
    case 512:
      return pool_in_registers<512>(view, request, left);
    default:
      return pool_rows<float, 0>(view, request, left);
  }
}

HPS_INLINE const std::uint8_t* row_of(const PoolRequest& request, std::int64_t position,
                                      std::size_t row_bytes) {
  const std::int64_t number = request.keys != nullptr ? request.keys[position] : position;
  return request.rows + static_cast<std::size_t>(number) * row_bytes;
}

template <typename Element>
void sum_rows(const PoolRequest& request, std::size_t row_bytes) {
  Pooling<Element, 0> pooling{request, row_bytes / sizeof(Element), {}};
  if (sizeof(Element) != sizeof(float)) pooling.sum.reset(new float[pooling.width()]);
  const std::int64_t last = pooling.begin_of(request.last);
  for (std::size_t bag = request.first; bag < request.last; ++bag) {
    const std::int64_t begin = pooling.begin_of(bag), end = pooling.begin_of(bag + 1);
    for (std::int64_t position = begin; position < end; ++position) {
      if (position + static_cast<std::int64_t>(kAhead) < last)
        prefetch_row(row_of(request, position + kAhead, row_bytes), row_bytes);
      const auto* row = reinterpret_cast<const Element*>(row_of(request, position, row_bytes));
      pooling.add(pooling.sum_of(bag), row, position, position == begin);
    }
    pooling.finish(bag);
  }
}

// sum_rows for float32 rows that fit into registers.
template <std::size_t RowBytes>
void sum_in_registers(const PoolRequest& request) {
  using Vector = Row<RowBytes>;
  const Pooling<float, RowBytes> bags{request, RowBytes / sizeof(float), {}};
  const std::int64_t last = bags.begin_of(request.last);
  for (std::size_t bag = request.first; bag < request.last; ++bag) {
    const std::int64_t begin = bags.begin_of(bag), end = bags.begin_of(bag + 1);
    Vector sum = Vector::zero();
    for (std::int64_t position = begin; position < end; ++position) {
      if (position + static_cast<std::int64_t>(kAhead) < last)
        prefetch_row(row_of(request, position + kAhead, RowBytes), RowBytes);
      const Vector row = Vector::at(row_of(request, position, RowBytes));
      if (request.weights == nullptr) {
        sum.add(row);
      } else {
        sum.add(row, request.weights[position]);
      }
    }
    sum.put(request.out + bag * RowBytes, begin == end                  ? 0
                                          : request.divisors == nullptr ? 1
                                                                        : request.divisors[bag]);
  }
}

}  // namespace

void pool_rows(const PoolRequest& request, std::size_t row_bytes);
void pool_rows(const PoolRequest& request, std::size_t row_bytes) {
  if (request.halves) return sum_rows<Half>(request, row_bytes);
  switch (row_bytes) {
    case 64:
      return sum_in_registers<64>(request);
    case 128:
      return sum_in_registers<128>(request);
    case 256:
      return sum_in_registers<256>(request);
    case 512:
      return sum_in_registers<512>(request);
    default:
      return sum_rows<float>(request, row_bytes);
  }
}

std::size_t pool(const CacheView& view, const PoolRequest& request, std::int64_t* left);
std::size_t pool(const CacheView& view, const PoolRequest& request, std::int64_t* left) {
  return request.halves ? pool_elements<Half>(view, request, left)
                        : pool_floats(view, request, left);
}

}  // namespace HPS_ISA
}  // namespace hps
