// Gather and pool in one pass. A row is copied, to registers where its length is a usual one and
// else to the first-level cache, found whole, and only then added to its bag. pool_rows: rows that
// lie in an array. Whatever the kernel, the instruction set and the length of a row, a bag's rows
// are added one by one in the order of the keys, each operation rounded to float32: so a vector's
// bits do not depend on which of them made it.
#include <cstring>
#include <memory>

#include "cache_reader.hpp"
#include "hps/cache_read.hpp"

namespace hps {
namespace HPS_ISA {
namespace {

template <typename Element, std::size_t RowBytes>
struct Pooling {
  const PoolAsk& ask;
  std::size_t dim;
  std::unique_ptr<float[]> sum;  // of a bag of float16 rows

  std::int64_t begin_of(std::size_t bag) const {
    return ask.offsets != nullptr ? ask.offsets[bag] : static_cast<std::int64_t>(bag) * ask.hotness;
  }

  HPS_INLINE std::size_t width() const { return RowBytes != 0 ? RowBytes / sizeof(Element) : dim; }

  Element* out_of(std::size_t bag) const {
    return reinterpret_cast<Element*>(ask.out) + bag * width();
  }

  float* sum_of(std::size_t bag) {
    if constexpr (sizeof(Element) == sizeof(float)) return out_of(bag);
    return sum.get();
  }

