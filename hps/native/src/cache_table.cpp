#include "hps/cache_table.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "hps/relaxed.hpp"

namespace hps {
namespace {

constexpr std::uint64_t kMagic = 0x65686361'63737068ULL;  // "hpscache"
constexpr std::uint32_t kLayout = 3;
constexpr std::uint64_t kBackedBytes = 2 << 20;  // of rows, at a time: .5 ms

// The number of rows that a victim is chosen from, in some eight consecutive buckets. The hand
// continues behind them, so all rows are sampled equally often. (With a fixed number of buckets
// instead, a bucket loses rows at the same rate however few it holds; some stretches of buckets
// become nearly empty by chance, and only hot rows remain to choose from there.)
constexpr unsigned kSample = 19;
constexpr std::uint64_t kSampleBuckets = 8;

struct Plan {
  std::uint64_t buckets, buckets_at, versions_at, rows_at, bytes;
};

bool grows(const MemoryKind& kind) { return kind.on_demand && kind.file >= 0; }

constexpr std::uint64_t aligned(std::uint64_t offset) { return (offset + 63) / 64 * 64; }

Plan plan(std::uint64_t capacity, std::size_t row_bytes) {
  if (capacity == 0 || capacity >= kNoRow)
    throw std::invalid_argument("a cache has 1 to 2^32 - 2 rows");
  if (row_bytes == 0 || row_bytes > (1ULL << 24))
    throw std::invalid_argument("a row has 1 to 2^24 bytes");
  Plan made{};
  made.buckets = (capacity * 100 + kSlots * kLoadPercent - 1) / (kSlots * kLoadPercent);
  made.buckets_at = aligned(sizeof(Header));
  made.versions_at = made.buckets_at + made.buckets * sizeof(Bucket);
  made.rows_at = aligned(made.versions_at + capacity * sizeof(std::uint64_t));
  made.bytes = made.rows_at + capacity * row_bytes;
  return made;
}

}  // namespace

std::uint64_t CacheTable::bytes_for(std::uint64_t capacity, std::size_t row_bytes) {
  return plan(capacity, row_bytes).bytes;
}

CacheTable::CacheTable(std::uint64_t capacity, std::size_t row_bytes, Eviction eviction,
                       const ReadKernels& read, const MemoryKind& kind)
    : memory_(bytes_for(capacity, row_bytes),
              grows(kind) ? plan(capacity, row_bytes).versions_at : bytes_for(capacity, row_bytes),
              kind),
      read_(read) {
  const Plan made = plan(capacity, row_bytes);
  auto* header = reinterpret_cast<Header*>(memory_.data());
  header->layout = kLayout;
  header->eviction = eviction;
  header->capacity = capacity;
  header->buckets = made.buckets;
  header->row_bytes = row_bytes;
  header->buckets_at = made.buckets_at;
  header->versions_at = made.versions_at;
  header->rows_at = made.rows_at;
  header->bytes = made.bytes;
  header->free_row = kNoRow;
  header->backed_rows = grows(kind) ? 0 : capacity;
  store_release(header->magic, kMagic);
  map_view();
}

CacheTable::CacheTable(std::size_t row_bytes, const ReadKernels& read, int file)
    : memory_(file, sizeof(Header)), read_(read) {
  const auto* header = reinterpret_cast<const Header*>(memory_.data());
  if (load_acquire(header->magic) != kMagic || header->layout != kLayout)
    throw std::invalid_argument("the file holds no cache table of this version of hps");
  const Plan made = plan(header->capacity, header->row_bytes);
  if (header->row_bytes != row_bytes)
    throw std::invalid_argument("the table has rows of " + std::to_string(header->row_bytes) +
                                " bytes, not " + std::to_string(row_bytes));
  if (memory_.bytes() < made.bytes || header->bytes != made.bytes ||
      header->buckets != made.buckets || header->buckets_at != made.buckets_at ||
      header->versions_at != made.versions_at || header->rows_at != made.rows_at ||
      header->backed_rows > header->capacity)
    throw std::invalid_argument("the table's header contradicts itself or its file's length");
  map_view();
}

void CacheTable::map_view() {
  auto* header = reinterpret_cast<Header*>(memory_.data());
  std::uint8_t* base = memory_.data();
  view_ = {header,
           reinterpret_cast<Bucket*>(base + header->buckets_at),
           reinterpret_cast<std::uint64_t*>(base + header->versions_at),
           base + header->rows_at,
           header->buckets,
           header->row_bytes};
}

std::uint64_t CacheTable::bytes() const {
  const Header& h = *view_.header;
  const std::uint64_t missing = h.capacity - load(h.backed_rows);
  return h.bytes - missing * (h.row_bytes + sizeof(std::uint64_t));
}

CacheCounts CacheTable::counts() const {
  const Header& h = *view_.header;
  const std::uint64_t held = load(h.held);
  return {held & UINT32_MAX, held >> 32, load(h.evictions)};
}

bool CacheTable::find(std::int64_t key, Slot& at) const {
  const std::uint64_t home_bucket = home(key);
  for (unsigned steps = reach(load(view_.buckets[home_bucket].word)) | 1; steps != 0;
       steps &= steps - 1) {
    at.bucket =
        bucket_at(view_.n_buckets, home_bucket, static_cast<unsigned>(__builtin_ctz(steps)));
    const Bucket& target = bucket(at);
    for (unsigned slots = occupied(load(target.word)); slots != 0; slots &= slots - 1) {
      at.slot = static_cast<unsigned>(__builtin_ctz(slots));
      if (load(target.keys[at.slot]) == key) return true;
    }
  }
  return false;
}

// -- writing ------------------------------------------------------------------------------------

void CacheTable::write(const CacheWrite& write) {
  constexpr std::size_t kAhead = 8;
  const std::lock_guard<std::mutex> lock(writer_);
  for (std::size_t i = 0; i < write.n; ++i) {
    if (i + kAhead < write.n) __builtin_prefetch(view_.buckets + home(write.keys[i + kAhead]));
    write_one(write, i);
  }
}

void CacheTable::write_one(const CacheWrite& write, std::size_t i) {
  const std::int64_t key = write.keys[i];
  const std::uint64_t version = write.versions[i];
  const std::uint8_t* row = write.rows == nullptr ? nullptr : write.rows + i * view_.row_bytes;
  Slot at{0, 0};
  if (!find(key, at)) {
    if (!write.resident_only) admit(key, version, row);
    return;
  }
  Bucket& target = bucket(at);
  const std::uint64_t held = load(view_.versions[load(target.rows[at.slot])]);
  const bool expired = is_tombstone(load(target.word), at.slot) && held < write.oldest_tombstone;
  if (expired ? write.resident_only : version < held) return;
  replace(at, version, row);
  if (row != nullptr && !write.resident_only && view_.header->eviction == Eviction::kLru)
    store(target.scores[at.slot], load(view_.header->clock));
}

// Replaces the row under the same key; readers of it retry meanwhile.
void CacheTable::replace(Slot at, std::uint64_t version, const std::uint8_t* row) {
  Bucket& target = bucket(at);
  std::uint64_t word = load(target.word);
  const RowKind before = kind_at(word, at.slot);
  begin_change(at, load(target.rows[at.slot]), before);
  word = ((word & ~readable_bit(at.slot)) | busy_bit(at.slot)) + kNextSequence;
  store(target.word, word);
  release_fence();
  write_row(load(target.rows[at.slot]), version, row);
  word &= ~busy_bit(at.slot);
  if (row != nullptr) word |= readable_bit(at.slot);
  store_release(target.word, word + kNextSequence);
  end_change(before, row != nullptr ? RowKind::kRow : RowKind::kTombstone);
}

void CacheTable::admit(std::int64_t key, std::uint64_t version, const std::uint8_t* row) {
  if (row != nullptr) tick();
  const std::uint64_t home_bucket = home(key);
  Slot at{0, 0};
  unsigned step = 0;
  // A tombstone that needs an eviction evicts an earlier tombstone near its home, if there is one:
  // so a flood of deletions evicts few rows.
  const bool evict_near_home =
      !find_free_slot(home_bucket, at, step) || (row == nullptr && !has_free_row());
  RowKind before = RowKind::kNone;
  std::uint32_t number = evict_near_home ? evict_coldest_near(home_bucket, before) : kNoRow;
  if (number == kNoRow) number = allocate_row(before);
  find_free_slot(home_bucket, at, step);  // again, because a slot may have become free
  store(view_.header->pending_slot, at.bucket * kSlots + at.slot + 1);
  compiler_fence();
  // No reader reads a slot that is not occupied, so the order of these stores is free.
  Bucket& target = bucket(at);
  write_row(number, version, row);
  store(target.keys[at.slot], key);
  store(target.rows[at.slot], number);
  store(target.scores[at.slot], initial_score(row == nullptr));
  if (step != 0) {
    std::uint64_t& word = view_.buckets[home_bucket].word;
    store(word, load(word) | reach_bit(step));
  }
  std::uint64_t word = load(target.word) | occupied_bit(at.slot);
  if (row != nullptr) word |= readable_bit(at.slot);
  store_release(target.word, word + kNextSequence);
  end_change(before, row != nullptr ? RowKind::kRow : RowKind::kTombstone);
}

// The first free slot of the probe sequence.
bool CacheTable::find_free_slot(std::uint64_t home, Slot& at, unsigned& step) const {
  const std::uint64_t steps = std::min<std::uint64_t>(kSteps, view_.n_buckets);
  for (step = 0; step < steps; ++step) {
    at.bucket = bucket_at(view_.n_buckets, home, step);
    const unsigned free = ~occupied(load(bucket(at).word)) & kAllSlots;
    if (free == 0) continue;
    at.slot = static_cast<unsigned>(__builtin_ctz(free));
    return true;
  }
  return false;
}

bool CacheTable::has_free_row() const {
  const Header& header = *view_.header;
  const std::uint64_t rows = is_out_of_memory_ ? header.backed_rows : header.capacity;
  return header.free_row != kNoRow || header.fresh_row < rows;
}

// Allocates memory for some rows behind those that have it; returns false if there are none, or no
// memory.
bool CacheTable::back_more_rows() {
  Header& header = *view_.header;
  const std::uint64_t first = header.backed_rows, row_bytes = header.row_bytes;
  if (is_out_of_memory_ || first == header.capacity) return false;
  const std::uint64_t n = std::max<std::uint64_t>(1, kBackedBytes / row_bytes);
  const std::uint64_t end = std::min(first + n, header.capacity);
  const std::uint64_t versions = header.versions_at, version_bytes = sizeof(std::uint64_t);
  is_out_of_memory_ =
      memory_.back(versions + first * version_bytes, versions + end * version_bytes) != 0 ||
      memory_.back(header.rows_at + first * row_bytes, header.rows_at + end * row_bytes) != 0;
  if (!is_out_of_memory_) store(header.backed_rows, end);
  return !is_out_of_memory_;
}

// A free row; if there is none, the row of the coldest slot of a sample, which is evicted. `before`
// is what that slot held.
std::uint32_t CacheTable::allocate_row(RowKind& before) {
  Header& header = *view_.header;
  if (const std::uint32_t row = header.free_row; row != kNoRow) {
    begin_change(Slot{0, 0}, row, RowKind::kNone);
    store(header.free_row, static_cast<std::uint32_t>(load(view_.versions[row])));
    return row;
  }
  if (header.fresh_row < header.backed_rows || back_more_rows()) {
    begin_change(Slot{0, 0}, header.fresh_row, RowKind::kNone);
    store(header.fresh_row, header.fresh_row + 1);
    return header.fresh_row - 1;
  }
  return evict_coldest(before);
}

// Advances the hand until kSample rows or all buckets were sampled. The table is full.
std::uint32_t CacheTable::evict_coldest(RowKind& before) {
  Header& header = *view_.header;
  Slot coldest{0, 0};
  int worst = -1;
  unsigned seen = 0;
  for (std::uint64_t i = 0; i < view_.n_buckets && seen < kSample; ++i) {
    seen += find_coldest(header.hand, coldest, worst);
    header.hand = header.hand + 1 < view_.n_buckets ? header.hand + 1 : 0;
  }
  for (std::uint64_t i = 0; i < kSampleBuckets; ++i)
    __builtin_prefetch(view_.buckets + header.hand + i);  // for the next call
  return evict_slot(coldest, before);
}

// Evicts the coldest slot of the probe sequence; kNoRow if all its slots are free.
std::uint32_t CacheTable::evict_coldest_near(std::uint64_t home, RowKind& before) {
  const std::uint64_t steps = std::min<std::uint64_t>(kSteps, view_.n_buckets);
  Slot coldest{0, 0};
  int worst = -1;
  for (unsigned step = 0; step < steps; ++step)
    find_coldest(bucket_at(view_.n_buckets, home, step), coldest, worst);
  return worst < 0 ? kNoRow : evict_slot(coldest, before);
}

// Updates `coldest` and `worst`; of equally cold slots the first wins. Returns the occupied slots.
unsigned CacheTable::find_coldest(std::uint64_t number, Slot& coldest, int& worst) const {
  const std::uint64_t word = load(view_.buckets[number].word);
  for (unsigned slots = occupied(word); slots != 0; slots &= slots - 1) {
    const Slot at{number, static_cast<unsigned>(__builtin_ctz(slots))};
    const int cold = static_cast<int>(coldness(at, word));
    if (cold <= worst) continue;
    worst = cold;
    coldest = at;
  }
  return static_cast<unsigned>(__builtin_popcount(occupied(word)));
}

std::uint32_t CacheTable::evict_slot(Slot at, RowKind& before) {
  Header& header = *view_.header;
  before = kind_at(load(bucket(at).word), at.slot);
  if (before == RowKind::kRow) store(header.evictions, header.evictions + 1);
  begin_change(at, load(bucket(at).rows[at.slot]), before);
  return clear_slot(at);
}

// Takes a slot out of use. Afterwards the slot and its row, whose number is returned, may be
// written.
std::uint32_t CacheTable::clear_slot(Slot at) {
  Bucket& target = bucket(at);
  const std::uint64_t word = load(target.word), home_bucket = home(load(target.keys[at.slot]));
  const std::uint64_t word_left =
      word & ~(occupied_bit(at.slot) | readable_bit(at.slot) | busy_bit(at.slot));
  store(target.word, word_left + kNextSequence);
  release_fence();
  bool still_reached = home_bucket == at.bucket;
  for (unsigned slots = occupied(word_left); slots != 0 && !still_reached; slots &= slots - 1)
    still_reached = home(load(target.keys[__builtin_ctz(slots)])) == home_bucket;
  if (!still_reached) {
    std::uint64_t& home_word = view_.buckets[home_bucket].word;
    unsigned step = 1;
    while (bucket_at(view_.n_buckets, home_bucket, step) != at.bucket) ++step;
    store(home_word, load(home_word) & ~reach_bit(step));
  }
  return load(target.rows[at.slot]);
}

void CacheTable::evict(const std::int64_t* keys, std::size_t n) {
  const std::lock_guard<std::mutex> lock(writer_);
  Slot at{0, 0};
  for (std::size_t i = 0; i < n; ++i) {
    if (find(keys[i], at)) free_slot(at);
  }
}

std::size_t CacheTable::expire(std::uint64_t oldest, std::uint64_t first, std::uint64_t n) {
  const std::lock_guard<std::mutex> lock(writer_);
  std::size_t expired = 0;
  const std::uint64_t end = first + std::min(n, view_.n_buckets - std::min(first, view_.n_buckets));
  for (std::uint64_t number = first; number < end; ++number) {
    const Bucket& target = view_.buckets[number];
    for (unsigned slots = readable(load(target.word)); slots != 0; slots &= slots - 1) {
      const Slot at{number, static_cast<unsigned>(__builtin_ctz(slots))};
      if (load(view_.versions[load(target.rows[at.slot])]) >= oldest) continue;
      free_slot(at);
      ++expired;
    }
  }
  return expired;
}

// Takes an occupied slot out of use and releases its row.
void CacheTable::free_slot(Slot at) {
  const RowKind before = kind_at(load(bucket(at).word), at.slot);
  begin_change(at, load(bucket(at).rows[at.slot]), before);
  release_row(clear_slot(at));
  end_change(before, RowKind::kNone);
}

void CacheTable::release_row(std::uint32_t row) {
  store(view_.versions[row], std::uint64_t{view_.header->free_row});
  compiler_fence();
  store(view_.header->free_row, row);
}

void CacheTable::write_row(std::uint32_t number, std::uint64_t version, const std::uint8_t* row) {
  store(view_.versions[number], version);
  if (row != nullptr) copy_to_shared(view_.rows + number * view_.row_bytes, row, view_.row_bytes);
}

}  // namespace hps
