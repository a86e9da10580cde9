#include "hps/cache_table.hpp"

#include <algorithm>
#include <stdexcept>

#include "hps/relaxed.hpp"

namespace hps {
namespace {

constexpr std::uint64_t kMagic = 0x65686361'63737068ULL;  // "hpscache"
constexpr std::uint32_t kLayout = 1;

constexpr std::uint64_t kTicksPerTurnover = 64;
// A tick goes over this share of the buckets, so every score is seen each 16 ticks.
constexpr std::uint64_t kSweepShare = 16;
// Stamps have a byte: a sweep makes those older than this just so old, before they come round.
constexpr std::uint8_t kOldest = 200;
// A tombstone enters older than any row can be, and just as young as to be seen by a sweep before
// it comes round: 255 - kSweepShare.
constexpr std::uint8_t kTombstoneAge = 239;
// LFU: what a new row has, and what a sweep takes off: a count is halved in a turnover.
constexpr std::uint8_t kFirstUses = 32;
constexpr std::uint8_t kDecay = 4;
// How many buckets, one after the other, a victim is chosen from: some 19 rows. The hand goes on
// from there, so each row is looked at as often as the others.
constexpr std::uint64_t kSample = 8;

struct Plan {
  std::uint64_t buckets, buckets_at, versions_at, rows_at, bytes;
};

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
                       const ReadKernels& read)
    : memory_(bytes_for(capacity, row_bytes)), read_(read) {
  const Plan made = plan(capacity, row_bytes);
  std::uint8_t* base = memory_.data();
  auto* header = reinterpret_cast<Header*>(base);
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
  header->magic = kMagic;
  view_ = {header,
           reinterpret_cast<Bucket*>(base + made.buckets_at),
           reinterpret_cast<std::uint64_t*>(base + made.versions_at),
           base + made.rows_at,
           made.buckets,
           row_bytes};
}

CacheCounts CacheTable::counts() const {
  const Header& h = *view_.header;
  return {load(h.rows), load(h.tombstones), load(h.evictions)};
}

bool CacheTable::find(std::int64_t key, Slot& at) const {
  const std::uint64_t from = home(key);
  for (unsigned steps = reach(load(view_.buckets[from].word)) | 1; steps != 0; steps &= steps - 1) {
    at.bucket = bucket_at(view_.n_buckets, from, static_cast<unsigned>(__builtin_ctz(steps)));
    const Bucket& there = bucket(at);
    for (unsigned slots = occupied(load(there.word)); slots != 0; slots &= slots - 1) {
      at.slot = static_cast<unsigned>(__builtin_ctz(slots));
      if (load(there.keys[at.slot]) == key) return true;
    }
  }
  return false;
}

// -- writing ------------------------------------------------------------------------------------

void CacheTable::write(const CacheWrite& write) {
  constexpr std::size_t kAhead = 8;
  const std::lock_guard<std::mutex> turn(writer_);
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
  Bucket& there = bucket(at);
  const std::uint64_t held = load(view_.versions[load(there.rows[at.slot])]);
  const bool forgotten = is_tombstone(load(there.word), at.slot) && held < write.oldest_tombstone;
  if (forgotten ? write.resident_only : version < held) return;
  replace(at, version, row);
  if (row != nullptr && !write.resident_only && view_.header->eviction == Eviction::kLru)
    store(there.scores[at.slot], load(view_.header->clock));
}

// Replaces what is there under the same key; readers who come meanwhile wait a little.
void CacheTable::replace(Slot at, std::uint64_t version, const std::uint8_t* row) {
  Bucket& there = bucket(at);
  std::uint64_t word = load(there.word);
  store(view_.header->writing, at.bucket + 1);
  count(is_tombstone(word, at.slot), -1);
  word = ((word & ~readable_bit(at.slot)) | busy_bit(at.slot)) + kNextSequence;
  store(there.word, word);
  release_fence();
  fill(load(there.rows[at.slot]), version, row);
  word &= ~busy_bit(at.slot);
  if (row != nullptr) word |= readable_bit(at.slot);
  store_release(there.word, word + kNextSequence);
  count(row == nullptr, +1);
  store_release(view_.header->writing, std::uint64_t{0});
}

void CacheTable::admit(std::int64_t key, std::uint64_t version, const std::uint8_t* row) {
  if (row != nullptr) tick();
  const std::uint64_t from = home(key);
  Slot at{0, 0};
  unsigned step = 0;
  // A tombstone that drives somebody out finds an earlier one near its home, if there is any: so a
  // flood of deletions takes few rows with it.
  const bool near = !find_room(from, at, step) || (row == nullptr && !has_free_row());
  std::uint32_t number = near ? make_room_near(from) : kNoRow;
  if (number == kNoRow) number = take_row();
  find_room(from, at, step);  // again, because a slot may have become free
  // Nobody looks at a slot that is not occupied, so this one is filled at leisure.
  Bucket& there = bucket(at);
  fill(number, version, row);
  store(there.keys[at.slot], key);
  store(there.rows[at.slot], number);
  store(there.scores[at.slot], first_score(row == nullptr));
  if (step != 0) {
    std::uint64_t& word = view_.buckets[from].word;
    store(word, load(word) | reach_bit(step));
  }
  std::uint64_t word = load(there.word) | occupied_bit(at.slot);
  if (row != nullptr) word |= readable_bit(at.slot);
  store_release(there.word, word + kNextSequence);
  count(row == nullptr, +1);
}

// The first free slot of the sequence.
bool CacheTable::find_room(std::uint64_t home, Slot& at, unsigned& step) const {
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
  return view_.header->free_row != kNoRow || view_.header->fresh_row < view_.header->capacity;
}

// A row that nobody has; when there is none the coldest of a sample must give up its own.
std::uint32_t CacheTable::take_row() {
  Header& header = *view_.header;
  if (const std::uint32_t row = header.free_row; row != kNoRow) {
    header.free_row = static_cast<std::uint32_t>(load(view_.versions[row]));
    return row;
  }
  if (header.fresh_row < header.capacity) return header.fresh_row++;
  return make_room();
}

// The hand moves on until it finds somebody: the table is full.
std::uint32_t CacheTable::make_room() {
  Header& header = *view_.header;
  Slot coldest{0, 0};
  int worst = -1;
  while (worst < 0) {
    const std::uint64_t end = std::min(header.hand + kSample, view_.n_buckets);
    for (std::uint64_t number = header.hand; number < end; ++number)
      find_coldest(number, coldest, worst);
    header.hand = end < view_.n_buckets ? end : 0;
  }
  for (std::uint64_t i = 0; i < kSample; ++i)
    __builtin_prefetch(view_.buckets + header.hand + i);  // for the next time
  return expel(coldest);
}

// The coldest of the sequence makes room, if there is anybody.
std::uint32_t CacheTable::make_room_near(std::uint64_t home) {
  const std::uint64_t steps = std::min<std::uint64_t>(kSteps, view_.n_buckets);
  Slot coldest{0, 0};
  int worst = -1;
  for (unsigned step = 0; step < steps; ++step)
    find_coldest(bucket_at(view_.n_buckets, home, step), coldest, worst);
  return worst < 0 ? kNoRow : expel(coldest);
}

// The first of equals.
void CacheTable::find_coldest(std::uint64_t number, Slot& coldest, int& worst) const {
  const std::uint64_t word = load(view_.buckets[number].word);
  for (unsigned slots = occupied(word); slots != 0; slots &= slots - 1) {
    const Slot at{number, static_cast<unsigned>(__builtin_ctz(slots))};
    const int cold = static_cast<int>(coldness(at, word));
    if (cold <= worst) continue;
    worst = cold;
    coldest = at;
  }
}

std::uint32_t CacheTable::expel(Slot at) {
  Header& header = *view_.header;
  if (!is_tombstone(load(bucket(at).word), at.slot)) store(header.evictions, header.evictions + 1);
  return drop(at);
}

// Takes a slot out of use. What it had may be written to from here on: its row, which is returned,
// and itself.
std::uint32_t CacheTable::drop(Slot at) {
  Bucket& there = bucket(at);
  const std::uint64_t word = load(there.word), from = home(load(there.keys[at.slot]));
  count(is_tombstone(word, at.slot), -1);
  const std::uint64_t left = word & ~(occupied_bit(at.slot) | readable_bit(at.slot));
  store(there.word, left + kNextSequence);
  release_fence();
  bool reached = from == at.bucket;
  for (unsigned slots = occupied(left); slots != 0 && !reached; slots &= slots - 1)
    reached = home(load(there.keys[__builtin_ctz(slots)])) == from;
  if (!reached) {
    std::uint64_t& home_word = view_.buckets[from].word;
    unsigned step = 1;
    while (bucket_at(view_.n_buckets, from, step) != at.bucket) ++step;
    store(home_word, load(home_word) & ~reach_bit(step));
  }
  return load(there.rows[at.slot]);
}

void CacheTable::evict(const std::int64_t* keys, std::size_t n) {
  const std::lock_guard<std::mutex> turn(writer_);
  Slot at{0, 0};
  for (std::size_t i = 0; i < n; ++i)
    if (find(keys[i], at)) give_back(drop(at));
}

void CacheTable::give_back(std::uint32_t row) {
  store(view_.versions[row], std::uint64_t{view_.header->free_row});
  view_.header->free_row = row;
}

void CacheTable::fill(std::uint32_t number, std::uint64_t version, const std::uint8_t* row) {
  store(view_.versions[number], version);
  if (row != nullptr) copy_to_shared(view_.rows + number * view_.row_bytes, row, view_.row_bytes);
}

void CacheTable::count(bool is_tombstone, int change) {
  std::uint64_t& total = is_tombstone ? view_.header->tombstones : view_.header->rows;
  store(total, total + static_cast<std::uint64_t>(static_cast<std::int64_t>(change)));
}

// -- scores -------------------------------------------------------------------------------------

// What goes first: the one with the highest coldness. Under FIFO stamps are never renewed.
unsigned CacheTable::coldness(Slot at, std::uint64_t word) const {
  const Header& header = *view_.header;
  const std::uint8_t score = load(bucket(at).scores[at.slot]);
  switch (header.eviction) {
    case Eviction::kLfu:
      return UINT8_MAX - score;
    case Eviction::kRandom: {
      if (is_tombstone(word, at.slot)) return UINT8_MAX;
      const auto seed =
          static_cast<std::int64_t>((header.evictions << 32) + at.bucket * kSlots + at.slot);
      return static_cast<unsigned>(home_of(seed, UINT8_MAX));
    }
    default:
      return static_cast<std::uint8_t>(header.clock - score);
  }
}

std::uint8_t CacheTable::first_score(bool is_tombstone) const {
  const std::uint8_t clock = view_.header->clock;
  if (view_.header->eviction == Eviction::kLfu) return is_tombstone ? 0 : kFirstUses;
  return is_tombstone ? static_cast<std::uint8_t>(clock - kTombstoneAge) : clock;
}

// Counts an admission; now and then time goes on, and a part of the scores is gone over.
void CacheTable::tick() {
  Header& header = *view_.header;
  if (++header.admitted * kTicksPerTurnover < header.capacity) return;
  header.admitted = 0;
  store(header.clock, static_cast<std::uint8_t>(header.clock + 1));
  const std::uint64_t buckets = (view_.n_buckets + kSweepShare - 1) / kSweepShare;
  const std::uint64_t end = std::min(view_.n_buckets, header.swept + buckets);
  for (std::uint64_t number = header.swept; number < end; ++number) {
    for (std::uint8_t& score : view_.buckets[number].scores) {
      const std::uint8_t now = load(score);
      if (header.eviction == Eviction::kLfu)
        store(score, static_cast<std::uint8_t>(now < kDecay ? 0 : now - kDecay));
      else if (static_cast<std::uint8_t>(header.clock - now) > kOldest)
        store(score, static_cast<std::uint8_t>(header.clock - kOldest));
    }
  }
  header.swept = end < view_.n_buckets ? end : 0;
}

std::vector<HotKey> CacheTable::top_k(std::size_t n) const {
  std::vector<HotKey> hot;
  const std::uint8_t clock = load(view_.header->clock);
  for (std::uint64_t number = 0; number < view_.n_buckets; ++number) {
    const Bucket& bucket = view_.buckets[number];
    const std::uint64_t word = load_acquire(bucket.word);
    for (unsigned slots = readable(word); slots != 0; slots &= slots - 1) {
      const auto slot = static_cast<unsigned>(__builtin_ctz(slots));
      const std::uint8_t score = load(bucket.scores[slot]);
      const bool counted = view_.header->eviction == Eviction::kLfu;
      const auto age = static_cast<std::uint8_t>(clock - score);
      hot.push_back(
          {load(bucket.keys[slot]), counted ? score : static_cast<std::uint8_t>(UINT8_MAX - age)});
    }
  }
  const auto hotter = [](const HotKey& a, const HotKey& b) {
    return a.score != b.score ? a.score > b.score : a.key < b.key;
  };
  const std::size_t kept = std::min(n, hot.size());
  std::partial_sort(hot.begin(), hot.begin() + static_cast<std::ptrdiff_t>(kept), hot.end(),
                    hotter);
  hot.resize(kept);
  return hot;
}

}  // namespace hps
