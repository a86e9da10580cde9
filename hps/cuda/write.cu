// insert, update and delete: dedup, then place and publish, in launches over slices of the batch;
// README.md says which steps must come between two writes and why.
//
// keys (n,) i64, vectors (n, dim), versions (n,) u64, optional scores (n,) u64 from the caller;
// position (n,) u32; scratch (a power of two >= 2 n,) u32, filled with NO_ROW; spare (>= n,) u32.
// One writer at a time, in parallel to any number of fetches. Twin: twin.py TwinTable.write (and
// newest_of_each of hps/tiers/base.py for dedup_kernel).
#include "hash_table.cuh"

struct WriteArgs {
  char* lines;
  char* rows;
  char* host_rows;
  u64* row_versions;
  u64* slot_scores;  // SCORED: by slot
  u32* spare;
  const u64* keys;
  const char* vectors;
  const u64* versions;
  const u64* scores;  // SCORED, or null: new rows get 0, resident rows keep theirs
  u32* position;      // null: no key is repeated
  u32* scratch;
  u32* counters;      // admitted, evicted, dropped, free rows, ended blocks; zero before and after
  u32* result;        // in host memory: admitted, evicted, dropped, free rows
  u32* kept;          // compact: (n,)
  const u8* members;  // (n,) or null: members besides the caller that each row is for, from bit 0
  u64 oldest_tombstone;
  u32 buckets;
  u32 stride;
  u32 row_bytes;
  u32 on_device;
  u32 n;
  u32 scratch_mask;
  u32 start;  // the score of a new row
  u32 policy;
  u32 tombstone;  // deletions: no vectors
  u32 age;        // in full buckets: ticks by which a slot outside the home half must be older
  u32 roomy;      // empty slots own no row
  u32 open;       // empty slots may be filled
  u32 hidden;     // see row_mask
  u32 unused;
};

static_assert(sizeof(WriteArgs) == 192, "must equal launch.WRITE_ARGS");

constexpr u64 NOTHING = ~0ULL;
constexpr int TILE = 4;
constexpr int CHOICES = 4;  // halves that a key may live in
constexpr int BATCH = 2;    // moves of a row at a time

// Selects one of several entries with the same key: the highest version, of equal versions the
// last. A thread per key; afterwards scratch holds the winner of each key, at position.
__global__ void __launch_bounds__(BLOCK) dedup_kernel(const __grid_constant__ WriteArgs a) {
  const u32 i = blockIdx.x * BLOCK + threadIdx.x;
  if (i >= a.n) return;
  const u64 key = a.keys[i];
  u32 at = (u32)mix(key) & a.scratch_mask;
  for (;;) {
    u32 other = atomicCAS(&a.scratch[at], NO_ROW, i);
    while (other != NO_ROW && a.keys[other] == key) {
      const u64 theirs = a.versions[other], version = a.versions[i];
      if (theirs > version || (theirs == version && other > i)) {
        a.position[i] = at;
        return;
      }
      const u32 seen = atomicCAS(&a.scratch[at], other, i);
      if (seen == other)
        other = NO_ROW;
      else
        other = seen;
    }
    if (other == NO_ROW) break;
    at = (at + 1) & a.scratch_mask;
  }
  a.position[i] = at;
}

// Bits of `hidden` for members; 0: the table can have none.
__device__ __forceinline__ u32 own_bit(const WriteArgs& a) { return a.hidden & MEMBERS; }

// The members, of those that this table can have, that see a word.
__device__ __forceinline__ u32 seen_by(const WriteArgs& a, u32 word) {
  return own_bit(a) ? ~word & MEMBERS : 0;
}

// The members that row i is for.
__device__ __forceinline__ u32 written_for(const WriteArgs& a, u32 i) {
  const u32 own = own_bit(a);
  return own && a.members ? own | ((u32)a.members[i] << 26 & MEMBERS) : own;
}

// The slot chosen for a key, whether the key is new in it, its former word, and the members that
// see the new one.
struct Place {
  u32 half, word, seers;
  int rank;
  bool is_new;
};

