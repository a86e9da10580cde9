#include "hps/dedup.hpp"

#include <vector>

#include "hps/partition_hash.hpp"

namespace hps {

std::size_t dedup(const std::int64_t* keys, std::size_t n, std::int64_t* unique,
                  std::int64_t* inverse) {
  // Linear probing over positions in `unique` (+1; 0 is empty), at most half full. The table is
  // kept per thread, because its allocation would cost more than a small batch's probing.
  static thread_local std::vector<std::uint32_t> table;
  std::size_t capacity = 64;
  while (capacity < 2 * n) capacity *= 2;
  table.assign(capacity, 0);
  const std::size_t mask = capacity - 1;

  std::size_t count = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t key = keys[i];
    std::size_t slot = partition_hash(static_cast<std::uint64_t>(key)) & mask;
    while (table[slot] != 0 && unique[table[slot] - 1] != key) slot = (slot + 1) & mask;
    if (table[slot] == 0) {
      unique[count] = key;
      table[slot] = static_cast<std::uint32_t>(++count);
    }
    inverse[i] = static_cast<std::int64_t>(table[slot]) - 1;
  }
  return count;
}

}  // namespace hps
