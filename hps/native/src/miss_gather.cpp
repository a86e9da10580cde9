#include "hps/miss_gather.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace hps {
namespace {

// The part that holds a position. Misses of one part often follow each other, so the last part is
// tried first.
std::size_t part_of(const MissList& list, std::uint32_t position, std::size_t last) {
  const MissPart* parts = list.parts;
  const auto holds = [&](std::size_t part) {
    return parts[part].base <= position &&
           (part + 1 == list.n_parts || position < parts[part + 1].base);
  };
  if (holds(last)) return last;
  const MissPart* after =
      std::upper_bound(parts, parts + list.n_parts, position,
                       [](std::uint32_t value, const MissPart& part) { return value < part.base; });
  return static_cast<std::size_t>(after - parts) - 1;
}

constexpr std::size_t kPartsSorted = 64;  // parts that one counting sort takes

// Up to kMissPiece misses, grouped by their parts, so that each table's keys are searched together.
struct Piece {
  std::uint32_t part[kMissPiece];
  std::uint32_t order[kMissPiece];  // indices in the list, grouped by part
  std::int64_t keys[kMissPiece];    // in that order
};

std::size_t gather_group(const MissList& list, std::size_t part, const std::int64_t* keys,
                         const std::uint32_t* order, std::size_t n) {
  const RowReader* table = list.parts[part].table;
  std::size_t unanswered = n;
  if (table != nullptr) {
    unanswered = table->gather_each(keys, order, n,
                                    {list.rows, list.stride, list.sources, list.code, kUnanswered});
  } else {
    for (std::size_t i = 0; i < n; ++i) list.sources[order[i]] = kUnanswered;
  }
  if (list.counts != nullptr) {
    std::uint32_t* counts = list.counts + 2 * part;
    __atomic_fetch_add(counts, static_cast<std::uint32_t>(n), __ATOMIC_RELAXED);
    __atomic_fetch_add(counts + 1, static_cast<std::uint32_t>(n - unanswered), __ATOMIC_RELAXED);
  }
  return unanswered;
}

// Gathers those misses of a piece that are of kPartsSorted parts from `lowest` on.
std::size_t gather_parts(const MissList& list, Piece& piece, std::size_t first, std::size_t n,
                         std::size_t lowest) {
  std::size_t ends[kPartsSorted + 1] = {};
  for (std::size_t i = 0; i < n; ++i)
    if (piece.part[i] - lowest < kPartsSorted) ++ends[piece.part[i] - lowest + 1];
  for (std::size_t group = 0; group < kPartsSorted; ++group) ends[group + 1] += ends[group];
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t part = piece.part[i], index = first + i;
    if (part - lowest >= kPartsSorted) continue;
    const std::size_t at = ends[part - lowest]++;
    const MissPart& own = list.parts[part];
    piece.order[at] = static_cast<std::uint32_t>(index);
    piece.keys[at] =
        list.keys != nullptr ? list.keys[index] : own.keys[list.positions[index] - own.base];
  }
  std::size_t unanswered = 0, begin = 0;
  for (std::size_t group = 0; group < kPartsSorted; begin = ends[group++])
    if (ends[group] != begin)
      unanswered += gather_group(list, lowest + group, piece.keys + begin, piece.order + begin,
                                 ends[group] - begin);
  return unanswered;
}

}  // namespace

// Groups the misses by part, and gathers group by group.
std::size_t gather_piece(const MissList& list, std::size_t first, std::size_t last) {
  Piece piece;
  const std::size_t n = last - first;
  std::size_t lowest = list.n_parts, highest = 0, unanswered = 0;
  for (std::size_t i = 0, part = 0; i < n; ++i) {
    part = part_of(list, list.positions[first + i], part);
    piece.part[i] = static_cast<std::uint32_t>(part);
    lowest = std::min(lowest, part);
    highest = std::max(highest, part);
  }
  for (std::size_t part = lowest; n != 0 && part <= highest; part += kPartsSorted)
    unanswered += gather_parts(list, piece, first, n, part);
  return unanswered;
}

std::size_t gather_misses(const MissList& list) {
  std::size_t unanswered = 0;
  for (std::size_t first = 0; first < list.n; first += kMissPiece)
    unanswered += gather_piece(list, first, std::min(list.n, first + kMissPiece));
  return unanswered;
}

std::size_t gather_misses(const MissList& list, WorkerPool& pool) {
  std::atomic<std::size_t> unanswered{0};
  pool.run((list.n + kMissPiece - 1) / kMissPiece, [&](std::size_t piece) {
    const std::size_t first = piece * kMissPiece;
    const std::size_t left = gather_piece(list, first, std::min(list.n, first + kMissPiece));
    if (left != 0) unanswered.fetch_add(left, std::memory_order_relaxed);
  });
  return unanswered;
}

}  // namespace hps
