// scatter_kernel: write rows found in host memory to their positions; all tables in one launch.
//
// Per part: rows (·, dim), row_versions (·,) u64, sources (·,) u8 of distinct keys; picks (n,) i64
// into them, or null for the i-th; positions (n,) i64 into out (·, dim), versions (·,) u64, source
// (·,) u8 (or null). A source of UNANSWERED writes nothing, a source of 0 (a deleted key) writes
// only the version. The inputs may be in pinned host memory. Launch: BLOCK threads; a tile of T
// threads works on a row; a part begins at a block. Twin: NumPy indexing.
#include "hash_table.cuh"

struct ScatterPart {
  const char* rows;
  const u64* row_versions;
  const u8* sources;
  const i64* positions;
  const i64* picks;
  char* out;
  u64* versions;
  u8* source;
  u32 row_bytes;
  u32 n;
  u32 first_block;
  u32 unused;
};

constexpr int PARTS = 32;
constexpr u8 UNANSWERED = 255;

struct ScatterArgs {
  u32 parts;
  u32 unused;
  ScatterPart part[PARTS];
};

static_assert(sizeof(ScatterPart) == 80, "must equal launch.SCATTER_PART");
static_assert(sizeof(ScatterArgs) == 8 + PARTS * 80, "must equal launch.SCATTER_ARGS");

template <int T, int UNIT>
__global__ void __launch_bounds__(BLOCK) scatter_kernel(const __grid_constant__ ScatterArgs a) {
  typedef typename Unit<UNIT>::type unit;
  int index = 0;
  while (index + 1 < (int)a.parts && a.part[index + 1].first_block <= blockIdx.x) index++;
  const ScatterPart& p = a.part[index];
  const Tile<T> tile;
  const u32 i = (blockIdx.x - p.first_block) * (BLOCK / T) + threadIdx.x / T;
  if (i >= p.n) return;
  const i64 pick = p.picks ? p.picks[i] : i;
  const u8 source = p.sources[pick];
  if (source == UNANSWERED) return;
  const i64 at = p.positions[i];
  if (tile.rank == 0 && p.versions) p.versions[at] = p.row_versions[pick];
  if (!source) return;
  if (tile.rank == 0 && p.source) p.source[at] = source;
  const unit* from = (const unit*)(p.rows + pick * p.row_bytes);
  unit* to = (unit*)(p.out + at * p.row_bytes);
  for (int c = tile.rank; c < (int)p.row_bytes / UNIT; c += T) to[c] = from[c];
}

// place_kernel: write rows of missing keys, as fetch_kernel listed them, to their positions in the
// batch; all tables in one launch.
//
// positions (n,) u32 in the batch, in any order; row i at rows + i * stride; sources (n,) u8, where
// UNANSWERED writes nothing. Per part, which begins at position base: out (·, dim), source (·,) u8
// or null. The inputs may be in pinned host memory. Launch: BLOCK threads; a tile of T threads
// works on a row. Twin: NumPy indexing.
struct PlacePart {
  char* out;
  u8* source;
  u32 base;
  u32 row_bytes;
};

struct PlaceArgs {
  const u32* positions;
  const char* rows;
  const u8* sources;
  u32 n;
  u32 stride;
  u32 parts;
  u32 unused;
  PlacePart part[PARTS];
};

static_assert(sizeof(PlacePart) == 24, "must equal launch.PLACE_PART");
static_assert(sizeof(PlaceArgs) == 40 + PARTS * 24, "must equal launch.PLACE_ARGS");

template <int T, int UNIT>
__global__ void __launch_bounds__(BLOCK) place_kernel(const __grid_constant__ PlaceArgs a) {
  typedef typename Unit<UNIT>::type unit;
  const Tile<T> tile;
  const u32 i = blockIdx.x * (BLOCK / T) + threadIdx.x / T;
  if (i >= a.n) return;
  const u8 source = a.sources[i];
  if (source == UNANSWERED) return;
  const u32 position = a.positions[i];
  u32 index = 0, end = a.parts;  // the last part that begins at or before the position
  while (index + 1 < end) {
    const u32 middle = (index + end) / 2;
    if (a.part[middle].base <= position)
      index = middle;
    else
      end = middle;
  }
  const PlacePart& p = a.part[index];
  const size_t at = position - p.base;
  if (tile.rank == 0 && p.source) p.source[at] = source;
  const unit* from = (const unit*)(a.rows + (size_t)i * a.stride);
  unit* to = (unit*)(p.out + at * p.row_bytes);
  for (int c = tile.rank; c < (int)p.row_bytes / UNIT; c += T) to[c] = from[c];
}
