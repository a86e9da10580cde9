// Rows of a warp in shared memory: copied there asynchronously, so that rows on their way take no
// registers.
#pragma once

#include "search.cuh"

// Copies 16 bytes to shared memory, past the first-level cache.
template <bool KEEP>
__device__ __forceinline__ void copy_unit(void* to, const char* from) {
  const u32 at = (u32)__cvta_generic_to_shared(to);
  if constexpr (KEEP)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(at),
                 "l"(from), "l"(keep_policy())
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

// Waits for the warp's copies.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// Room for AT_ONCE rows of each LANES lanes of a warp, BYTES each, in whole units of 16 bytes: the
// first ones of all lanes, then the second ones, and so on.
template <int BYTES, int LANES, int AT_ONCE>
struct StagedRows {
  static constexpr int UNITS = (BYTES + 15) / 16, ROWS = 32 / LANES;
  uint4 of[AT_ONCE * ROWS][UNITS];

  // Starts to copy `count` rows of each LANES lanes, those from `from` on: `row` is this lane's
  // row, or NO_ROW.
  template <bool KEEP, int UNROLL, typename P>
  __device__ __forceinline__ void load(const P& p, u32 row, int from, int count) {
#pragma unroll UNROLL
    for (int first = 0; first < count * ROWS * UNITS; first += 32) {
      const int unit = first + (threadIdx.x & 31), slot = unit / UNITS;
      const u32 number = __shfl_sync(WARP, row, slot % ROWS * LANES + slot / ROWS + from);
      if (unit < count * ROWS * UNITS && number != NO_ROW)
        copy_unit<KEEP>(of[0] + unit, row_at(p, number, p.stride) + 16 * (unit % UNITS));
    }
  }
};
