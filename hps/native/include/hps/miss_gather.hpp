// Gather of the rows that a GPU cache misses, from tables in host memory into staging memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hps/chunked_work.hpp"
#include "hps/row_reader.hpp"
#include "hps/worker_pool.hpp"

namespace hps {

// One part of a batch: the keys of one table. The part's first key has the position `base` in the
// batch; bases ascend.
struct MissPart {
  const RowReader* table;    // null: no row is found
  const std::int64_t* keys;  // (n,), or null if MissList::keys is set
  std::uint32_t base;
};

// `n` missing keys of a batch of `n_parts` parts, and the memory for their rows.
struct MissList {
  const MissPart* parts;
  std::size_t n_parts;
  const std::uint32_t* positions;  // (n,) in the batch, in any order: as fetch_kernel lists them
  const std::int64_t* keys;        // (n,) the missing keys, or null: keys of the parts
  std::size_t n;
  std::uint8_t* rows;     // row i goes to rows + i * stride
  std::size_t stride;     // bytes; at least the longest row
  std::uint8_t* sources;  // (n,) receives `code`, or kUnanswered for a key without a row
  std::uint8_t code;
  std::uint32_t* counts;  // or null: 2 per part, to which its misses and the rows found are added
};

constexpr std::uint8_t kUnanswered = 255;  // launch.UNANSWERED
constexpr std::size_t kMissPiece = 1024;   // misses that one thread gathers at a time: 20 to 60 us

// Copies the row of every missing key that its table holds, and counts as a use of it. A deleted
// key has no row. Keys may repeat. Returns the number of keys without a row. Runs in parallel to
// the tables' writers and to other gathers; allocates nothing and does not throw. Positions must
// lie in the parts.
std::size_t gather_misses(const MissList& list);

// The same with the threads of `pool`.
std::size_t gather_misses(const MissList& list, WorkerPool& pool);

// The same, with `pool` unless it is null, and calls `place(first, n)` on this thread for ranges of
// misses, in order, as their rows are complete. Throws what `place` throws.
template <typename Place>
std::size_t gather_misses(const MissList& list, WorkerPool* pool, const Place& place);

// Gathers the misses [first, last), at most kMissPiece.
std::size_t gather_piece(const MissList& list, std::size_t first, std::size_t last);

constexpr std::size_t kPlacedPieces = 8;  // pieces of a range: a launch takes the host some 5 us

template <typename Place>
std::size_t gather_misses(const MissList& list, WorkerPool* pool, const Place& place) {
  const std::size_t pieces = (list.n + kMissPiece - 1) / kMissPiece;
  std::vector<std::size_t> ends;
  for (std::size_t end = 0; end < pieces;)
    ends.push_back(end = std::min(pieces, end + kPlacedPieces));
  std::atomic<std::size_t> unanswered{0};
  run_in_chunks(
      pool, ends,
      [&](std::size_t, std::size_t piece) {
        const std::size_t first = piece * kMissPiece;
        const std::size_t left = gather_piece(list, first, std::min(list.n, first + kMissPiece));
        if (left != 0) unanswered.fetch_add(left, std::memory_order_relaxed);
      },
      [&](std::size_t chunk) {
        const std::size_t first = chunk * kPlacedPieces * kMissPiece;
        place(first, std::min(list.n, ends[chunk] * kMissPiece) - first);
      });
  return unanswered;
}

}  // namespace hps
