// The record of the writer's change in progress, and the repair of a dead writer's change.
#include <stdexcept>

#include "hps/cache_table.hpp"
#include "hps/relaxed.hpp"

namespace hps {

RowKind CacheTable::kind_at(std::uint64_t word, unsigned slot) {
  return is_tombstone(word, slot) ? RowKind::kTombstone : RowKind::kRow;
}

// Records that the row `number` is being changed, until `end_change`. `at` is the slot that it
// leaves; if it leaves none, any slot that does not hold it.
void CacheTable::begin_change(Slot at, std::uint32_t number, RowKind before) {
  Header& header = *view_.header;
  store(header.held_before, header.held);
  store(header.pending_slot, at.bucket * kSlots + at.slot + 1);
  compiler_fence();
  store(header.pending_row, (std::uint64_t{number} + 1) | static_cast<std::uint64_t>(before) << 40);
  compiler_fence();
}

void CacheTable::end_change(RowKind before, RowKind after) {
  Header& header = *view_.header;
  compiler_fence();
  store(header.held, header.held - held_as(before) + held_as(after));
  compiler_fence();
  store(header.pending_row, std::uint64_t{0});
  compiler_fence();
}

// The dead writer's pending row is in its slot, or already free, or neither: then it is released. A
// slot in which it was being replaced is cleared, because half of it may be written.
bool CacheTable::repair() {
  const std::lock_guard<std::mutex> lock(writer_);
  Header& header = *view_.header;
  const std::uint64_t pending = load(header.pending_row), pending_slot = load(header.pending_slot);
  if (pending == 0) return false;
  const auto number = static_cast<std::uint32_t>((pending & ((1ULL << 33) - 1)) - 1);
  const auto before = static_cast<RowKind>(pending >> 40);
  if (number >= header.capacity || pending_slot == 0 || pending_slot > view_.n_buckets * kSlots)
    throw std::invalid_argument("the header of the table is corrupt");
  const Slot at{(pending_slot - 1) / kSlots, static_cast<unsigned>((pending_slot - 1) % kSlots)};
  std::uint64_t word = load(bucket(at).word);
  bool in_slot = (word & occupied_bit(at.slot)) != 0 && load(bucket(at).rows[at.slot]) == number;
  if (in_slot && (word & busy_bit(at.slot)) != 0) {
    clear_slot(at);
    in_slot = false;
  }
  word = load(bucket(at).word);
  if (!in_slot && header.free_row != number && number < header.fresh_row) release_row(number);
  const RowKind after = in_slot ? kind_at(word, at.slot) : RowKind::kNone;
  store(header.held, header.held_before - held_as(before) + held_as(after));
  compiler_fence();
  store(header.pending_row, std::uint64_t{0});
  return true;
}

}  // namespace hps
