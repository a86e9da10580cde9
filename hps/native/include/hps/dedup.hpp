#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// Writes each distinct key of keys[0..n) once, in order of first appearance, to unique[0..u), and
// for every i the position of keys[i] in unique to inverse[i]. Returns u. unique and inverse hold
// n.
std::size_t dedup(const std::int64_t* keys, std::size_t n, std::int64_t* unique,
                  std::int64_t* inverse);

}  // namespace hps
