// The memory block of a cache table.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps {

// Rows are read at random, and with pages of 4 KiB each read costs a page table walk. kTry: huge
// pages if the system gives them; kTransparent, kReserved: transparent ones, or those reserved by
// vm.nr_hugepages, or an error; kSmall: none.
enum class Pages : std::uint8_t { kTry, kTransparent, kReserved, kSmall };

struct MemoryKind {
  int file = -1;  // descriptor, extended to the block's length; -1: private to the process
  Pages pages = Pages::kTry;
  int numa_node = -1;  // binds the block to this node; -1: the system chooses
  // With a file: pages behind the first ones are allocated by `back`, when they are needed.
  bool on_demand = false;
};

class Memory {
 public:
  // Allocates zeroed memory. With a file, all pages up to byte `backed` are allocated now, so that
  // later accesses cannot fail. Throws std::bad_alloc if memory is exhausted, std::runtime_error
  // with the reason if the system refuses the pages or the node of `kind`.
  Memory(std::size_t bytes, std::size_t backed, const MemoryKind& kind);
  // Maps all of `file`. Throws std::invalid_argument if it is shorter than `min_bytes`.
  Memory(int file, std::size_t min_bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Allocates the pages from byte `begin` to `end` of a file. Returns 0 or an error number.
  int back(std::size_t begin, std::size_t end);

  std::uint8_t* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void map_private(const MemoryKind& kind);
  void map_file(std::size_t backed, const MemoryKind& kind);
  void populate_huge_pages(std::size_t begin, std::size_t end);
  void bind(int numa_node);

  void* mapped_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  std::uint8_t* data_ = nullptr;
  std::size_t bytes_;
  int file_ = -1;  // a duplicate
  bool huge_pages_ = false;
};

}  // namespace hps
