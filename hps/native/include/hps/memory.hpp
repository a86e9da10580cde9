// The block of memory a table lies in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// Rows are read at random, and a page of 4 KiB costs a walk through the page tables for every one.
// kTry: huge pages where the system gives them; kTransparent, kReserved: transparent ones, or those
// set aside by vm.nr_hugepages, or an error; kSmall: none.
enum class Pages : std::uint8_t { kTry, kTransparent, kReserved, kSmall };

struct MemoryKind {
  int file = -1;  // the block's file, which is made as long as it; -1: private to the process
  Pages pages = Pages::kTry;
  int numa_node = -1;  // all of it on this node's memory; -1: where the system puts it
};

class Memory {
 public:
  // Zeroed, with all its pages there if it has a file, so that no use of it can fail for want of
  // memory. Throws std::bad_alloc when there is too little, std::runtime_error, saying why, when
  // the system refuses what `kind` wants.
  Memory(std::size_t bytes, const MemoryKind& kind);
  // As it lies in `file`. Throws std::invalid_argument when that is shorter than `at_least`.
  Memory(int file, std::size_t at_least);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::uint8_t* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void map_private(const MemoryKind& kind);
  void map_file(const MemoryKind& kind);
  void bind(int numa_node);

  void* mapped_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  std::uint8_t* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace hps
