// insert, update and delete, in four launches; README.md says what must lie between them and why.
//
// keys (n,) i64, vectors (n, dim), versions (n,) u64; plan, position (n,) u32; scratch (a power of
// two >= 2 n,) u32, filled with NO_ROW; spare (>= n,) u32. One writer at a time; any number of
// fetches beside it. Twin: twin.py TwinTable.write (and newest_of_each of hps/tiers/base.py for
// dedup_kernel).
#include "hash_table.cuh"

struct WriteArgs {
  char* lines;
  char* rows;
  u64* row_versions;
  u32* spare;
  const u64* keys;
  const char* vectors;
  const u64* versions;
  u32* plan;
  u32* position;
  u32* scratch;
  u64* counters;  // admitted, evicted, dropped, unused
  u64 oldest_tombstone;
  u32 buckets;
  u32 stride;
  u32 row_bytes;
  u32 n;
  u32 scratch_mask;
  u32 now;
  u32 unused;
  u32 tombstone;  // deletions: no vectors
};

static_assert(sizeof(WriteArgs) == 128, "as launch.py has it");

constexpr u32 NOTHING = 0xffffffffu;  // in plan: no slot was claimed for this key
constexpr int TILE = 8;

// Which of several entries with the same key counts: the highest version, on equal versions the
// last. A thread per key; scratch ends up holding the winner of each key, position says where.
__global__ void __launch_bounds__(BLOCK) dedup_kernel(const __grid_constant__ WriteArgs a) {
  const u32 i = blockIdx.x * BLOCK + threadIdx.x;
  if (i >= a.n) return;
  const u64 key = a.keys[i], version = a.versions[i];
  u32 at = (u32)mix(key) & a.scratch_mask;
  for (;;) {
    u32 other = atomicCAS(&a.scratch[at], NO_ROW, i);
    while (other != NO_ROW && a.keys[other] == key) {
      const u64 theirs = a.versions[other];
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

template <int UNIT>
__device__ __forceinline__ void fill_row(const WriteArgs& a, u32 row, u32 i,
                                         const Tile<TILE>& tile) {
  typedef typename Unit<UNIT>::type unit;
  if (tile.rank == 0) a.row_versions[row] = a.versions[i];
  if (a.tombstone) return;
  const unit* from = (const unit*)(a.vectors + (size_t)i * a.row_bytes);
  unit* to = (unit*)(a.rows + (size_t)row * a.stride);
  for (int c = tile.rank; c < (int)a.row_bytes / UNIT; c += TILE) to[c] = from[c];
}

// The slot to take for a key that is not resident, as bucket choice * WAYS + slot, or -1 when all
// are claimed. `words` gets the chosen slot's word.
__device__ __forceinline__ int choose(char* first, char* other, u64 first_stamps, u64 other_stamps,
                                      u32 now, const Tile<TILE>& tile, u32& word) {
  u32 words[3];
  int score[3];
  int free_slots[2] = {0, 0};
#pragma unroll
  for (int k = 0; k < 3; k++) {
    const int q = tile.rank + k * TILE, second = q >= WAYS, slot = q - second * WAYS;
    const bool real = q < 2 * WAYS;
    words[k] = real ? __ldcg(word_at(second ? other : first, slot)) : CLAIMED;
    const bool empty = (words[k] & CLAIMED) == EMPTY;
    free_slots[0] += __popc(__ballot_sync(tile.mask, real && empty && !second) & tile.mask);
    free_slots[1] += __popc(__ballot_sync(tile.mask, real && empty && second) & tile.mask);
  }
  const bool room = free_slots[0] || free_slots[1];
  const int wanted = free_slots[0] > WAYS - PREFER ? 0 : free_slots[1] > free_slots[0];
  int best = -1;
#pragma unroll
  for (int k = 0; k < 3; k++) {
    const int q = tile.rank + k * TILE, second = q >= WAYS, slot = q - second * WAYS;
    score[k] = -1;
    if (room) {
      if (q < 2 * WAYS && (words[k] & CLAIMED) == EMPTY && second == wanted) score[k] = 0;
    } else if (q < 2 * WAYS && (words[k] & CLAIMED) != CLAIMED) {
      const u32 stamp =
          (u32)((second ? other_stamps : first_stamps) >> (slot * STAMP_BITS)) & (AGES - 1);
      score[k] = (int)((now - stamp) & (AGES - 1)) + (second ? 0 : MARGIN);
    }
    if (score[k] >= 0) best = max(best, score[k] * 32 + 31 - q);
  }
#pragma unroll
  for (int step = TILE / 2; step; step /= 2)
    best = max(best, __shfl_xor_sync(tile.mask, best, step, TILE));
  if (best < 0) return -1;
  const int q = 31 - (best & 31);
  word = tile.from(q < TILE ? words[0] : q < 2 * TILE ? words[1] : words[2], q & (TILE - 1));
  return q;
}

// Gives a resident key its new row (or tombstone): filled in a spare row, then shown by one
// exchange of the slot's word. False when the key was dropped for another one a moment ago: look
// again.
template <int UNIT, bool UPDATE>
__device__ __forceinline__ bool replace(const WriteArgs& a, u32 i, char* line, int slot, u32 word,
                                        const Tile<TILE>& tile) {
  const u32 row = word & ROW_MASK, fresh = a.spare[i];
  const u64 held = __ldcg(&a.row_versions[row]), version = a.versions[i];
  const bool forgotten = word & TOMBSTONE && held < a.oldest_tombstone;
  if (UPDATE ? forgotten || version < held : !forgotten && version < held) return true;
  fill_row<UNIT>(a, fresh, i, tile);
  __threadfence();
  __syncwarp(tile.mask);
  u32 seen = 0;
  if (tile.rank == 0)
    seen = atomicCAS(word_at(line, slot), word, fresh | (a.tombstone ? TOMBSTONE : 0));
  if (tile.from(seen, 0) != word) return false;
  if (tile.rank == 0) {
    a.spare[i] = row;
    if (!UPDATE && !a.tombstone) set_stamp(line, slot, a.now);
  }
  return true;
}

// Finds key i's place. Resident keys are done with then; for another one a slot is claimed, which
// ends the life of the row in it, and returned. counted: admitted, evicted, dropped.
template <int UNIT, bool UPDATE>
__device__ __forceinline__ u32 place(const WriteArgs& a, u32 i, u32* counted,
                                     const Tile<TILE>& tile) {
  const u64 key = a.keys[i], hash = mix(key);
  const u32 first = first_bucket(hash, a.buckets), other = second_bucket(hash, a.buckets, first);
  for (;;) {
    Line<TILE> line, second;
    line.load(line_at(a.lines, first), tile);
    if (!UPDATE) second.load(line_at(a.lines, other), tile);
    const u64 stamps = line.stamps();
    u32 bucket = first, word = CLAIMED;
    int slot = line.find(key, tile);
    if (slot < 0) {
      if (UPDATE) second.load(line_at(a.lines, other), tile);
      bucket = other;
      line = second;
      slot = line.find(key, tile);
    }
    if (slot >= 0) word = line.word(slot, tile);
    if (!(word & EMPTY)) {
      if (replace<UNIT, UPDATE>(a, i, line_at(a.lines, bucket), slot, word, tile)) return NOTHING;
      continue;
    }
    if (UPDATE) return NOTHING;
    if ((word & CLAIMED) == CLAIMED) {  // else: the key's own slot of old
      const int q =
          choose(line_at(a.lines, first), line_at(a.lines, other), tile.from(stamps, TILE - 1),
                 tile.from(second.stamps(), TILE - 1), a.now, tile, word);
      if (q < 0) {
        if (tile.rank == 0) atomicAdd(&counted[2], 1u);
        return NOTHING;
      }
      bucket = q >= WAYS ? other : first;
      slot = q >= WAYS ? q - WAYS : q;
    }
    u32 seen = 0;
    if (tile.rank == 0)
      seen = atomicCAS(word_at(line_at(a.lines, bucket), slot), word, CLAIMED | word);
    if (tile.from(seen, 0) != word) continue;
    if (tile.rank == 0) {
      atomicAdd(&counted[0], 1u);
      if (!(word & CLAIMED)) atomicAdd(&counted[1], 1u);
    }
    return bucket * WAYS + slot;
  }
}

// plan gets the slot claimed for each key, or NOTHING. A tile of 8 threads per key.
template <int UNIT, bool UPDATE>
__global__ void __launch_bounds__(BLOCK, UPDATE ? 5 : 6)
    choose_kernel(const __grid_constant__ WriteArgs a) {
  __shared__ u32 counted[3];
  if (threadIdx.x < 3) counted[threadIdx.x] = 0;
  __syncthreads();
  const Tile<TILE> tile;
  const u32 i = (blockIdx.x * BLOCK + threadIdx.x) / TILE;
  if (i < a.n) {
    u32 plan = NOTHING;
    if (a.scratch[a.position[i]] == i) plan = place<UNIT, UPDATE>(a, i, counted, tile);
    if (tile.rank == 0) a.plan[i] = plan;
  }
  __syncthreads();
  if (threadIdx.x < 3 && counted[threadIdx.x])
    atomicAdd(&a.counters[threadIdx.x], (u64)counted[threadIdx.x]);
}

// Keys and rows into the claimed slots. No reader that saw the slots' former rows runs any more.
template <int UNIT>
__global__ void __launch_bounds__(BLOCK) fill_kernel(const __grid_constant__ WriteArgs a) {
  const Tile<TILE> tile;
  const u32 i = (blockIdx.x * BLOCK + threadIdx.x) / TILE;
  if (i >= a.n) return;
  const u32 plan = a.plan[i];
  if (plan == NOTHING) return;
  char* line = line_at(a.lines, plan / WAYS);
  const int slot = plan % WAYS;
  const u32 row = *word_at(line, slot) & ROW_MASK;
  if (tile.rank == 0) {
    ((u64*)line)[slot] = a.keys[i];
    set_stamp(line, slot, a.tombstone ? a.now + 1 : a.now);
  }
  fill_row<UNIT>(a, row, i, tile);
}

// The claimed slots become visible. No reader that saw the slots' former keys runs any more.
__global__ void __launch_bounds__(BLOCK) publish_kernel(const __grid_constant__ WriteArgs a) {
  const u32 i = blockIdx.x * BLOCK + threadIdx.x;
  if (i >= a.n || a.plan[i] == NOTHING) return;
  u32* word = word_at(line_at(a.lines, a.plan[i] / WAYS), a.plan[i] % WAYS);
  *(volatile u32*)word = (*word & ROW_MASK) | (a.tombstone ? TOMBSTONE : 0);
}

// Resident keys leave; their slots and rows are free for the next insert. A tile of 8 threads per
// key.
__global__ void __launch_bounds__(BLOCK) evict_kernel(const __grid_constant__ WriteArgs a) {
  const Tile<TILE> tile;
  const u32 i = (blockIdx.x * BLOCK + threadIdx.x) / TILE;
  if (i >= a.n) return;
  const u64 key = a.keys[i], hash = mix(key);
  u32 bucket = first_bucket(hash, a.buckets);
  for (int choice = 0; choice < 2; choice++) {
    Line<TILE> line;
    char* at = line_at(a.lines, bucket);
    line.load(at, tile);
    const int slot = line.find(key, tile);
    if (slot >= 0) {
      const u32 word = line.word(slot, tile);
      if (tile.rank == 0 && !(word & EMPTY))
        atomicCAS(word_at(at, slot), word, EMPTY | (word & ROW_MASK));
      return;
    }
    bucket = second_bucket(hash, a.buckets, bucket);
  }
}
