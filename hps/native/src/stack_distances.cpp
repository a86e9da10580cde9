#include "hps/stack_distances.hpp"

#include <stdexcept>
#include <vector>

namespace hps {

void stack_distances(const std::int64_t* ids, std::size_t n, std::size_t distinct,
                     std::int64_t* distances) {
  // A Fenwick tree over the accesses counts those that are the last to their id so far.
  std::vector<std::uint32_t> tree(n + 1, 0);
  std::vector<std::uint32_t> last(distinct, 0);  // position + 1; 0: none
  const auto add = [&](std::size_t at, std::uint32_t change) {
    for (; at <= n; at += at & (~at + 1)) tree[at] += change;
  };
  std::uint32_t live = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto id = static_cast<std::uint64_t>(ids[i]);
    if (id >= distinct) throw std::out_of_range("an id is outside of 0..distinct");
    const std::uint32_t before = last[id];
    if (before == 0) {
      distances[i] = -1;
      ++live;
    } else {
      std::uint32_t older = 0;  // last accesses up to the one to this id
      for (std::size_t at = before; at != 0; at &= at - 1) older += tree[at];
      distances[i] = static_cast<std::int64_t>(live) - older + 1;
      add(before, UINT32_MAX);
    }
    last[id] = static_cast<std::uint32_t>(i + 1);
    add(i + 1, 1);
  }
}

}  // namespace hps
