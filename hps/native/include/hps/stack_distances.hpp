// Stack distances of a trace (Mattson et al. 1970). NumPy twin: stack_distances in
// hps/native/twin.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// Writes to distances[i] the number of different ids since the last access to ids[i], itself
// included, or -1 for its first access: an LRU cache of at least that many rows has the row.
// ids[0..n) are below `distinct`; n is below 2^32 - 1. Thread-safe. O(n log n), 4 bytes an access
// and an id of temporary memory. Throws std::out_of_range for an id outside 0..distinct.
void stack_distances(const std::int64_t* ids, std::size_t n, std::size_t distinct,
                     std::int64_t* distances);

}  // namespace hps
