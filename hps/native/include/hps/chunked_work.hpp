// Work of several threads in chunks, with a step on the caller's thread as each chunk is complete.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "hps/worker_pool.hpp"

namespace hps {

// Calls work(chunk, piece) for every piece, with the threads of `pool` unless null, and
// ready(chunk) on this thread, in order, once all pieces of the chunk have ended. The pieces of
// chunk i end before `ends[i]`, where those of the next begin. `work` must not throw; what `ready`
// throws is thrown once all pieces have ended.
template <typename Work, typename Ready>
void run_in_chunks(WorkerPool* pool, const std::vector<std::size_t>& ends, const Work& work,
                   const Ready& ready) {
  const std::size_t chunks = ends.size(), pieces = chunks == 0 ? 0 : ends.back();
  const std::unique_ptr<std::atomic<std::size_t>[]> left(new std::atomic<std::size_t>[chunks]);
  std::vector<std::size_t> chunk_of(pieces);
  for (std::size_t i = 0, start = 0; i < chunks; start = ends[i++]) {
    left[i] = ends[i] - start;
    for (std::size_t piece = start; piece < ends[i]; ++piece) chunk_of[piece] = i;
  }
  std::size_t next = 0;
  std::exception_ptr error;
  const auto report = [&] {
    while (!error && next < chunks && left[next].load(std::memory_order_acquire) == 0) {
      try {
        ready(next++);
      } catch (...) {
        error = std::current_exception();
      }
    }
  };
  const std::thread::id caller = std::this_thread::get_id();
  const auto run = [&](std::size_t piece) {
    const std::size_t chunk = chunk_of[piece];
    work(chunk, piece);
    left[chunk].fetch_sub(1, std::memory_order_release);
    if (std::this_thread::get_id() == caller) report();
  };
  if (pool != nullptr) {
    pool->run(pieces, run);
  } else {
    for (std::size_t piece = 0; piece < pieces; ++piece) run(piece);
  }
  report();
  if (error) std::rethrow_exception(error);
}

}  // namespace hps
