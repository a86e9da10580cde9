#include "hps/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <stdexcept>
#include <string>

namespace hps {
namespace {

constexpr std::size_t kHugePage = 2 << 20;
constexpr long kFaultsOfSmallPages = 64;  // of kHugePage bytes; a huge page takes one
constexpr int kMpolBind = 2;              // MPOL_BIND of <numaif.h>, a header of libnuma
constexpr unsigned long kNodes = 1024;

std::uintptr_t round_up_to_huge_page(std::uintptr_t at) {
  return (at + kHugePage - 1) / kHugePage * kHugePage;
}

std::string reason() { return std::strerror(errno); }

int duplicate(int file) {
  const int made = fcntl(file, F_DUPFD_CLOEXEC, 0);
  if (made < 0) throw std::runtime_error("the table's file cannot be kept open: " + reason());
  return made;
}

// The active option of a kernel setting, which the kernel shows in brackets; empty: no such file.
std::string active_option(const std::string& setting) {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/" + setting);
  for (std::string word; file >> word;)
    if (word.front() == '[') return word.substr(1, word.size() - 2);
  return "";
}

void require_transparent_pages() {
  const std::string active = active_option("enabled");
  if (active == "never" || active.empty())
    throw std::runtime_error(
        "transparent huge pages are disabled: " +
        std::string("/sys/kernel/mm/transparent_hugepage/enabled is ") +
        (active.empty() ? "missing" : active + "; set it to advise or always"));
}

// File systems have a separate setting for huge pages; smaps shows which pages were mapped.
void require_transparent_mapping(const volatile std::uint8_t* at) {
  static_cast<void>(*at);  // maps the page
  char begin[20];
  std::snprintf(begin, sizeof begin, "%lx-", reinterpret_cast<unsigned long>(at));
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  while (std::getline(maps, line) && line.rfind(begin, 0) != 0) {
  }
  while (std::getline(maps, line) && line.rfind("VmFlags:", 0) != 0)
    if (line.find("PmdMapped:") != std::string::npos &&
        line.find_first_of("123456789") != std::string::npos)
      return;
  throw std::runtime_error(
      "the file system of the shared table has no transparent huge pages; mount it with "
      "huge=advise (mount -o remount,huge=advise /dev/shm)");
}

}  // namespace

Memory::Memory(std::size_t bytes, std::size_t backed, const MemoryKind& kind) : bytes_(bytes) {
  if (bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
  if (kind.pages == Pages::kTransparent && kind.file < 0) require_transparent_pages();
  try {
    kind.file < 0 ? map_private(kind) : map_file(backed, kind);
  } catch (...) {
    if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
    if (file_ >= 0) close(file_);
    throw;
  }
}

void Memory::map_private(const MemoryKind& kind) {
  const bool reserved = kind.pages == Pages::kReserved;
  const bool large = reserved || (bytes_ >= kHugePage && kind.pages != Pages::kSmall);
  const std::size_t wanted =
      reserved ? round_up_to_huge_page(bytes_) : bytes_ + (large ? kHugePage : 0);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_HUGETLB
  if (reserved) flags |= MAP_HUGETLB;
#endif
  void* at = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (at == MAP_FAILED && reserved)
    throw std::runtime_error("too few reserved huge pages (" + reason() +
                             "): " + std::to_string(wanted / kHugePage) +
                             " of 2 MiB are needed; raise vm.nr_hugepages");
  if (at == MAP_FAILED) throw std::bad_alloc();
  mapped_ = at;
  mapped_bytes_ = wanted;
  data_ = static_cast<std::uint8_t*>(at);
  if (large && !reserved) {
    data_ = reinterpret_cast<std::uint8_t*>(
        round_up_to_huge_page(reinterpret_cast<std::uintptr_t>(at)));
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes_, MADV_HUGEPAGE);  // a hint: a failure is harmless
#endif
  }
  bind(kind.numa_node);
}

void Memory::map_file(std::size_t backed, const MemoryKind& kind) {
  file_ = duplicate(kind.file);
  if (ftruncate(kind.file, static_cast<off_t>(bytes_)) != 0)
    throw std::runtime_error("the table's file cannot be extended: " + reason());
  void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, kind.file, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  mapped_ = at;
  mapped_bytes_ = bytes_;
  data_ = static_cast<std::uint8_t*>(at);
  bind(kind.numa_node);
#ifdef MADV_HUGEPAGE
  huge_pages_ = kind.pages != Pages::kSmall && madvise(at, bytes_, MADV_HUGEPAGE) == 0;
#endif
  const int error = back(0, backed);
  if (error == ENOSPC || error == ENOMEM || error == EFBIG) throw std::bad_alloc();
  if (error != 0)
    throw std::runtime_error(std::string("the table's file cannot be allocated: ") +
                             std::strerror(error));
  if (kind.pages == Pages::kTransparent && backed >= kHugePage) require_transparent_mapping(data_);
}

int Memory::back(std::size_t begin, std::size_t end) {
  if (file_ < 0 || begin >= end) return 0;
  if (huge_pages_) populate_huge_pages(begin, end);
  int error;
  do error = posix_fallocate(file_, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  while (error == EINTR);
  return error;
}

// Does nothing where the file system has none: posix_fallocate takes a third of the time.
void Memory::populate_huge_pages(std::size_t begin, std::size_t end) {
#ifdef MADV_POPULATE_WRITE
  const auto faults = [] {
    rusage used{};
    getrusage(RUSAGE_THREAD, &used);
    return used.ru_minflt;
  };
  const long before = faults();
  begin = begin / kHugePage * kHugePage;
  if (end - begin < kHugePage || madvise(data_ + begin, kHugePage, MADV_POPULATE_WRITE) != 0)
    return;
  if (faults() - before < kFaultsOfSmallPages)
    madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE);
#else
  static_cast<void>(begin), static_cast<void>(end);
#endif
}

void Memory::bind(int numa_node) {
  if (numa_node < 0) return;
  unsigned long nodes[kNodes / (8 * sizeof(unsigned long))] = {};
  const auto node = static_cast<unsigned long>(numa_node);
  long error = -1;
  errno = EINVAL;
#ifdef SYS_mbind
  if (node < kNodes) {
    nodes[node / (8 * sizeof *nodes)] |= 1UL << node % (8 * sizeof *nodes);
    error = syscall(SYS_mbind, mapped_, mapped_bytes_, kMpolBind, nodes, kNodes + 1, 0);
  }
#endif
  if (error != 0)
    throw std::runtime_error("cannot bind memory to NUMA node " + std::to_string(numa_node) + " (" +
                             reason() + "); /sys/devices/system/node lists the nodes");
}

Memory::Memory(int file, std::size_t min_bytes) : bytes_(0) {
  struct stat status{};
  if (fstat(file, &status) != 0 || static_cast<std::size_t>(status.st_size) < min_bytes)
    throw std::invalid_argument("the file is too short for a table");
  bytes_ = mapped_bytes_ = static_cast<std::size_t>(status.st_size);
  void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  mapped_ = at;
  data_ = static_cast<std::uint8_t*>(at);
  try {
    file_ = duplicate(file);
  } catch (...) {
    munmap(mapped_, mapped_bytes_);
    throw;
  }
}

Memory::~Memory() {
  munmap(mapped_, mapped_bytes_);
  if (file_ >= 0) close(file_);
}

}  // namespace hps
