// partition_kernel: divide keys by their owners, the GPUs over which a table is split.
//
// keys (·,) i64; positions (count,) u32 into them, or null for 0 … n - 1; lists (owners, n) i64 are
// the positions of each owner's keys, in no order, and grouped (owners, n) i64 the keys; counts
// (owners,) u32 must be zero before. Launch: a thread per position, n of them at least. Reads no
// table. Twin: owners.py partition.
#include "hash_table.cuh"

constexpr int MOST_OWNERS = 16;

struct PartitionArgs {
  const u64* keys;
  const u32* positions;  // or null
  const u32* count;      // with positions: how many there are
  u64* lists;
  u64* grouped;  // or null
  u32* counts;
  u32 n;
  u32 owners;
  u32 left_out;  // an owner whose keys are not listed, or NO_ROW
  u32 unused;
};

static_assert(sizeof(PartitionArgs) == 64, "must equal launch.PARTITION_ARGS");

// The hash is mixed once more: its own bits choose the bucket.
__device__ __forceinline__ u32 owner_of(u64 key, u32 owners) {
  return __umulhi((u32)(mix(mix(key)) >> 32), owners);
}

__global__ void __launch_bounds__(BLOCK) partition_kernel(const __grid_constant__ PartitionArgs a) {
  __shared__ u32 here[MOST_OWNERS], start[MOST_OWNERS];
  if (threadIdx.x < MOST_OWNERS) here[threadIdx.x] = 0;
  __syncthreads();
  const u32 i = blockIdx.x * BLOCK + threadIdx.x;
  const u32 lane = threadIdx.x & 31, count = a.positions ? *a.count : a.n;
  u32 at = i, owner = NO_ROW, before = 0;
  u64 key = 0;
  if (i < count) {
    if (a.positions) at = a.positions[i];
    key = a.keys[at];
    owner = owner_of(key, a.owners);
    if (owner == a.left_out) owner = NO_ROW;
  }
  // One addition to the block's count for the lanes of a warp with the same owner.
  const u32 same = __match_any_sync(0xffffffffu, owner);
  const u32 first = __ffs(same) - 1;
  if (owner != NO_ROW && lane == first) before = atomicAdd(&here[owner], __popc(same));
  before = __shfl_sync(0xffffffffu, before, first) + __popc(same & ((1u << lane) - 1));
  __syncthreads();
  if (threadIdx.x < a.owners && here[threadIdx.x])
    start[threadIdx.x] = atomicAdd(&a.counts[threadIdx.x], here[threadIdx.x]);
  __syncthreads();
  if (owner == NO_ROW) return;
  const size_t to = (size_t)owner * a.n + start[owner] + before;
  a.lists[to] = at;
  if (a.grouped) a.grouped[to] = key;
}
