#include "hps/mapped_table.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <new>
#include <numeric>

namespace hps {
namespace {

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

MappedTable::MappedTable(int file, const MappedSections& sections, std::vector<IndexPart> parts,
                         std::size_t row_bytes, std::uint64_t* overridden,
                         const MappedKernels& read)
    : bytes_(sections.bytes), parts_(std::move(parts)), overridden_(overridden), read_(read) {
  void* at = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::uint8_t*>(at);
  // A record that is not in memory costs one read of a page, not of those around it.
  madvise(at, sections.pilots, MADV_RANDOM);
  view_ = {
      data_ + sections.records,
      sections.record_bytes,
      row_bytes,
      sections.rows,
      {parts_.data(), data_ + sections.pilots,
       reinterpret_cast<const std::uint32_t*>(data_ + sections.remap), sections.seed,
       static_cast<std::uint32_t>(parts_.size()), static_cast<std::uint32_t>(sections.n_buckets)},
      overridden};
  try {
    guard_.emplace(data_, bytes_, damaged_);
  } catch (...) {
    munmap(data_, bytes_);
    throw;
  }
}

MappedTable::~MappedTable() {
  munmap(data_, bytes_);
  guard_.reset();
}

std::size_t MappedTable::gather_known(const std::int64_t* keys, std::size_t n, std::uint8_t* out,
                                      std::uint32_t* left) const {
  const std::size_t unanswered = read_.gather(view_, keys, n, out, left);
  if (!is_damaged()) return unanswered;
  std::iota(left, left + n, 0U);
  return n;
}

std::size_t MappedTable::gather_each(const std::int64_t* keys, const std::uint32_t* places,
                                     std::size_t n, const EachOutput& output) const {
  const std::size_t unanswered = read_.gather_each(view_, keys, places, n, output);
  if (!is_damaged()) return unanswered;
  for (std::size_t i = 0; i < n; ++i) output.sources[places[i]] = output.absent;
  return n;
}

std::size_t MappedTable::pool(const PoolRequest& request, std::int64_t* left) const {
  const std::size_t unanswered = read_.pool(view_, request, left);
  if (!is_damaged()) return unanswered;
  std::size_t n = 0;
  for (std::int64_t at = request.begin_of(request.first); at < request.begin_of(request.last); ++at)
    left[n++] = at;
  return n;
}

std::size_t MappedTable::override_keys(const std::int64_t* keys, std::size_t n) {
  std::unique_ptr<std::int64_t[]> positions(new std::int64_t[n]);
  read_.find(view_, keys, n, positions.get());
  std::size_t absent = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (positions[i] < 0) {
      ++absent;
      continue;
    }
    const auto at = static_cast<std::uint64_t>(positions[i]);
    const std::uint64_t bit = 1ULL << at % 64;
    const std::uint64_t before =
        __atomic_fetch_or(overridden_ + 1 + at / 64, bit, __ATOMIC_SEQ_CST);
    if ((before & bit) == 0) __atomic_fetch_add(overridden_, 1, __ATOMIC_SEQ_CST);
  }
  return absent;
}

void MappedTable::clear_overrides() {
  for (std::size_t i = 1; i < bitmap_words(view_.rows); ++i) {
    const std::uint64_t before = __atomic_exchange_n(overridden_ + i, 0, __ATOMIC_SEQ_CST);
    if (before != 0)
      __atomic_fetch_sub(overridden_, static_cast<std::uint64_t>(__builtin_popcountll(before)),
                         __ATOMIC_SEQ_CST);
  }
}

std::uint64_t MappedTable::n_overridden() const {
  return overridden_ == nullptr ? 0 : __atomic_load_n(overridden_, __ATOMIC_ACQUIRE);
}

std::size_t MappedTable::populate(const std::int64_t* positions, std::size_t n) const {
  const std::size_t page = page_bytes();
  const auto first = static_cast<std::size_t>(view_.records - data_);
  std::vector<std::size_t> pages;
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t begin = first + static_cast<std::size_t>(positions[i]) * view_.record_bytes;
    for (std::size_t at = begin / page; at <= (begin + view_.record_bytes - 1) / page; ++at)
      pages.push_back(at);
  }
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  pages.erase(std::remove_if(pages.begin(), pages.end(),
                             [&](std::size_t at) {
                               unsigned char in_memory = 0;
                               return mincore(data_ + at * page, page, &in_memory) == 0 &&
                                      (in_memory & 1) != 0;
                             }),
              pages.end());
  // Asks for every page first, so that the disk has them all to choose from, then waits.
  for (const std::size_t at : pages) madvise(data_ + at * page, page, MADV_WILLNEED);
  for (const std::size_t at : pages)
    static_cast<void>(*static_cast<volatile std::uint8_t*>(data_ + at * page));
  return pages.size();
}

void MappedTable::load(std::uint64_t begin, std::uint64_t end) const {
  const std::size_t page = page_bytes();
  begin = begin / page * page;
  end = std::min<std::uint64_t>(end, bytes_);
  if (begin >= end) return;
  // From now on the range is read ahead, into huge pages where the file system has them.
  madvise(data_ + begin, end - begin, MADV_NORMAL);
#ifdef MADV_HUGEPAGE
  madvise(data_ + begin, end - begin, MADV_HUGEPAGE);
#endif
  madvise(data_ + begin, end - begin, MADV_WILLNEED);
#ifdef MADV_POPULATE_READ
  if (madvise(data_ + begin, end - begin, MADV_POPULATE_READ) == 0) return;
#endif
  for (std::uint64_t at = begin; at < end; at += page)
    static_cast<void>(*static_cast<volatile std::uint8_t*>(data_ + at));
}

bool MappedTable::is_resident(const std::int64_t* positions, std::size_t n) const {
  const std::size_t page = page_bytes(), first = static_cast<std::size_t>(view_.records - data_);
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t at = first + static_cast<std::size_t>(positions[i]) * view_.record_bytes;
    unsigned char in_memory = 1;
    if (mincore(data_ + at / page * page, 1, &in_memory) == 0 && (in_memory & 1) == 0) return false;
  }
  return true;
}

double MappedTable::resident(std::uint64_t begin, std::uint64_t end) const {
  const std::size_t page = page_bytes();
  begin = begin / page * page;
  end = std::min<std::uint64_t>(end, bytes_);
  if (begin >= end) return 1;
  std::vector<unsigned char> in_memory((end - begin + page - 1) / page);
  if (mincore(data_ + begin, end - begin, in_memory.data()) != 0) return 0;
  const auto count = std::count_if(in_memory.begin(), in_memory.end(),
                                   [](unsigned char each) { return (each & 1) != 0; });
  return static_cast<double>(count) / static_cast<double>(in_memory.size());
}

}  // namespace hps
