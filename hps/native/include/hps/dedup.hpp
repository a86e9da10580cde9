// Reduction of a batch of keys to its distinct ones. NumPy twin: dedup in hps/native/twin.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// Writes each distinct key of keys[0..n) once, in order of first appearance, to unique[0..u), and
// the position of keys[i] in unique to inverse[i] for every i. Returns u. unique and inverse have
// length n, which is below 2^32 - 1. Thread-safe.
std::size_t dedup(const std::int64_t* keys, std::size_t n, std::int64_t* unique,
                  std::int64_t* inverse);

}  // namespace hps
