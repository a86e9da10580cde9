// What the header says of the writer's work, so that a dead writer's can be made good.
#include <stdexcept>

#include "hps/cache_table.hpp"
#include "hps/relaxed.hpp"

namespace hps {

RowKind CacheTable::kind_at(std::uint64_t word, unsigned slot) {
  return is_tombstone(word, slot) ? RowKind::kTombstone : RowKind::kRow;
}

// From here to `end` the row `number` is in the writer's hand. `at` is where it comes from; when it
// comes from no slot, any slot that doesn't have it.
void CacheTable::begin(Slot at, std::uint32_t number, RowKind before) {
  Header& header = *view_.header;
  store(header.held_before, header.held);
  store(header.writing, at.bucket * kSlots + at.slot + 1);
  compiler_fence();
  store(header.at_hand, (std::uint64_t{number} + 1) | static_cast<std::uint64_t>(before) << 40);
  compiler_fence();
}

void CacheTable::end(RowKind before, RowKind after) {
  Header& header = *view_.header;
  compiler_fence();
  store(header.held, header.held - held_as(before) + held_as(after));
  compiler_fence();
  store(header.at_hand, std::uint64_t{0});
  compiler_fence();
}

// The row in the dead writer's hand is in its slot, or free already, or nowhere: then it becomes
// free. A slot in which it was being replaced is given up, since half of it may be written.
bool CacheTable::mend() {
  const std::lock_guard<std::mutex> turn(writer_);
  Header& header = *view_.header;
  const std::uint64_t hand = load(header.at_hand), writing = load(header.writing);
  if (hand == 0) return false;
  const auto number = static_cast<std::uint32_t>((hand & ((1ULL << 33) - 1)) - 1);
  const auto before = static_cast<RowKind>(hand >> 40);
  if (number >= header.capacity || writing == 0 || writing > view_.n_buckets * kSlots)
    throw std::invalid_argument("the table is broken");
  const Slot at{(writing - 1) / kSlots, static_cast<unsigned>((writing - 1) % kSlots)};
  std::uint64_t word = load(bucket(at).word);
  bool there = (word & occupied_bit(at.slot)) != 0 && load(bucket(at).rows[at.slot]) == number;
  if (there && (word & busy_bit(at.slot)) != 0) {
    drop(at);
    there = false;
  }
  word = load(bucket(at).word);
  if (!there && header.free_row != number && number < header.fresh_row) give_back(number);
  const RowKind after = there ? kind_at(word, at.slot) : RowKind::kNone;
  store(header.held, header.held_before - held_as(before) + held_as(after));
  compiler_fence();
  store(header.at_hand, std::uint64_t{0});
  return true;
}

}  // namespace hps
