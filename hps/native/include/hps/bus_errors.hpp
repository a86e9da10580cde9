// Page faults that the disk or the file cannot serve. The system sends SIGBUS for a page of a
// mapped file that lies behind the file's end or cannot be read, which by default ends the process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hps {

// Guards a read-only mapping for its lifetime: a page that cannot be read is replaced by zeros, and
// `damaged` is set. The handler passes any other SIGBUS to the one that was installed before it.
class BusErrorGuard {
 public:
  // Installs the handler if it is not the current one. Throws std::runtime_error if more than
  // 65,536 mappings are guarded.
  BusErrorGuard(const std::uint8_t* begin, std::size_t bytes, std::atomic<bool>& damaged);
  ~BusErrorGuard();
  BusErrorGuard(const BusErrorGuard&) = delete;
  BusErrorGuard& operator=(const BusErrorGuard&) = delete;

 private:
  std::size_t entry_;
};

}  // namespace hps