template <int UNIT>
__device__ __forceinline__ void fill_row(const WriteArgs& a, u32 row, u32 i,
                                         const Tile<TILE>& tile) {
  typedef typename Unit<UNIT>::type unit;
  if (tile.rank == 0) a.row_versions[row] = a.versions[i];
  if (a.tombstone) return;
  const unit* from = (const unit*)(a.vectors + (size_t)i * a.row_bytes);
  unit* to = (unit*)row_at(a, row, a.stride);
  const int units = (int)a.row_bytes / UNIT;
  for (int first = tile.rank; first < units; first += BATCH * TILE) {
    unit value[BATCH];  // all loads before the stores, which the compiler must assume to alias
#pragma unroll
    for (int m = 0; m < BATCH; m++)
      if (first + m * TILE < units) value[m] = __ldcs(from + first + m * TILE);
#pragma unroll
    for (int m = 0; m < BATCH; m++)
      if (first + m * TILE < units) to[first + m * TILE] = value[m];
  }
}

// Chooses a slot in full buckets of a table with the caller's 64-bit scores: a tombstone, else the
// lowest score, as choice * 4 + rank. -1 if there is none, or if `score` is lower than all.
__device__ __forceinline__ int lowest_scored(const WriteArgs& a, const Slot* slot, const u32* half,
                                             u64 score, const Tile<TILE>& tile) {
  u64 lowest = NOTHING;
  int place = -1;
#pragma unroll
  for (int k = 0; k < CHOICES; k++) {
    const u32 state = slot[k].word & (EMPTY | TOMBSTONE | CLAIMED);
    const u32 dead = __ballot_sync(tile.mask, state == TOMBSTONE) & tile.mask;
    if (dead) return k * HALF + ((__ffs(dead) - 1) & (TILE - 1));
    if (state & (EMPTY | CLAIMED)) continue;
    const u64 worth = *(const volatile u64*)&a.slot_scores[(size_t)half[k] * HALF + tile.rank];
    if (place >= 0 && worth >= lowest) continue;
    lowest = worth;
    place = k * HALF + tile.rank;
  }
#pragma unroll
  for (int step = TILE / 2; step; step /= 2) {
    const u64 other = __shfl_xor_sync(tile.mask, lowest, step, TILE);
    const int theirs = __shfl_xor_sync(tile.mask, place, step, TILE);
    if (theirs < 0 || (place >= 0 && (lowest < other || (lowest == other && place < theirs))))
      continue;
    lowest = other;
    place = theirs;
  }
  return place < 0 || lowest > score ? -1 : place;
}

// Chooses the slot for key i, which is not resident, as choice * 4 + rank; -1 if there is none. It
// is an empty slot of the home half (unless it is the bucket's last and half of the second bucket
// is empty; in a roomy table, one of the last two and the second bucket is emptier), else of the
// emptier bucket, else the slot with the lowest score. `slot` are the four halves' slots at this
// thread's rank.
template <bool SCORED>
__device__ __forceinline__ int choose(const WriteArgs& a, u32 i, const Slot* slot, const u32* half,
                                      const Tile<TILE>& tile) {
  int vacant[CHOICES];
#pragma unroll
  for (int k = 0; k < CHOICES; k++) {
    const bool it = a.open && (slot[k].word & (EMPTY | CLAIMED)) == EMPTY;
    vacant[k] = __popc(__ballot_sync(tile.mask, it) & tile.mask);
  }
  const int in_first = vacant[0] + vacant[1], in_second = vacant[2] + vacant[3];
  const bool any_vacant = in_first + in_second;
  if (SCORED && !any_vacant) return lowest_scored(a, slot, half, a.scores ? a.scores[i] : 0, tile);
  const bool enough =
      a.roomy ? in_first > 2 || in_second <= in_first : in_first > 1 || in_second < HALF;
  const bool home = vacant[0] && enough;
  const bool second = !home && in_second > vacant[1];
  u64 best = NOTHING;
#pragma unroll
  for (int k = 0; k < CHOICES; k++) {
    const u32 word = slot[k].word;
    u64 rank = NOTHING;
    if (any_vacant) {
      const bool wanted = home ? k == 0 : second ? k >= 2 : k == 1;
      if (wanted && (word & (EMPTY | CLAIMED)) == EMPTY) rank = 0;
    } else if (a.policy != NONE && !(word & (EMPTY | CLAIMED))) {
      const u32 margin = a.policy == LRU && k ? a.age : 0;
      rank = word & TOMBSTONE ? 0 : (u64)rank_of(slot[k].score, a.start) + 1 + margin;
    }
    if (rank != NOTHING) best = min(best, rank * 32 + k * HALF + tile.rank);
  }
#pragma unroll
  for (int step = TILE / 2; step; step /= 2)
    best = min(best, __shfl_xor_sync(tile.mask, best, step, TILE));
  return best == NOTHING ? -1 : (int)(best & 31);
}

