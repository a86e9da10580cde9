// The search of a warp for up to 32 keys together, of fetch_kernel and pool_warp_kernel.
#pragma once

#include "hash_table.cuh"

constexpr u32 WARP = 0xffffffffu;  // all lanes

template <bool KEEP>
__device__ __forceinline__ Slot load_slot(const char* at) {
  return KEEP ? load_slot_kept(at, keep_policy()) : load_slot(at);
}

// The keys of a warp, one a lane; lanes from KEYS on have no key.
struct Query {
  u64 key;
  u32 home;
  u32 word;   // of the slot that was found; EMPTY: none yet
  bool open;  // still searched
};

// A key that a warp searches outside its home half, and what this lane has read for it: a slot of
// `half` and, in the first four of eight lanes, one of `last`.
struct Rest {
  u64 key;
  u32 half, last;
  Slot one, two;
};

// Whether a hit counts as a use. Overloaded for the parts of a kernel that sees tombstones.
template <int USE, typename P>
__device__ __forceinline__ bool is_use(const P&, u32 word) {
  return !(word & TOMBSTONE);
}

// `P`: a kernel's part of one table, for which hidden_of(p) is defined.
template <int USE, bool STAMP, typename P>
__device__ __forceinline__ void stamp(const P& p, u32 half, int rank, const Slot& slot) {
  if (STAMP && is_use<USE>(p, slot.word))
    stamp_slot(slot_at(p.lines, half, rank), slot.score, p.now, p.policy);
}

// Searches the home halves of the warp's keys, those of the lanes in `keys`: four lanes read the
// half of a key, all loads before the first comparison.
template <int KEYS, int USE, bool STAMP, bool KEEP, typename P>
__device__ __forceinline__ void search_homes(const P& p, Query& q, u32 keys) {
  const int lane = threadIdx.x & 31, rank = lane & (HALF - 1), mine = 4 * (lane & 7);
  Slot slot[KEYS / 8];
  u32 home[KEYS / 8];
#pragma unroll
  for (int r = 0; r < KEYS / 8; r++) {
    home[r] = __shfl_sync(WARP, q.home, 8 * r + lane / HALF);
    if (KEYS < 32 || keys >> (8 * r + lane / HALF) & 1)
      slot[r] = load_slot<KEEP>(slot_at(p.lines, home[r], rank));
    else
      slot[r] = {0, EMPTY, 0};
  }
#pragma unroll
  for (int r = 0; r < KEYS / 8; r++) {
    if (KEYS == 32 && !(keys >> 8 * r & 255)) continue;
    const u64 key = __shfl_sync(WARP, q.key, 8 * r + lane / HALF);
    const bool hit = holds(slot[r], key, hidden_of(p)) && keys >> (8 * r + lane / HALF) & 1;
    const u32 hits = __ballot_sync(WARP, hit) >> mine & 15;
    const u32 word = __shfl_sync(WARP, slot[r].word, (mine + __ffs(hits) - 1) & 31);
    if (q.open && hits && lane / 8 == r) q.word = word, q.open = false;
    if (hit) stamp<USE, STAMP>(p, home[r], rank, slot[r]);
  }
}

// Loads the slots outside the home half of the first four keys of `todo`, eight lanes each.
template <bool KEEP, typename P>
__device__ __forceinline__ Rest load_rest(const P& p, const Query& q, u32 todo) {
  const int lane = threadIdx.x & 31, rank = lane & 7;
  for (int before = lane / 8; before > 0; before--) todo &= todo - 1;
  const int owner = (__ffs(todo) - 1) & 31;
  Rest rest = {__shfl_sync(WARP, q.key, owner), 0, 0, {0, EMPTY, 0}, {0, EMPTY, 0}};
  const u32 home = __shfl_sync(WARP, q.home, owner);
  const u32 second = second_half(mix(rest.key), p.buckets, home);
  rest.half = rank < HALF ? home ^ 1 : second;
  rest.last = second + 1;
  if (todo) {
    rest.one = load_slot<KEEP>(slot_at(p.lines, rest.half, rank & (HALF - 1)));
    if (rank < HALF) rest.two = load_slot<KEEP>(slot_at(p.lines, rest.last, rank));
  }
  return rest;
}

// Searches the other half and the second bucket of the open keys, four keys at a time.
template <int USE, bool STAMP, bool KEEP, typename P>
__device__ __forceinline__ void search_rest(const P& p, Query& q) {
  const int lane = threadIdx.x & 31;
  u32 todo;
  while ((todo = __ballot_sync(WARP, q.open))) {
    const Rest rest = load_rest<KEEP>(p, q, todo);
    const bool one = holds(rest.one, rest.key, hidden_of(p));
    const bool two = holds(rest.two, rest.key, hidden_of(p));
    const int order = __popc(todo & ((1u << lane) - 1));  // the key's among the open ones
    const u32 all = __ballot_sync(WARP, one || two), hits = order < 4 ? all >> 8 * order & 255 : 0;
    const u32 word =
        __shfl_sync(WARP, two ? rest.two.word : rest.one.word, (8 * order + __ffs(hits) - 1) & 31);
    if (q.open && hits) q.word = word;
    if (order < 4) q.open = false;
    if (one) stamp<USE, STAMP>(p, rest.half, lane & (HALF - 1), rest.one);
    if (two) stamp<USE, STAMP>(p, rest.last, lane & (HALF - 1), rest.two);
  }
}
