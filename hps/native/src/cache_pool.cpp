// Gather and pool in one pass. A row is copied to the first-level cache, found whole, and added to
// its bag from there. Every operation is rounded as in hps/lookup/pooling.py and comes in the same
// order.
#include <vector>

#include "cache_reader.hpp"
#include "hps/cache_read.hpp"

namespace hps {
namespace HPS_ISA {
namespace {

template <typename Element, std::size_t RowBytes>
struct Pooling {
  const PoolAsk& ask;
  std::size_t dim;
  std::vector<float> sum;  // of a bag of float16 rows

  std::int64_t begin_of(std::size_t bag) const {
    return ask.offsets != nullptr ? ask.offsets[bag] : static_cast<std::int64_t>(bag) * ask.hotness;
  }

  HPS_INLINE std::size_t width() const { return RowBytes != 0 ? RowBytes / sizeof(Element) : dim; }

  Element* out_of(std::size_t bag) const {
    return reinterpret_cast<Element*>(ask.out) + bag * width();
  }

  float* sum_of(std::size_t bag) {
    if constexpr (sizeof(Element) == sizeof(float)) return out_of(bag);
    return sum.data();
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
  if (sizeof(Element) != sizeof(float)) pooling.sum.resize(pooling.width());
  std::vector<Element> row(pooling.width());
  std::size_t unanswered = 0, bag = ask.first, given = 0;
  const std::int64_t first = pooling.begin_of(ask.first), end = pooling.begin_of(ask.last);
  while (given < ask.n_given && ask.given[given] < first) ++given;
  reader.look_up(
      static_cast<std::size_t>(end - first),
      [&](std::size_t i) { return ask.keys[first + static_cast<std::int64_t>(i)]; },
      [&](std::size_t) { return reinterpret_cast<std::uint8_t*>(row.data()); },
      [&](std::size_t i, Outcome outcome, std::uint64_t) {
        const std::int64_t position = first + static_cast<std::int64_t>(i);
        while (pooling.begin_of(bag + 1) <= position) pooling.finish(bag++);
        const Element* found = row.data();
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

template <typename Element>
std::size_t pool_of(const CacheView& view, const PoolAsk& ask, std::int64_t* left) {
  switch (view.row_bytes) {
    case 64:
      return pool_rows<Element, 64>(view, ask, left);
    case 128:
      return pool_rows<Element, 128>(view, ask, left);
    case 512:
      return pool_rows<Element, 512>(view, ask, left);
    default:
      return pool_rows<Element, 0>(view, ask, left);
  }
}

}  // namespace

std::size_t pool(const CacheView& view, const PoolAsk& ask, std::int64_t* left);
std::size_t pool(const CacheView& view, const PoolAsk& ask, std::int64_t* left) {
  return ask.halves ? pool_of<_Float16>(view, ask, left) : pool_of<float>(view, ask, left);
}

}  // namespace HPS_ISA
}  // namespace hps