// The members that see a row or tombstone of row i's key in any of these slots, and the rank of one
// of them with this very row, as choice * 4 + rank, or -1.
struct Seers {
  u32 all;
  int same;
};

__device__ __forceinline__ Seers seers_of(const WriteArgs& a, u32 i, const Slot* slot, u32 wanted,
                                          const Tile<TILE>& tile) {
  Seers seers = {0, -1};
#pragma unroll
  for (int k = 0; k < CHOICES; k++) {
    const u32 word = slot[k].word;
    if (slot[k].key != a.keys[i] || word & (EMPTY | CLAIMED)) continue;
    seers.all |= seen_by(a, word);
    if (!(word & TOMBSTONE) && seen_by(a, word) & wanted &&
        a.row_versions[word & row_mask(a.hidden)] == a.versions[i])
      seers.same = k * HALF + tile.rank;
  }
#pragma unroll
  for (int step = TILE / 2; step; step /= 2) {
    seers.all |= __shfl_xor_sync(tile.mask, seers.all, step, TILE);
    seers.same = max(seers.same, __shfl_xor_sync(tile.mask, seers.same, step, TILE));
  }
  return seers;
}

__device__ __forceinline__ u32 half_of(const u32* half, int choice) {
  return choice == 0 ? half[0] : choice == 1 ? half[1] : half[2] + (choice - 2);
}

__device__ __forceinline__ u32 word_of_choice(const Slot* slot, int choice) {
  u32 word = slot[0].word;
#pragma unroll
  for (int k = 1; k < CHOICES; k++)
    if (choice == k) word = slot[k].word;
  return word;
}

// Changes a slot's word, by the tile's first thread. Returns whether it was still `word`.
__device__ __forceinline__ bool exchange(char* slot, u32 word, u32 next, const Tile<TILE>& tile) {
  u32 seen = 0;
  if (tile.rank == 0) seen = atomicCAS(word_of(slot), word, next);
  return __shfl_sync(tile.mask, seen, 0, TILE) == word;
}

