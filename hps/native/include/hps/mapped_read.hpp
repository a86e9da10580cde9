// Kernels that read the records of a mapped table, for lookups. Compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hps/cache_read.hpp"
#include "hps/static_index.hpp"

namespace hps {

// A mapped table's memory. Record i, the key and then its row, has the position i. `overridden` is
// null or holds the number of bits that are set, and then a bit per position: the row of such a
// record is replaced by another store's. Other threads and processes may set bits.
struct MappedView {
  const std::uint8_t* records;
  std::size_t record_bytes, row_bytes;
  std::uint64_t rows;
  StaticIndex index;
  const std::uint64_t* overridden;
};

// Keys without an answer by a fetch: positions of keys, in order.
struct LeftKeys {
  std::int64_t* overridden;
  std::int64_t* absent;
  std::size_t n_overridden, n_absent;
};

// All kernels are thread-safe. A record that is overridden has no row.
struct MappedKernels {
  // Copies the row of every key, in order, to out, [n][row_bytes]. Writes the numbers of keys
  // without a row to left, ascending, and returns how many these are; if left is null, stops at the
  // first one and returns 1. Keys may repeat.
  std::size_t (*gather)(const MappedView& view, const std::int64_t* keys, std::size_t n,
                        std::uint8_t* out, std::uint32_t* left);
  // See ReadKernels.
  std::size_t (*gather_each)(const MappedView& view, const std::int64_t* keys,
                             const std::uint32_t* places, std::size_t n, const EachOutput& output);
  std::size_t (*pool)(const MappedView& view, const PoolRequest& request, std::int64_t* left);

  // Fetches keys[missing[0..m)]; every row has this version.
  void (*fetch)(const MappedView& view, const std::int64_t* keys, const std::int64_t* missing,
                std::size_t m, std::uint64_t version, const FetchOutput& output, LeftKeys& left);

  // Writes each key's position, overridden or not; -1 for an absent key.
  void (*find)(const MappedView& view, const std::int64_t* keys, std::size_t n,
               std::int64_t* positions);

  // Writes the position that each key has if it is in the table, without a look at the records.
  void (*guess)(const MappedView& view, const std::int64_t* keys, std::size_t n,
                std::int64_t* positions);

  // Copies the rows of records with known positions: the lower bound that benchmarks compare with.
  void (*copy)(const MappedView& view, const std::int64_t* positions, std::size_t n,
               std::uint8_t* out);

  const char* name;
};

// The kernels that this machine can run, the fastest first, under the names of runnable_kernels().
std::vector<const MappedKernels*> runnable_mapped_kernels();

}  // namespace hps
