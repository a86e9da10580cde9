// Spreads the work of one call over several threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace hps {

// Calls work(piece) for every piece in [0, pieces), on this thread and up to threads - 1 others,
// which end with the call; `work` must not throw. A thread costs some 20 us, so a piece should take
// at least as long.
template <typename Work>
void parallel_for(std::size_t pieces, std::size_t threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (std::size_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)
      work(piece);
  };
  std::vector<std::thread> others;
  others.reserve(threads);
  try {
    for (std::size_t i = 1; i < threads && i < pieces; ++i) others.emplace_back(run);
  } catch (const std::system_error&) {
    // The system gives no more threads: the ones started do the work.
  }
  run();
  for (std::thread& other : others) other.join();
}

}  // namespace hps