// Finds the slot of key i. Returns false if it gets none.
template <bool UPDATE, bool SCORED>
__device__ __forceinline__ bool find_place(const WriteArgs& a, u32 i, Place& place, u32* counted,
                                           const Tile<TILE>& tile) {
  const u64 key = a.keys[i], hash = mix(key);
  u32 half[CHOICES];
  half[0] = home_half(hash, a.buckets);
  half[1] = half[0] ^ 1;
  half[2] = second_half(hash, a.buckets, half[0]);
  half[3] = half[2] + 1;
  for (;;) {
    Slot slot[CHOICES];
    int lane = -1;
#pragma unroll
    for (int k = 0; k < CHOICES; k++) {
      if (!UPDATE || k == 0) slot[k] = load_slot(slot_at(a.lines, half[k], tile.rank));
    }
    int choice = 0;
#pragma unroll
    for (int k = 0; k < CHOICES; k++) {
      if (lane >= 0) break;
      if (UPDATE && k == 1)
#pragma unroll
        for (int l = 1; l < CHOICES; l++) slot[l] = load_slot(slot_at(a.lines, half[l], tile.rank));
      lane = tile.which(slot[k].key == key && !(slot[k].word & (a.hidden | CLAIMED)));
      if (lane >= 0) choice = k;
    }
    place.is_new = lane < 0;
    u32 word = word_of_choice(slot, choice);
    const u32 wanted = written_for(a, i);
    if (lane >= 0) {
      place.rank = lane & (TILE - 1);
      word = __shfl_sync(tile.mask, word, lane);
      const u64 held = a.row_versions[word & row_mask(a.hidden)], version = a.versions[i];
      const bool expired = word & TOMBSTONE && held < a.oldest_tombstone;
      if (UPDATE ? expired || version < held : !expired && version < held) return false;
      place.seers = seen_by(a, word);
      if (place.seers & ~wanted) {  // others keep this row; the caller's goes to another slot
        char* at = slot_at(a.lines, half_of(half, choice), place.rank);
        if (exchange(at, word, word | own_bit(a), tile) && UPDATE) return false;
        continue;
      }
    } else {
      if (UPDATE) return false;
      place.seers = wanted;
      if (wanted & ~own_bit(a)) {
        const Seers seers = seers_of(a, i, slot, wanted, tile);
        if (seers.same >= 0) {  // another member has the row: it is shared
          const int rank = seers.same & (HALF - 1);
          word = __shfl_sync(tile.mask, word_of_choice(slot, seers.same / HALF), rank, TILE);
          char* at = slot_at(a.lines, half_of(half, seers.same / HALF), rank);
          if (exchange(at, word, word & ~own_bit(a), tile)) return false;
          continue;
        }
        place.seers &= ~seers.all;
      }
      const int q = choose<SCORED>(a, i, slot, half, tile);
      if (q < 0) {
        if (tile.rank == 0) atomicAdd(&counted[2], 1u);
        return false;
      }
      choice = q / HALF;
      place.rank = q & (HALF - 1);
      word = __shfl_sync(tile.mask, word_of_choice(slot, choice), place.rank, TILE);
    }
    place.half = half_of(half, choice);
    place.word = word;
    if (UPDATE) return true;
    if (exchange(slot_at(a.lines, place.half, place.rank), word, CLAIMED | word, tile)) break;
  }
  if (tile.rank == 0 && place.is_new) {
    atomicAdd(&counted[0], 1u);
    if (!(place.word & (EMPTY | TOMBSTONE))) atomicAdd(&counted[1], 1u);
  }
  return true;
}

// Writes the counters from `first` to `last` into host memory, in the last block, and clears them.
// All threads must call it.
__device__ __forceinline__ void report(const WriteArgs& a, int first, int last) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&a.counters[4], 1u) != gridDim.x - 1) return;
  for (int k = first; k <= last; k++) a.result[k] = atomicExch(&a.counters[k], 0u);
  a.counters[4] = 0;
}

// Whether entry i is the winner of its key. All threads of the tile must call it, once.
__device__ __forceinline__ bool is_winner(const WriteArgs& a, u32 i, const Tile<TILE>& tile) {
  if (!a.position) return true;
  u32* const winner = &a.scratch[a.position[i]];
  const bool wins = *(volatile u32*)winner == i;  // others of its key see i or NO_ROW
  __syncwarp(tile.mask);
  if (wins && tile.rank == 0) *winner = NO_ROW;
  return wins;
}

// Publishes the row of key i by one store; the replaced row becomes spare.
template <bool UPDATE>
__device__ __forceinline__ void publish(const WriteArgs& a, u32 i, const Place& place) {
  char* slot = slot_at(a.lines, place.half, place.rank);
  const u32 hidden = own_bit(a) ? MEMBERS & ~place.seers : 0;
  const u32 word = a.spare[i] | hidden | (a.tombstone ? TOMBSTONE : 0);
  const u32 score = a.tombstone ? 0 : a.start;
  if (place.is_new) {
    const Slot whole = {a.keys[i], word, score};
    store_slot(slot, whole);
  } else {
    store_word(slot, word);
    if (!UPDATE && (a.policy == LRU || a.tombstone)) *(volatile u32*)score_of(slot) = score;
  }
  a.spare[i] = place.word & row_mask(a.hidden);
}

// Stores the caller's score of key i in its slot; a deletion's is 0.
__device__ __forceinline__ void store_score(const WriteArgs& a, u32 i, const Place& place) {
  if (!a.scores && !a.tombstone && !place.is_new) return;
  a.slot_scores[(size_t)place.half * HALF + place.rank] =
      a.scores && !a.tombstone ? a.scores[i] : 0;
}

