// Copies of keys by several threads, chunk by chunk, for work that begins with each chunk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hps/chunked_work.hpp"

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
      pieces_.push_back({source + at, target + at, std::min(kPieceBytes, bytes - at)});
  }
  // Ends the last chunk.
  void end_chunk() { ends_.push_back(pieces_.size()); }

  // Copies all; `pool` and `ready` as for run_in_chunks.
  template <typename Ready>
  void run(WorkerPool* pool, const Ready& ready) const {
    const auto copy = [this](std::size_t, std::size_t i) {
      std::memcpy(pieces_[i].to, pieces_[i].from, pieces_[i].bytes);
    };
    run_in_chunks(pool, ends_, copy, ready);
  }

 private:
  struct Piece {
    const std::uint8_t* from;
    std::uint8_t* to;
    std::size_t bytes;
  };
  std::vector<Piece> pieces_;
  std::vector<std::size_t> ends_;
};

}  // namespace hps
