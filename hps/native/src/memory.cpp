#include "hps/memory.hpp"

#include <sys/mman.h>

#include <new>

namespace hps {
namespace {

constexpr std::size_t kHugePage = 2 << 20;

}  // namespace

Memory::Memory(std::size_t bytes) {
  if (bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
  const bool large = bytes >= kHugePage;
  mapped_bytes_ = bytes + (large ? kHugePage : 0);
  mapped_ =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) throw std::bad_alloc();
  auto at = reinterpret_cast<std::uintptr_t>(mapped_);
  if (large) {
    at = (at + kHugePage - 1) / kHugePage * kHugePage;
#ifdef MADV_HUGEPAGE
    madvise(reinterpret_cast<void*>(at), bytes, MADV_HUGEPAGE);  // advice: no harm in a refusal
#endif
  }
  data_ = reinterpret_cast<std::uint8_t*>(at);
}

Memory::~Memory() { munmap(mapped_, mapped_bytes_); }

}  // namespace hps
