// A block of zeroed memory for a table.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// Private to the process, at the start of a huge page and made of huge pages where the system has
// them: rows are read at random, and a page of 4 KiB would cost a walk through the page tables for
// every one. Throws std::bad_alloc.
class Memory {
 public:
  explicit Memory(std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::uint8_t* data() const { return data_; }

 private:
  void* mapped_;
  std::size_t mapped_bytes_;
  std::uint8_t* data_;
};

}  // namespace hps
