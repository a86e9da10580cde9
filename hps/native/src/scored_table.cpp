#include "hps/scored_table.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "hps/cache_layout.hpp"
#include "hps/relaxed.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hps {
namespace {

constexpr unsigned kNoSlot = kWays;
constexpr unsigned kReadTries = 64, kSpins = 64;
constexpr std::size_t kGroup = 8;         // keys whose memory is prefetched together
constexpr std::size_t kPrefetched = 256;  // bytes of a row; the processor follows on its own
constexpr std::size_t kInlineRow = 1024;  // rows up to this size need no allocation per call
constexpr double kLoadWithSpills = 0.75;  // from here on many keys are outside their home half
constexpr std::uint64_t kLow = UINT32_MAX;

class Inside {
 public:
  explicit Inside(Gate& gate) : gate_(gate) { gate_.enter(); }
  ~Inside() { gate_.leave(); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Gate& gate_;
};

class Alone {
 public:
  explicit Alone(Gate& gate) : gate_(gate) { gate_.close(); }
  ~Alone() { gate_.open(); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  Gate& gate_;
};

class RowBuffer {
 public:
  explicit RowBuffer(std::size_t bytes)
      : large_(bytes > kInlineRow ? new std::uint8_t[bytes] : nullptr) {}
  std::uint8_t* data() { return large_ ? large_.get() : small_; }

