// Values counted in the buckets of a histogram. NumPy twin: count_in_buckets of
// hps/native/twin.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// Adds to counts[i] the number of `values` above bounds[i - 1] and up to bounds[i], to
// counts[buckets] those above all of the ascending `bounds`; to sums[0] the sum of the positive
// values, to sums[1] that of the others. The caller serializes the calls that add to the same
// counts.
template <typename T>
void count_in_buckets(const T* values, std::size_t n, const double* bounds, std::size_t buckets,
                      std::int64_t* counts, double* sums);

extern template void count_in_buckets(const float*, std::size_t, const double*, std::size_t,
                                      std::int64_t*, double*);
extern template void count_in_buckets(const double*, std::size_t, const double*, std::size_t,
                                      std::int64_t*, double*);

}  // namespace hps
