// clear, export and gather: launches over the whole table or over row numbers.
//
// Readers and one writer may run in parallel to export and gather. Twin: TwinTable.resident.
#include "hash_table.cuh"

struct ScanArgs {
  char* lines;
  const char* rows;
  const char* host_rows;
  const u64* row_versions;
  u64* keys;               // export: (·,) or null to count only
  u32* numbers;            // export, gather: (·,) row numbers
  u64* scores;             // export: (·,)
  u64* versions;           // gather: (·,) or null
  char* out;               // gather: (·, dim)
  u64* count;              // export: rows, tombstones
  u64 limit;               // export: the length of keys
  const u64* slot_scores;  // export: the caller's scores by slot, or null
  u64 least;               // export: the lowest rank to export
  u32 buckets;
  u32 stride;
  u32 row_bytes;
  u32 on_device;
  u32 n;
  u32 now;     // export: the reference of ranks
  u32 fresh;   // clear: 1 a new packed table, 2 a roomy one, 0 a packed one that has readers
  u32 hidden;  // see row_mask
};

static_assert(sizeof(ScanArgs) == 136, "must equal launch.SCAN_ARGS");

// Initializes a new packed table, while nothing else runs, or empties every slot, while readers may
// run. A thread per slot.
__global__ void __launch_bounds__(BLOCK) clear_kernel(const __grid_constant__ ScanArgs a) {
  const u64 at = (u64)blockIdx.x * BLOCK + threadIdx.x;
  if (at >= (u64)a.buckets * WAYS) return;
  char* slot = a.lines + at * SLOT_BYTES;
  if (a.fresh) {
    const Slot whole = {0, EMPTY | (a.fresh == 1 ? (u32)at : row_mask(a.hidden)), 0};
    store_slot(slot, whole);
  } else {
    store_word(slot, EMPTY | (*word_of(slot) & row_mask(a.hidden)));
  }
}

// Exports keys, row numbers and scores of the resident rows whose eviction rank is at least
// `least`. A thread per slot.
__global__ void __launch_bounds__(BLOCK) export_kernel(const __grid_constant__ ScanArgs a) {
  const u64 at = (u64)blockIdx.x * BLOCK + threadIdx.x;
  Slot slot = {0, EMPTY, 0};
  if (at < (u64)a.buckets * WAYS) slot = load_slot(a.lines + at * SLOT_BYTES);
  bool wanted = !(slot.word & (a.hidden | TOMBSTONE));
  const u64 score = wanted && a.slot_scores ? a.slot_scores[at] : slot.score;
  wanted = wanted && (a.slot_scores ? score : rank_of(slot.score, a.now)) >= a.least;
  const bool dead = (slot.word & (a.hidden | TOMBSTONE)) == TOMBSTONE;
  const u32 votes = __ballot_sync(0xffffffffu, wanted);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  __shared__ u32 before[BLOCK / 32];
  __shared__ u64 start;
  if (lane == 0) before[warp] = __popc(votes);
  const int tombstones = __syncthreads_count(dead);
  if (threadIdx.x == 0) {  // one addition per block, because all add to the same counter
    u32 total = 0;
    for (int w = 0; w < BLOCK / 32; w++) {
      const u32 here = before[w];
      before[w] = total;
      total += here;
    }
    start = total ? atomicAdd(&a.count[0], (u64)total) : 0;
    if (tombstones) atomicAdd(&a.count[1], (u64)tombstones);
  }
  __syncthreads();
  const u64 to = start + before[warp] + __popc(votes & ((1u << lane) - 1));
  if (!wanted || !a.keys || to >= a.limit) return;
  a.keys[to] = slot.key;
  a.numbers[to] = slot.word & row_mask(a.hidden);
  a.scores[to] = score;
}

// Copies rows by number: a fetch without the search, the lower bound of its cost. A tile of T
// threads per row.
template <int T, int UNIT>
__global__ void __launch_bounds__(BLOCK) gather_kernel(const __grid_constant__ ScanArgs a) {
  typedef typename Unit<UNIT>::type unit;
  const Tile<T> tile;
  const u32 i = (blockIdx.x * BLOCK + threadIdx.x) / T;
  if (i >= a.n) return;
  const u32 row = a.numbers[i];
  if (a.versions && tile.rank == 0) a.versions[i] = a.row_versions[row];
  const unit* from = (const unit*)row_at(a, row, a.stride);
  unit* to = (unit*)(a.out + (size_t)i * a.row_bytes);
  for (int c = tile.rank; c < (int)a.row_bytes / UNIT; c += T) {
    if (UNIT == 16)
      __stcs(to + c, __ldg(from + c));
    else
      to[c] = __ldg(from + c);
  }
}