// Writes each winning key into a spare row, before the row is published in a slot. Updates skip
// keys that are not resident. A tile of 4 threads per key.
template <int UNIT, bool UPDATE, bool SCORED>
__global__ void __launch_bounds__(BLOCK, UPDATE ? MOST_BLOCKS : 6)
    write_kernel(const __grid_constant__ WriteArgs a) {
  __shared__ u32 counted[3];
  if (threadIdx.x < 3) counted[threadIdx.x] = 0;
  __syncthreads();
  const Tile<TILE> tile;
  const u32 i = (blockIdx.x * BLOCK + threadIdx.x) / TILE;
  if (i < a.n && is_winner(a, i, tile)) {
    Place place;
    if (!UPDATE) fill_row<UNIT>(a, a.spare[i], i, tile);
    if (find_place<UPDATE, SCORED>(a, i, place, counted, tile)) {
      if (UPDATE) fill_row<UNIT>(a, a.spare[i], i, tile);
      if (SCORED && tile.rank == 0) store_score(a, i, place);
      __threadfence();
      __syncwarp(tile.mask);
      if (tile.rank == 0) publish<UPDATE>(a, i, place);
    }
  }
  __syncthreads();
  if (threadIdx.x < 3 && counted[threadIdx.x])
    atomicAdd(&a.counters[threadIdx.x], counted[threadIdx.x]);
  report(a, 0, 2);
}

// Collects the spare rows that a write into a roomy table has left among the first n, at the end of
// `kept`, in any order, and counts them: an empty slot gives no row back. A thread per row.
__global__ void __launch_bounds__(BLOCK) compact_kernel(const __grid_constant__ WriteArgs a) {
  const u32 i = blockIdx.x * BLOCK + threadIdx.x, lane = threadIdx.x & 31;
  const u32 none = row_mask(a.hidden), row = i < a.n ? a.spare[i] : none;
  const u32 votes = __ballot_sync(0xffffffffu, row != none);
  u32 first = 0;
  if (lane == 0 && votes) first = atomicAdd(&a.counters[3], __popc(votes));
  first = __shfl_sync(0xffffffffu, first, 0);
  if (row != none) a.kept[a.n - 1 - first - __popc(votes & ((1u << lane) - 1))] = row;
  report(a, 3, 3);
}

// Hides a row or tombstone from the caller. If no member sees it then, its slot and row are free
// for the next insert; a roomy table's row is put before its spare rows and counted.
__device__ __forceinline__ void hide(const WriteArgs& a, char* slot, u32 word) {
  const u32 mask = row_mask(a.hidden);
  while (!(word & a.hidden)) {
    u32 next = word | own_bit(a);
    if (!seen_by(a, next)) next = EMPTY | (a.roomy ? mask : word & mask);
    const u32 seen = atomicCAS(word_of(slot), word, next);  // keys may be repeated
    if (seen == word) {
      if (a.roomy && next & EMPTY) *(a.spare - 1 - atomicAdd(&a.counters[3], 1u)) = word & mask;
      return;
    }
    word = seen;
  }
}

// Evicts resident keys. A tile of 4 threads per key.
__global__ void __launch_bounds__(BLOCK) evict_kernel(const __grid_constant__ WriteArgs a) {
  const Tile<TILE> tile;
  const u32 i = (blockIdx.x * BLOCK + threadIdx.x) / TILE;
  if (i < a.n) {
    const u64 key = a.keys[i], hash = mix(key);
    const u32 home = home_half(hash, a.buckets);
    const u32 second = second_half(hash, a.buckets, home);
#pragma unroll
    for (int k = 0; k < CHOICES; k++) {
      char* at = slot_at(a.lines, k < 2 ? home ^ k : second + k - 2, tile.rank);
      const Slot slot = load_slot(at);
      if (holds(slot, key, a.hidden)) hide(a, at, slot.word);
    }
  }
  report(a, 3, 3);
}

// Evicts all rows and tombstones of the caller. A thread per slot, n of them.
__global__ void __launch_bounds__(BLOCK) leave_kernel(const __grid_constant__ WriteArgs a) {
  const u32 at = blockIdx.x * BLOCK + threadIdx.x;
  char* slot = a.lines + (size_t)at * SLOT_BYTES;
  if (at < a.n) hide(a, slot, *word_of(slot));
  report(a, 3, 3);
}
