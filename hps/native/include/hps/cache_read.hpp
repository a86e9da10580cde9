// Kernels that read a table, for lookups. Compiled once per instruction set.
#pragma once

#include <vector>

#include "hps/cache_layout.hpp"
#include "hps/row_format.hpp"

namespace hps {

// The arrays that a fetch writes, indexed by the key's position.
struct FetchOutput {
  std::uint8_t* out;
  std::uint64_t* versions;
  std::uint8_t* source;
  std::uint8_t code;
};

// The memory that a gather with separate destinations writes: row i goes to rows + i * stride, and
// sources[i] is `code`, or `absent` for a key without a row.
struct EachOutput {
  std::uint8_t* rows;
  std::size_t stride;  // at least the length of a row
  std::uint8_t* sources;
  std::uint8_t code, absent;
};

// A pooling of the bags [first, last) of keys to one vector each. Bag b has the keys from
// offsets[b] to offsets[b + 1], or `hotness` keys if there are no offsets.
struct PoolRequest {
  const std::int64_t* keys;
  const std::int64_t* offsets;  // or null
  std::int64_t hotness;
  std::size_t first, last;
  const float* weights;   // per key, or null
  const float* divisors;  // per bag, or null; a bag whose divisor is 0 gets zeros
  RowFormat format;       // of the table's rows; sums are float32
  std::size_t dim;        // values of a row
  bool halves;            // out is float16, else float32
  std::uint8_t* out;      // [bags][dim]
  // Vectors that the caller supplies, for keys that the table is known to miss: the keys'
  // positions, ascending, and the vectors, [n_supplied][dim].
  const std::int64_t* supplied;
  std::size_t n_supplied;
  const float* vectors;
  const std::uint8_t* rows;  // of pool_rows only

  std::int64_t begin_of(std::size_t bag) const {
    return offsets != nullptr ? offsets[bag] : static_cast<std::int64_t>(bag) * hotness;
  }
  std::uint8_t* out_of(std::size_t bag) const { return out + bag * dim * (halves ? 2 : 4); }
};

// Rows to be decoded: row i is rows[numbers[i]], or rows[i] if numbers is null.
struct DecodeRequest {
  RowFormat format;
  std::size_t dim;
  const std::uint8_t* rows;
  const std::int64_t* numbers;
  std::size_t n;
  bool halves;        // out is float16, else float32
  std::uint8_t* out;  // [n][dim]
};

// Vectors to be encoded. storable[i] is 0 for a vector that the format can't hold: it has a value
// that is not finite, or too large. Its row is undefined.
struct EncodeRequest {
  RowFormat format;
  std::size_t dim;
  const float* vectors;
  std::size_t n;
  std::uint8_t* rows;
  std::uint8_t* storable;
};

// All kernels are thread-safe, and run in parallel to one writer (cache_layout.hpp).
struct ReadKernels {
  // Copies the row of every key, in order, to out, [n][row_bytes]; stops with false at the first
  // key without a row (out is then partly written). Keys may repeat. Counts as a use of the copied
  // keys.
  bool (*gather)(const CacheView& view, const std::int64_t* keys, std::size_t n, std::uint8_t* out);

  // Copies the row of keys[j], for j in [0, n), to the destination places[j]; continues at keys
  // without a row and returns their number. A deleted key, and a row that a writer kept changing,
  // count as such. Counts as a use of the keys found.
  std::size_t (*gather_each)(const CacheView& view, const std::int64_t* keys,
                             const std::uint32_t* places, std::size_t n, const EachOutput& output);

  // Fetches keys[missing[0..m)]; tombstones older than `oldest_tombstone` count as absent. Writes
  // the positions still missing to left, in order, and returns their number. Counts as a use of the
  // keys found. A row that a writer kept changing counts as missing; out may hold parts of it.
  std::size_t (*fetch)(const CacheView& view, const std::int64_t* keys, const std::int64_t* missing,
                       std::size_t m, std::uint64_t oldest_tombstone, const FetchOutput& output,
                       std::int64_t* left);

  // Sums the weighted rows of each bag, in order, and divides. Writes the positions of keys without
  // a row to left, in order, and returns their number; the vectors of their bags are undefined.
  // Counts as a use of the keys.
  std::size_t (*pool)(const CacheView& view, const PoolRequest& request, std::int64_t* left);

  // Pools rows of an array, request.rows: key i has row keys[i], or row i if keys is null. No
  // vectors are supplied.
  void (*pool_rows)(const PoolRequest& request);

  void (*decode_rows)(const DecodeRequest& request);
  void (*encode_rows)(const EncodeRequest& request);

  // Copies rows[numbers[i]] to out[i]: a lookup without the search, the lower bound that benchmarks
  // compare with.
  void (*copy_rows)(const std::uint8_t* rows, std::size_t row_bytes, const std::int64_t* numbers,
                    std::size_t n, std::uint8_t* out);

  // The name of the instruction set.
  const char* name;
};

// The kernels that this machine can run, the fastest first.
std::vector<const ReadKernels*> runnable_kernels();

}  // namespace hps
