// Reading a table: what lookups do. Compiled once per instruction set.
#pragma once

#include <vector>

#include "hps/cache_layout.hpp"

namespace hps {

// Stored; sums are taken in float. g++ 12 for ARM knows it by this name only.
#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

// Where a fetch writes, indexed by the key's position.
struct CacheAnswer {
  std::uint8_t* out;
  std::uint64_t* versions;
  std::uint8_t* source;
  std::uint8_t code;
};

// Bags [first, last) of keys, each to be pooled to a vector. Bag b has the keys from offsets[b] to
// offsets[b + 1], or `hotness` keys where there are no offsets.
struct PoolAsk {
  const std::int64_t* keys;
  const std::int64_t* offsets;  // or null
  std::int64_t hotness;
  std::size_t first, last;
  const float* weights;   // per key, or null
  const float* divisors;  // per bag, or null; a bag whose divisor is 0 gets zeros
  bool halves;            // rows and out are float16, sums float32; else float32
  std::uint8_t* out;      // [bags][row_bytes]
  // Rows that are not looked for, because they are known to be missing: their positions, ascending.
  const std::int64_t* given;
  std::size_t n_given;
  const std::uint8_t* rows;
};

struct ReadKernels {
  // Copies the row of every key, in order, to out, [n][row_bytes]; stops with false at the first
  // that has none (out is then partly written). Keys may repeat. Counts as a use of the keys
  // copied.
  bool (*gather)(const CacheView& view, const std::int64_t* keys, std::size_t n, std::uint8_t* out);

  // Answers keys[missing[0..m)]; tombstones older than `oldest_tombstone` count as not there.
  // Writes the positions it could not answer to left, in order, and returns their number. Counts as
  // a use of the keys answered. A row that a writer kept changing is left, with traces in out.
  std::size_t (*fetch)(const CacheView& view, const std::int64_t* keys, const std::int64_t* missing,
                       std::size_t m, std::uint64_t oldest_tombstone, const CacheAnswer& answer,
                       std::int64_t* left);

  // Sums the weighted rows of each bag, in order, and divides. Writes the positions of keys that
  // have no row to left, in order, and returns their number; their bags have no meaning then.
  // Counts as a use of the keys.
  std::size_t (*pool)(const CacheView& view, const PoolAsk& ask, std::int64_t* left);

  // Likewise of rows that lie in an array, ask.rows [.][row_bytes]: key i has row keys[i], or row i
  // where keys is null. Nothing is given.
  void (*pool_rows)(const PoolAsk& ask, std::size_t row_bytes);

  // Copies rows[numbers[i]] to out[i]: what is left of a lookup when nothing has to be found. The
  // floor that benchmarks compare with.
  void (*copy_rows)(const std::uint8_t* rows, std::size_t row_bytes, const std::int64_t* numbers,
                    std::size_t n, std::uint8_t* out);

  // The name of the instruction set.
  const char* name;
};

// Those that this machine can run, the fastest first.
std::vector<const ReadKernels*> runnable_kernels();

}  // namespace hps
