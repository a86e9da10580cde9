// clear, export and gather: launches over the whole table or over row numbers.
//
// One writer or none beside; readers may run beside export and gather. Twin: TwinTable.resident.
#include "hash_table.cuh"

struct ScanArgs {
  char* lines;
  const char* rows;
  const u64* row_versions;
  const u64* fillers;  // clear: (buckets,), or null to leave the keys as they are
  u64* keys;           // export: (·,) or null to count only
  u32* numbers;        // export, gather: (·,) row numbers
  u8* ages;            // export: (·,)
  u64* versions;       // gather: (·,) or null
  char* out;           // gather: (·, dim)
  u64* count;          // export: rows, tombstones
  u64 limit;           // export: room in keys
  u32 buckets;
  u32 stride;
  u32 row_bytes;
  u32 n;
  u32 now;
  u32 max_age;
};

static_assert(sizeof(ScanArgs) == 112, "as launch.py has it");

// With fillers: a new table, every slot owning the row of its own number; nothing else may run.
// Without: every slot empty, beside readers. A thread per slot.
__global__ void __launch_bounds__(BLOCK) clear_kernel(const __grid_constant__ ScanArgs a) {
  const u64 at = (u64)blockIdx.x * BLOCK + threadIdx.x;
  if (at >= (u64)a.buckets * WAYS) return;
  char* line = line_at(a.lines, (u32)(at / WAYS));
  const int slot = at % WAYS;
  u32* word = word_at(line, slot);
  if (!a.fillers) {
    *(volatile u32*)word = EMPTY | (*word & ROW_MASK);
    return;
  }
  ((u64*)line)[slot] = a.fillers[at / WAYS];
  *word = EMPTY | (u32)at;
  if (slot == 0) *(u64*)(line + STAMPS_AT) = 0;
}

// Keys, row numbers and ages of the resident rows not older than max_age ticks. A thread per slot.
__global__ void __launch_bounds__(BLOCK) export_kernel(const __grid_constant__ ScanArgs a) {
  const u64 at = (u64)blockIdx.x * BLOCK + threadIdx.x;
  const bool real = at < (u64)a.buckets * WAYS;
  char* line = line_at(a.lines, real ? (u32)(at / WAYS) : 0);
  const int slot = at % WAYS;
  const u32 word = real ? *word_at(line, slot) : EMPTY;
  const u32 stamp = (u32)(*(const u64*)(line + STAMPS_AT) >> (slot * STAMP_BITS));
  const u32 age = (a.now - stamp) & (AGES - 1);
  const bool wanted = !(word & CLAIMED) && age <= a.max_age;
  const u32 votes = __ballot_sync(0xffffffffu, wanted);
  const u32 tombstones = __ballot_sync(0xffffffffu, (word & CLAIMED) == TOMBSTONE);
  const int lane = threadIdx.x & 31;
  u64 start = 0;
  if (lane == 0) {
    if (votes) start = atomicAdd(&a.count[0], (u64)__popc(votes));
    if (tombstones) atomicAdd(&a.count[1], (u64)__popc(tombstones));
  }
  start = __shfl_sync(0xffffffffu, start, 0) + __popc(votes & ((1u << lane) - 1));
  if (!wanted || !a.keys || start >= a.limit) return;
  a.keys[start] = ((const u64*)line)[slot];
  a.numbers[start] = word;
  a.ages[start] = (u8)age;
}

// Rows by number: what fetch would cost if no key had to be looked for. A tile of T threads per
// row.
template <int T, int UNIT>
__global__ void __launch_bounds__(BLOCK) gather_kernel(const __grid_constant__ ScanArgs a) {
  typedef typename Unit<UNIT>::type unit;
  const Tile<T> tile;
  const u32 i = (blockIdx.x * BLOCK + threadIdx.x) / T;
  if (i >= a.n) return;
  const size_t row = a.numbers[i];
  if (a.versions && tile.rank == 0) a.versions[i] = a.row_versions[row];
  const unit* from = (const unit*)(a.rows + row * a.stride);
  unit* to = (unit*)(a.out + (size_t)i * a.row_bytes);
  for (int c = tile.rank; c < (int)a.row_bytes / UNIT; c += T) {
    if (UNIT == 16)
      __stcs(to + c, __ldg(from + c));
    else
      to[c] = __ldg(from + c);
  }
}