  HPS_INLINE void add(float* __restrict to, const Element* __restrict row, std::int64_t position,
                      bool first) const {
    if (ask.weights == nullptr) {
      if (first) {
        for (std::size_t i = 0; i < width(); ++i) to[i] = static_cast<float>(row[i]);
      } else {
        for (std::size_t i = 0; i < width(); ++i) to[i] += static_cast<float>(row[i]);
      }
      return;
    }
    const float weight = ask.weights[position];
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
    } else if (ask.divisors != nullptr) {
      const float by = ask.divisors[bag];
      for (std::size_t i = 0; i < width(); ++i) total[i] = by == 0 ? 0 : total[i] / by;
    }
    if constexpr (sizeof(Element) != sizeof(float)) {
      Element* to = out_of(bag);
      for (std::size_t i = 0; i < width(); ++i) to[i] = static_cast<Element>(total[i]);
    }
  }
};

template <typename Element, std::size_t RowBytes>
std::size_t pool_rows(const CacheView& view, const PoolAsk& ask, std::int64_t* left) {
  Reader<RowBytes, false> reader(view);
  Pooling<Element, RowBytes> pooling{ask, view.row_bytes / sizeof(Element), {}};
  if (sizeof(Element) != sizeof(float)) pooling.sum.reset(new float[pooling.width()]);
  const std::unique_ptr<Element[]> row(new Element[pooling.width()]);
  std::size_t unanswered = 0, bag = ask.first, given = 0;
  const std::int64_t first = pooling.begin_of(ask.first), end = pooling.begin_of(ask.last);
  while (given < ask.n_given && ask.given[given] < first) ++given;
  reader.look_up(
      static_cast<std::size_t>(end - first),
      [&](std::size_t i) { return ask.keys[first + static_cast<std::int64_t>(i)]; },
      [&](std::size_t) { return reinterpret_cast<std::uint8_t*>(row.get()); },
      [&](std::size_t i, Outcome outcome, std::uint64_t) {
        const std::int64_t position = first + static_cast<std::int64_t>(i);
        while (pooling.begin_of(bag + 1) <= position) pooling.finish(bag++);
        const Element* found = row.get();
        if (given < ask.n_given && ask.given[given] == position) {
          found = reinterpret_cast<const Element*>(ask.rows) + given++ * pooling.width();
        } else if (outcome != Outcome::kRow) {
          left[unanswered++] = position;
          return true;
        }
        pooling.add(pooling.sum_of(bag), found, position, position == pooling.begin_of(bag));
        return true;
      });
  while (bag < ask.last) pooling.finish(bag++);
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

  // What sums begin with: -0 + x is x, of either sign.
  HPS_INLINE static Row nothing() {
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
std::size_t pool_in_registers(const CacheView& view, const PoolAsk& ask, std::int64_t* left) {
  using Vector = Row<RowBytes>;
  const Vector nothing = Vector::nothing();
  Reader<RowBytes, false> reader(view);
  const Pooling<float, RowBytes> bags{ask, RowBytes / sizeof(float), {}};
  std::size_t unanswered = 0, bag = ask.first, given = 0;
  const std::int64_t begin = bags.begin_of(ask.first), end = bags.begin_of(ask.last);
  std::int64_t bag_end = begin;  // of the bag that is summed; before the first, nothing is
  Vector sum = nothing;
  const auto key_at = [&](std::size_t i) { return ask.keys[begin + static_cast<std::int64_t>(i)]; };
  const auto put = [&](std::int64_t from) HPS_FLAT {
    const bool empty = bag_end == from;
    const float divisor = empty ? 0 : ask.divisors == nullptr ? 1 : ask.divisors[bag];
    sum.put(ask.out + bag * RowBytes, divisor);
    sum = nothing;
    ++bag;
  };
  std::int64_t bag_begin = begin;
  if (bag < ask.last) bag_end = bags.begin_of(bag + 1);
  while (given < ask.n_given && ask.given[given] < begin) ++given;
  reader.find_all(static_cast<std::size_t>(end - begin), key_at,
                  [&](std::size_t i, const Found& at) HPS_FLAT {
                    const std::int64_t position = begin + static_cast<std::int64_t>(i);
                    while (bag_end <= position) {
                      put(bag_begin);
                      bag_begin = bag_end;
                      bag_end = bags.begin_of(bag + 1);
                    }
                    Vector row;
                    if (__builtin_expect(given < ask.n_given && ask.given[given] == position, 0)) {
                      row = Vector::at(ask.rows + given++ * RowBytes);
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
                        if (reader.look_again(key_at(i), copied, version) != Outcome::kRow) {
                          left[unanswered++] = position;
                          return true;
                        }
                        row = Vector::at(copied);
                      }
                    }
                    if (ask.weights == nullptr) {
                      sum.add(row);
                    } else {
                      sum.add(row, ask.weights[position]);
                    }
                    return true;
                  });
  while (bag < ask.last) {
    put(bag_begin);
    bag_begin = bag_end;
    if (bag < ask.last) bag_end = bags.begin_of(bag + 1);
  }
  return unanswered;
}

template <typename Element>
std::size_t pool_of(const CacheView& view, const PoolAsk& ask, std::int64_t* left) {
  switch (view.row_bytes) {
    case 64:
      return pool_rows<Element, 64>(view, ask, left);
    case 128:
      return pool_rows<Element, 128>(view, ask, left);
    default:
      return pool_rows<Element, 0>(view, ask, left);
  }
}

std::size_t pool_floats(const CacheView& view, const PoolAsk& ask, std::int64_t* left) {
  switch (view.row_bytes) {
    case 64:
      return pool_in_registers<64>(view, ask, left);
    case 128:
      return pool_in_registers<128>(view, ask, left);
    case 256:
      return pool_in_registers<256>(view, ask, left);
    case 512:
      return pool_in_registers<512>(view, ask, left);
    default:
      return pool_rows<float, 0>(view, ask, left);
  }
}

HPS_INLINE const std::uint8_t* row_of(const PoolAsk& ask, std::int64_t position,
                                      std::size_t row_bytes) {
  const std::int64_t number = ask.keys != nullptr ? ask.keys[position] : position;
  return ask.rows + static_cast<std::size_t>(number) * row_bytes;
}

template <typename Element>
void sum_rows(const PoolAsk& ask, std::size_t row_bytes) {
  Pooling<Element, 0> pooling{ask, row_bytes / sizeof(Element), {}};
  if (sizeof(Element) != sizeof(float)) pooling.sum.reset(new float[pooling.width()]);
  const std::int64_t last = pooling.begin_of(ask.last);
  for (std::size_t bag = ask.first; bag < ask.last; ++bag) {
    const std::int64_t begin = pooling.begin_of(bag), end = pooling.begin_of(bag + 1);
    for (std::int64_t position = begin; position < end; ++position) {
      if (position + static_cast<std::int64_t>(kAhead) < last)
        prefetch_row(row_of(ask, position + kAhead, row_bytes), row_bytes);
      const auto* row = reinterpret_cast<const Element*>(row_of(ask, position, row_bytes));
      pooling.add(pooling.sum_of(bag), row, position, position == begin);
    }
    pooling.finish(bag);
  }
}

// sum_rows for float32 rows that fit into registers.
template <std::size_t RowBytes>
void sum_in_registers(const PoolAsk& ask) {
  using Vector = Row<RowBytes>;
  const Pooling<float, RowBytes> bags{ask, RowBytes / sizeof(float), {}};
  const std::int64_t last = bags.begin_of(ask.last);
  for (std::size_t bag = ask.first; bag < ask.last; ++bag) {
    const std::int64_t begin = bags.begin_of(bag), end = bags.begin_of(bag + 1);
    Vector sum = Vector::nothing();
    for (std::int64_t position = begin; position < end; ++position) {
      if (position + static_cast<std::int64_t>(kAhead) < last)
        prefetch_row(row_of(ask, position + kAhead, RowBytes), RowBytes);
      const Vector row = Vector::at(row_of(ask, position, RowBytes));
      if (ask.weights == nullptr) {
        sum.add(row);
      } else {
        sum.add(row, ask.weights[position]);
      }
    }
    sum.put(ask.out + bag * RowBytes, begin == end              ? 0
                                      : ask.divisors == nullptr ? 1
                                                                : ask.divisors[bag]);
  }
}

}  // namespace

void pool_rows(const PoolAsk& ask, std::size_t row_bytes);
void pool_rows(const PoolAsk& ask, std::size_t row_bytes) {
  if (ask.halves) return sum_rows<Half>(ask, row_bytes);
  switch (row_bytes) {
    case 64:
      return sum_in_registers<64>(ask);
    case 128:
      return sum_in_registers<128>(ask);
    case 256:
      return sum_in_registers<256>(ask);
    case 512:
      return sum_in_registers<512>(ask);
    default:
      return sum_rows<float>(ask, row_bytes);
  }
}

std::size_t pool(const CacheView& view, const PoolAsk& ask, std::int64_t* left);
std::size_t pool(const CacheView& view, const PoolAsk& ask, std::int64_t* left) {
  return ask.halves ? pool_of<Half>(view, ask, left) : pool_floats(view, ask, left);
}

}  // namespace HPS_ISA
}  // namespace hps
