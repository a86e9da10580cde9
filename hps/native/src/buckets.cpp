#include "hps/buckets.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace hps {

namespace {

// Values of one pass over the bounds: they stay in the nearest cache, and 32 bits count them.
constexpr std::size_t kBlock = 1024;

// The largest T up to `bound`: a T is at most one if it is at most the other.
template <typename T>
T rounded_down(double bound) {
  const T near = static_cast<T>(bound);
  if (static_cast<double>(near) <= bound) return near;
  return std::nextafter(near, -std::numeric_limits<T>::infinity());
}

// One loop without branches per bound, which the compiler vectorizes.
template <typename T>
std::uint32_t count_up_to(const T* values, std::size_t n, T bound) {
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < n; ++i) found += values[i] <= bound ? 1 : 0;
  return found;
}

}  // namespace

template <typename T>
void count_in_buckets(const T* values, std::size_t n, const double* bounds, std::size_t buckets,
                      std::int64_t* counts, double* sums) {
  double positive = 0, others = 0;
  for (std::size_t start = 0; start < n; start += kBlock) {
    const T* block = values + start;
    const std::size_t size = std::min(kBlock, n - start);
    std::uint32_t below = 0;
    for (std::size_t b = 0; b < buckets; ++b) {
      const std::uint32_t upto = count_up_to(block, size, rounded_down<T>(bounds[b]));
      counts[b] += upto - below;
      below = upto;
    }
    counts[buckets] += static_cast<std::int64_t>(size - below);
    for (std::size_t i = 0; i < size; ++i) {
      const double value = block[i];
      positive += value > 0 ? value : 0;
      others += value > 0 ? 0 : value;
    }
  }
  sums[0] += positive;
  sums[1] += others;
}

template void count_in_buckets(const float*, std::size_t, const double*, std::size_t, std::int64_t*,
                               double*);
template void count_in_buckets(const double*, std::size_t, const double*, std::size_t,
                               std::int64_t*, double*);

}  // namespace hps
