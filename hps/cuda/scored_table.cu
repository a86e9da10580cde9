// Reading a table with scores, and growth. scored_find_kernel: a tile of 4 threads per key copies
// rows and scores, or gives row numbers. scored_split_kernel: a warp per bucket copies its rows to
// the two of a table of twice the size.
#include "scored_table.cuh"

template <int UNIT>
__global__ void __launch_bounds__(BLOCK) scored_find_kernel(const __grid_constant__ ScoredArgs a) {
  const u32 i = (blockIdx.x * BLOCK + threadIdx.x) / FIND_TILE;
  if (i >= a.n) return;
  const u32 lane = threadIdx.x % FIND_TILE, shift = threadIdx.x & 28, mask = 15u << shift;
  const u64 key = a.wanted[i];
  const Home home = home_of(a, key);
  i64 number = -1;
  for (u32 half = home.half, turn = 0; turn < 2 && number < 0; turn++, half ^= SLOTS / 2) {
    const u64 first = home.bucket * SLOTS + half + lane * PART;
    u32 digests[4];
    load_digests(a, first, digests);
    const int slot = slot_of(a, first, digests, home, key);
    const u32 hit = __ballot_sync(mask, slot >= 0) >> shift & 15;
    if (hit) number = __shfl_sync(mask, (i64)first + slot, __ffs(hit) - 1, FIND_TILE);
  }
  if (lane == 0) {
    if (a.found) a.found[i] = number >= 0;
    if (a.numbers) a.numbers[i] = number;
    if (a.batch_scores && number >= 0) a.batch_scores[i] = a.scores[number];
  }
  if (a.batch_rows && number >= 0)
    copy_row<UNIT, FIND_TILE>(a.batch_rows + (size_t)i * a.row_bytes, row_of<true>(a, number),
                              a.row_bytes);
}

struct SplitArgs {
  const u64* old_keys;
  const u64* old_scores;
  const u8* old_digests;
  char* old_rows;
  char* old_host_rows;
  u64* keys;
  u64* scores;
  u8* digests;  // all 0
  char* rows;
  char* host_rows;
  u32 base;
  u32 segments;  // of the new table
  u32 row_bytes;
  u32 n;  // buckets of the old table
  u32 device_slots;
  u32 unused;
};

static_assert(sizeof(SplitArgs) == 104, "must equal device_table.SPLIT_ARGS");

// Rows of the bucket's upper half of segments move to the new bucket, where they are placed in the
// order of their slots; the others keep their slots.
template <int UNIT>
__global__ void __launch_bounds__(BLOCK) scored_split_kernel(const __grid_constant__ SplitArgs a) {
  typedef typename Unit<UNIT>::type unit;
  constexpr u8 MOVES = 128;
  constexpr u32 HELD = SLOTS / 32;  // slots of a thread
  __shared__ u8 targets[BLOCK / 32][SLOTS], sources[BLOCK / 32][SLOTS];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const u64 bucket = (u64)blockIdx.x * (BLOCK / 32) + warp, first = bucket * SLOTS;
  const u64 moved = (bucket + a.n) * SLOTS;
  if (bucket >= a.n) return;
  u8 *const to = targets[warp], *const from = sources[warp];
  u32 halves[HELD],
      counts = 0;  // 0 or 1 of those that move; counts of both halves and of all slots
  const u32 digests = ((const u32*)(a.old_digests + first))[lane];
  u64 keys[HELD];
#pragma unroll
  for (u32 i = 0; i < HELD; i++)
    keys[i] = digests >> 8 * i & 255 ? a.old_keys[first + lane * HELD + i] : 0;
#pragma unroll
  for (u32 i = 0; i < HELD; i++) {
    halves[i] = 3;
    if (!(digests >> 8 * i & 255)) continue;
    const Home home = home_of(a, keys[i]);
    halves[i] = home.bucket == bucket ? 2 : home.half / (SLOTS / 2);
    counts += 1 << 20 | (halves[i] < 2 ? 1u << 10 * halves[i] : 0);
  }
  u32 before = counts;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(ALL, before, step);
    if (lane >= step) before += other;
  }
  const u32 all = __shfl_sync(ALL, before, 31);
  before -= counts;
#pragma unroll
  for (u32 i = 0; i < HELD; i++) {
    if (halves[i] == 3) continue;
    const u32 slot = lane * HELD + i, place = halves[i] < 2 ? before >> 10 * halves[i] & 1023 : 0;
    from[before >> 20] = (u8)slot;
    to[before >> 20] = (u8)(halves[i] == 2 ? slot : MOVES | halves[i] * (SLOTS / 2) + place);
    before += 1 << 20 | (halves[i] < 2 ? 1u << 10 * halves[i] : 0);
  }
  __syncwarp();
  const u32 rows = all >> 20;
  if ((all & 1023) > SLOTS / 2 || (all >> 10 & 1023) > SLOTS / 2) {  // a half overflows: one by one
    if (lane == 0) {
      u32 filled[2] = {0, 0};
      for (u32 r = 0; r < rows; r++) {
        const Home home = home_of(a, a.old_keys[first + from[r]]);
        if (home.bucket == bucket) continue;
        u32 half = home.half / (SLOTS / 2);
        if (filled[half] == SLOTS / 2) half ^= 1;
        to[r] = (u8)(MOVES | half * (SLOTS / 2) + filled[half]++);
      }
    }
    __syncwarp();
  }
  for (u32 r = lane; r < rows; r += 32) {
    const u64 source = first + from[r], number = (to[r] & MOVES ? moved : first) + (to[r] & 127);
    a.keys[number] = a.old_keys[source], a.scores[number] = a.old_scores[source];
    a.digests[number] = a.old_digests[source];
  }
  const u32 units = a.row_bytes / UNIT;
  for (u32 at = lane; at < rows * units; at += 4 * 32) {
    unit row[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      const u32 r = (at + 32 * k) / units;
      if (r < rows)
        row[k] = __ldcg((const unit*)row_at(a.old_rows, a.old_host_rows, a.device_slots,
                                            a.row_bytes, first + from[r]) +
                        (at + 32 * k) % units);
    }
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      const u32 r = (at + 32 * k) / units;
      if (r < rows)
        ((unit*)row_at(a.rows, a.host_rows, a.device_slots, a.row_bytes,
                       (to[r] & MOVES ? moved : first) + (to[r] & 127)))[(at + 32 * k) % units] =
            row[k];
    }
  }
}
