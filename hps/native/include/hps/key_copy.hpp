// Copies of keys by several threads, chunk by chunk, for work that begins with each chunk.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "hps/relaxed.hpp"
#include "hps/worker_pool.hpp"

namespace hps {

// Pieces of copies, in the order of their chunks. One thread at a time.
class ChunkedCopy {
 public:
  static constexpr std::size_t kPieceBytes = 1 << 16;  // for one thread: some 6 us

  // Adds a copy to the last chunk.
  void add(const void* from, void* to, std::size_t bytes) {
    const auto* source = static_cast<const std::uint8_t*>(from);
    auto* target = static_cast<std::uint8_t*>(to);
    for (std::size_t at = 0; at < bytes; at += kPieceBytes)
      pieces_.push_back(
          {source + at, target + at, std::min(kPieceBytes, bytes - at), ends_.size()});
  }
  // Ends the last chunk.
  void end_chunk() { ends_.push_back(pieces_.size()); }

  // Copies all, with the threads of `pool` unless null, and calls `ready(chunk)` on this thread, in
  // order, as each chunk is complete. Throws what `ready` throws, once no thread copies any more.
  template <typename Ready>
  void run(WorkerPool* pool, const Ready& ready) {
    const std::unique_ptr<std::atomic<std::size_t>[]> left(
        new std::atomic<std::size_t>[ends_.size()]);
    for (std::size_t i = 0, start = 0; i < ends_.size(); start = ends_[i++])
      left[i] = ends_[i] - start;
    std::size_t next = 0;
    std::exception_ptr error;
    const auto report = [&] {
      while (!error && next < ends_.size() && left[next].load(std::memory_order_acquire) == 0) {
        try {
          ready(next++);
        } catch (...) {
          error = std::current_exception();
        }
      }
    };
    const std::thread::id caller = std::this_thread::get_id();
    const auto copy = [&](std::size_t i) {
      const Piece& piece = pieces_[i];
      std::memcpy(piece.to, piece.from, piece.bytes);
      left[piece.chunk].fetch_sub(1, std::memory_order_release);
      if (std::this_thread::get_id() == caller) report();
    };
    if (pool != nullptr) {
      pool->run(pieces_.size(), copy);
    } else {
      for (std::size_t i = 0; i < pieces_.size(); ++i) copy(i);
    }
    report();
    if (error) std::rethrow_exception(error);
  }

 private:
  struct Piece {
    const std::uint8_t* from;
    std::uint8_t* to;
    std::size_t bytes, chunk;
  };
  std::vector<Piece> pieces_;
  std::vector<std::size_t> ends_;
};

}  // namespace hps