 private:
  alignas(64) std::uint8_t small_[kInlineRow];
  const std::unique_ptr<std::uint8_t[]> large_;
};

void wait(unsigned tries) {
  if (tries < kSpins)
    cpu_relax();
  else
    sched_yield();
}

// Holds a bucket's lock. Unless something changed, readers do not notice it.
class Locked {
 public:
  explicit Locked(ScoredBucket& bucket) : bucket_(bucket) {
    for (unsigned tries = 0;; ++tries) {
      word_ = load(bucket.word);
      if ((word_ & 1) == 0 && __atomic_compare_exchange_n(&bucket.word, &word_, word_ + 1, true,
                                                          __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        break;
      wait(tries);
    }
    release_fence();
  }
  ~Locked() { store_release(bucket_.word, word_); }
  void changed() { word_ += 2; }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  ScoredBucket& bucket_;
  std::uint64_t word_;
};

constexpr std::uint64_t bit_of(unsigned slot) { return std::uint64_t{1} << slot % 64; }

bool is_occupied(const ScoredBucket& bucket, unsigned slot) {
  return (bucket.occupied[slot / 64] & bit_of(slot)) != 0;
}

// One bit per slot of 64 whose digest equals `digest`, occupied or not.
inline std::uint64_t match(const std::uint64_t* digests, std::uint8_t digest) {
  std::uint64_t found = 0;
#if defined(__SSE2__) && !defined(HPS_TSAN)
  const __m128i wanted = _mm_set1_epi8(static_cast<char>(digest));
  const auto* parts = reinterpret_cast<const __m128i*>(digests);
  for (unsigned i = 0; i < 4; ++i) {
    const __m128i equal = _mm_cmpeq_epi8(_mm_load_si128(parts + i), wanted);
    found |= static_cast<std::uint64_t>(_mm_movemask_epi8(equal)) << (16 * i);
  }
#else
  constexpr std::uint64_t kSeven = 0x7F7F7F7F7F7F7F7FULL;
  for (unsigned i = 0; i < 8; ++i) {
    const std::uint64_t differ = load(digests[i]) ^ 0x0101010101010101ULL * digest;
    const std::uint64_t equal =
        ~(((differ & kSeven) + kSeven) | differ | kSeven);  // bit 7 of bytes
    found |= ((equal >> 7) * 0x0102040810204080ULL >> 56) << (8 * i);
  }
#endif
  return found;
}

// The slots of a half that may have the digest's key.
inline std::uint64_t candidates(const ScoredBucket& bucket, unsigned half, std::uint8_t digest) {
  const std::uint64_t occupied = load(bucket.occupied[half]);
  return occupied == 0 ? 0 : occupied & match(bucket.digests + 8 * half, digest);
}

// Whether keys of home half `home` are in the other one.
inline bool has_spilled(const ScoredBucket& bucket, unsigned home) {
  return (load(bucket.spilled) >> home & 1) != 0;
}

inline unsigned search_half(const ScoredBucket& bucket, unsigned half, std::uint8_t digest,
                            std::int64_t key) {
  for (std::uint64_t left = candidates(bucket, half, digest); left != 0; left &= left - 1) {
    const unsigned slot = 64 * half + static_cast<unsigned>(__builtin_ctzll(left));
    if (load(bucket.keys[slot]) == key) return slot;
  }
  return kNoSlot;
}

inline unsigned search(const ScoredBucket& bucket, unsigned home, std::uint8_t digest,
                       std::int64_t key) {
  const unsigned slot = search_half(bucket, home, digest, key);
  if (slot != kNoSlot || !has_spilled(bucket, home)) return slot;
  return search_half(bucket, 1 - home, digest, key);
}

inline unsigned free_slot(const ScoredBucket& bucket, unsigned home) {
  for (const unsigned half : {home, 1 - home}) {
    const std::uint64_t free = ~load(bucket.occupied[half]);
    if (free != 0) return 64 * half + static_cast<unsigned>(__builtin_ctzll(free));
  }
  return kNoSlot;
}

// The first slot of the lowest score. Four minima at a time do not wait for one another.
unsigned lowest(const ScoredBucket& bucket) {
  std::uint64_t least[4] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
  for (unsigned slot = 0; slot < kWays; slot += 4)
    for (unsigned i = 0; i < 4; ++i) least[i] = std::min(least[i], bucket.scores[slot + i]);
  const std::uint64_t score = std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
  unsigned found = 0;
  while (bucket.scores[found] != score) ++found;
  return found;
}

void occupy(ScoredBucket& bucket, unsigned home, unsigned slot, std::uint8_t digest,
            std::int64_t key, std::uint64_t score) {
  if (slot / 64 != home) store(bucket.spilled, bucket.spilled | std::uint64_t{1} << home);
  store(reinterpret_cast<std::uint8_t*>(bucket.digests)[slot], digest);
  store(bucket.keys[slot], key);
  store(bucket.scores[slot], score);
  store(bucket.occupied[slot / 64], bucket.occupied[slot / 64] | bit_of(slot));
}

void vacate(ScoredBucket& bucket, unsigned slot) {
  store(bucket.occupied[slot / 64], bucket.occupied[slot / 64] & ~bit_of(slot));
}

std::uint64_t given(const ScoredBatch& batch, std::size_t i) {
  return batch.scores == nullptr ? 1 : batch.scores[i];
}

std::uint64_t initial_score(const ScoredBatch& batch, std::size_t i) {
  switch (batch.rule) {
    case ScoreRule::kAdd:
    case ScoreRule::kGiven:
      return given(batch, i);
    case ScoreRule::kEpochAdd:
      return batch.base | (given(batch, i) & kLow);
    default:
      return batch.base;
  }
}

std::uint64_t updated_score(const ScoredBatch& batch, std::size_t i, std::uint64_t former) {
  switch (batch.rule) {
    case ScoreRule::kKeep:
      return former;
    case ScoreRule::kAdd: {
      const std::uint64_t total = former + given(batch, i);
      return total < former ? UINT64_MAX : total;
    }
    case ScoreRule::kEpochAdd:
      return batch.base | std::min((former & kLow) + (given(batch, i) & kLow), kLow);
    default:
      return initial_score(batch, i);
  }
}

void evict(EvictedRows* to, std::int64_t key, std::uint64_t score, const std::uint8_t* row,
           std::size_t row_bytes) {
  if (to == nullptr) return;
  to->keys[to->n] = key;
  to->scores[to->n] = score;
  std::memcpy(to->rows + to->n * row_bytes, row, row_bytes);
  ++to->n;
}

template <bool Writes>
inline void prefetch(const void* at) {
  __builtin_prefetch(at, Writes ? 1 : 0);
}

}  // namespace

ScoredTable::ScoredTable(std::uint64_t buckets, std::uint64_t max_buckets, std::size_t row_bytes)
    : row_bytes_(row_bytes), base_(buckets), buckets_(buckets), max_buckets_(max_buckets) {
  if (buckets == 0 || buckets > max_buckets || max_buckets > kMostBuckets)
    throw std::invalid_argument("a table has 1 to 2^32 - 1 buckets");
  if (row_bytes == 0 || row_bytes > (1ULL << 24))
    throw std::invalid_argument("a row has 1 to 2^24 bytes");
  allocate(max_buckets);
}

std::uint64_t ScoredTable::bytes_for(std::uint64_t buckets, std::size_t row_bytes) {
  return buckets * (sizeof(ScoredBucket) + kWays * row_bytes);
}

void ScoredTable::allocate(std::uint64_t max_buckets) {
  const std::size_t of_rows = kWays * row_bytes_;
  if (max_buckets > SIZE_MAX / 2 / std::max(of_rows, sizeof(ScoredBucket))) throw std::bad_alloc();
  auto bucket_memory =
      std::make_shared<Memory>(max_buckets * sizeof(ScoredBucket), 0, MemoryKind{});
  auto row_memory = std::make_shared<Memory>(max_buckets * of_rows, 0, MemoryKind{});
  if (table_ != nullptr) {
    std::memcpy(bucket_memory->data(), bucket_memory_->data(), buckets() * sizeof(ScoredBucket));
    std::memcpy(row_memory->data(), row_memory_->data(), buckets() * of_rows);
  }
  bucket_memory_ = std::move(bucket_memory);
  row_memory_ = std::move(row_memory);
  table_ = reinterpret_cast<ScoredBucket*>(bucket_memory_->data());
  rows_ = row_memory_->data();
  allocated_ = max_buckets;
}

std::pair<std::shared_ptr<Memory>, std::uint64_t> ScoredTable::rows() const {
  const Inside inside(gate_);
  return {row_memory_, buckets() * kWays};
}

// -- the table as a whole --

void ScoredTable::clear() {
  const Alone alone(gate_);
  for (std::uint64_t b = 0; b < buckets(); ++b)
    table_[b].occupied[0] = table_[b].occupied[1] = table_[b].spilled = 0;
  size_.store(0, std::memory_order_relaxed);
}

void ScoredTable::set_max_buckets(std::uint64_t max_buckets) {
  const Alone alone(gate_);
  if (max_buckets < buckets() || max_buckets > kMostBuckets)
    throw std::invalid_argument("max_buckets must be at least buckets, and less than 2^32");
  if (max_buckets > allocated_) allocate(max_buckets);
  max_buckets_.store(max_buckets, std::memory_order_relaxed);
}

void ScoredTable::reserve(std::uint64_t wanted) {
  const Alone alone(gate_);
  std::uint64_t target = buckets();
  while (target < wanted) target *= 2;
  if (target > std::min(max_buckets(), base_ << kMostDoublings))
    throw std::invalid_argument("more buckets than max_buckets, or 2^24 times the first ones");
  while (buckets() < target) split();
}

void ScoredTable::split() {
  const std::uint64_t half = buckets();
  buckets_.store(2 * half, std::memory_order_relaxed);
  for (std::uint64_t b = 0; b < half; ++b) {
    ScoredBucket &from = table_[b], &to = table_[half + b];
    for (unsigned slot = 0; slot < kWays; ++slot) {
      if (!is_occupied(from, slot)) continue;
      const Probe probe = probe_of(from.keys[slot]);
      if (probe.bucket == &from) continue;
      const unsigned free = free_slot(to, probe.home);
      occupy(to, probe.home, free, probe.digest, from.keys[slot], from.scores[slot]);
      std::memcpy(row_at(probe.number + free), row_at(b * kWays + slot), row_bytes_);
      vacate(from, slot);
    }
  }
}

// -- reading --

ScoredTable::Probe ScoredTable::probe_of(std::int64_t key) const {
  const std::uint64_t x = mixed(key), home = ((x >> 32) * base_) >> 32;
  // Doublings add a segment of base_ buckets per value of the hash's low bits.
  std::uint64_t segments = buckets() / base_, b = home;
  if (segments > 1) b += (x & (segments - 1)) * base_;
  return {table_ + b, b * kWays, static_cast<unsigned>(x >> 31 & 1),
          static_cast<std::uint8_t>(x >> 23)};
}

template <bool Writes, typename Use>
void ScoredTable::for_each_key(const std::int64_t* keys, std::size_t n, bool with_scores,
                               bool with_rows, const Use& use) const {
  const std::size_t row_bytes = with_rows ? std::min(row_bytes_, kPrefetched) : 0;
  const bool both = size() > kLoadWithSpills * static_cast<double>(buckets() * kWays);
  Probe probes[2][kGroup];
  const auto begin = [&](std::size_t first) {
    Probe* group = probes[first / kGroup % 2];
    for (std::size_t i = first; i < std::min(n, first + kGroup); ++i) {
      const Probe& probe = group[i - first] = probe_of(keys[i]);
      prefetch<Writes>(&probe.bucket->word);
      prefetch<Writes>(probe.bucket->digests + 8 * probe.home);
      if (both) prefetch<Writes>(probe.bucket->digests + 8 * (1 - probe.home));
    }
  };
  begin(0);
  for (std::size_t first = 0; first < n; first += kGroup) {
    const Probe* group = probes[first / kGroup % 2];
    const std::size_t last = std::min(n, first + kGroup);
    for (std::size_t i = first; i < last; ++i) {
      const Probe& probe = group[i - first];
      const ScoredBucket& bucket = *probe.bucket;
      unsigned half = probe.home;
      std::uint64_t found = candidates(bucket, half, probe.digest);
      if (found == 0 && has_spilled(bucket, half))
        found = candidates(bucket, half = 1 - half, probe.digest);
      unsigned slot = kNoSlot;
      if (found != 0) {
        slot = 64 * half + static_cast<unsigned>(__builtin_ctzll(found));
      } else if (Writes) {
        slot = free_slot(bucket, probe.home);
        if (slot == kNoSlot)
          for (unsigned line = 0; line < kWays; line += 8) prefetch<true>(bucket.scores + line);
      }
      if (slot == kNoSlot) continue;
      prefetch<Writes>(bucket.keys + slot);
      if (with_scores) prefetch<Writes>(bucket.scores + slot);
      const std::uint8_t* row = row_at(probe.number + slot);
      for (std::size_t at = 0; at < row_bytes; at += 64) prefetch<Writes>(row + at);
    }
    if (last < n) begin(last);
    for (std::size_t i = first; i < last; ++i) use(i, group[i - first]);
  }
}

unsigned ScoredTable::read(const Probe& probe, std::int64_t key, std::uint8_t* row,
                           std::uint64_t* score) const {
  ScoredBucket& bucket = *probe.bucket;
  const auto copy = [&] {
    const unsigned slot = search(bucket, probe.home, probe.digest, key);
    if (slot == kNoSlot) return slot;
    if (row != nullptr) copy_from_shared(row, row_at(probe.number + slot), row_bytes_);
    if (score != nullptr) *score = load(bucket.scores[slot]);
    return slot;
  };
  for (unsigned tries = 0; tries < kReadTries; ++tries) {
    const std::uint64_t word = load_acquire(bucket.word);
    if ((word & 1) == 0) {
      const unsigned slot = copy();
      acquire_fence();
      if (load(bucket.word) == word) return slot;
    }
    cpu_relax();
  }
  const Locked locked(bucket);
  return copy();
}

void ScoredTable::find(const std::int64_t* keys, std::size_t n, std::uint8_t* rows,
                       std::uint64_t* scores, bool* found) const {
  const Inside inside(gate_);
  RowBuffer row(row_bytes_);
  for_each_key<false>(keys, n, scores != nullptr, rows != nullptr,
                      [&](std::size_t i, const Probe& probe) {
                        std::uint64_t score = 0;
                        found[i] = read(probe, keys[i], rows == nullptr ? nullptr : row.data(),
                                        scores == nullptr ? nullptr : &score) != kNoSlot;
                        if (!found[i]) return;
                        if (rows != nullptr)
                          std::memcpy(rows + i * row_bytes_, row.data(), row_bytes_);
                        if (scores != nullptr) scores[i] = score;
                      });
}

void ScoredTable::find_rows(const std::int64_t* keys, std::size_t n, std::int64_t* numbers) const {
  const Inside inside(gate_);
  for_each_key<false>(keys, n, false, false, [&](std::size_t i, const Probe& probe) {
    const unsigned slot = read(probe, keys[i], nullptr, nullptr);
    numbers[i] = slot == kNoSlot ? -1 : static_cast<std::int64_t>(probe.number + slot);
  });
}

std::size_t ScoredTable::export_slots(std::uint64_t first, std::uint64_t n, std::int64_t* keys,
                                      std::uint64_t* scores, std::uint8_t* rows) const {
  const Inside inside(gate_);
  const std::uint64_t slots = buckets() * kWays,
                      last = first + std::min(n, slots - std::min(first, slots));
  std::size_t count = 0;
  for (std::uint64_t number = first; number < last;) {
    ScoredBucket& bucket = table_[number / kWays];
    const std::uint64_t end = std::min(last, (number / kWays + 1) * kWays);
    const Locked locked(bucket);
    for (; number < end; ++number) {
      const unsigned slot = number % kWays;
      if (!is_occupied(bucket, slot)) continue;
      keys[count] = bucket.keys[slot];
      scores[count] = bucket.scores[slot];
      if (rows != nullptr) std::memcpy(rows + count * row_bytes_, row_at(number), row_bytes_);
      ++count;
    }
  }
  return count;
}

// -- writing --

void ScoredTable::change(const ScoredBatch& batch, std::size_t i, const Probe& probe, unsigned slot,
                         std::uint8_t* buffer) {
  std::uint8_t* row = row_at(probe.number + slot);
  std::uint8_t* of_caller = batch.rows == nullptr ? nullptr : batch.rows + i * row_bytes_;
  if (batch.operation == ScoredWrite::kFindOrInsert) {
    std::memcpy(of_caller, row, row_bytes_);
  } else if (batch.operation == ScoredWrite::kAccumulate) {
    std::memcpy(buffer, row, row_bytes_);
    batch.add(buffer, of_caller, row_bytes_);
    copy_to_shared(row, buffer, row_bytes_);
  } else if (of_caller != nullptr) {
    copy_to_shared(row, of_caller, row_bytes_);
  }
  std::uint64_t& score = probe.bucket->scores[slot];
  store(score, updated_score(batch, i, score));
}

// Returns whether the table has one row more.
bool ScoredTable::place(const ScoredBatch& batch, std::size_t i, const Probe& probe,
                        EvictedRows* evicted) {
  ScoredBucket& bucket = *probe.bucket;
  const std::uint8_t* row = batch.rows + i * row_bytes_;
  const std::uint64_t score = initial_score(batch, i);
  unsigned slot = free_slot(bucket, probe.home);
  const bool full = slot == kNoSlot;
  if (full) {
    slot = lowest(bucket);
    if (score < bucket.scores[slot] && batch.rule != ScoreRule::kAdd) {
      evict(evicted, batch.keys[i], score, row, row_bytes_);
      return false;
    }
    evict(evicted, bucket.keys[slot], bucket.scores[slot], row_at(probe.number + slot), row_bytes_);
  }
  occupy(bucket, probe.home, slot, probe.digest, batch.keys[i], score);
  copy_to_shared(row_at(probe.number + slot), row, row_bytes_);
  return !full;
}

void ScoredTable::write(const ScoredBatch& batch, bool* found, EvictedRows* evicted) {
  const Inside inside(gate_);
  RowBuffer buffer(row_bytes_);
  std::uint64_t added = 0;
  for_each_key<true>(
      batch.keys, batch.n, true, batch.rows != nullptr, [&](std::size_t i, const Probe& probe) {
        Locked locked(*probe.bucket);
        const unsigned slot = search(*probe.bucket, probe.home, probe.digest, batch.keys[i]);
        found[i] = slot != kNoSlot;
        if (batch.operation == ScoredWrite::kAccumulate && batch.accumulate[i] != found[i]) return;
        if (found[i]) {
          locked.changed();
          change(batch, i, probe, slot, buffer.data());
        } else if (batch.operation != ScoredWrite::kAssign) {
          locked.changed();
          added += place(batch, i, probe, evicted);
        }
      });
  size_.fetch_add(added, std::memory_order_relaxed);
}

void ScoredTable::erase(const std::int64_t* keys, std::size_t n, const std::uint64_t* scores,
                        bool* erased) {
  const Inside inside(gate_);
  std::uint64_t count = 0;
  for_each_key<true>(keys, n, scores != nullptr, false, [&](std::size_t i, const Probe& probe) {
    Locked locked(*probe.bucket);
    const unsigned slot = search(*probe.bucket, probe.home, probe.digest, keys[i]);
    erased[i] = slot != kNoSlot && (scores == nullptr || probe.bucket->scores[slot] == scores[i]);
    if (!erased[i]) return;
    locked.changed();
    vacate(*probe.bucket, slot);
    ++count;
  });
  size_.fetch_sub(count, std::memory_order_relaxed);
}

}  // namespace hps
