// scatter_kernel: write rows found in host memory to their positions; all tables in one launch.
//
// Per part: rows (·, dim), row_versions (·,) u64, sources (·,) u8 of distinct keys; picks (n,) i64
// into them, or null for the i-th; positions (n,) i64 into out (·, dim), versions (·,) u64, source
// (·,) u8. A source of UNANSWERED writes nothing, a source of 0 (a deleted key) writes only the
// version. The inputs may be in pinned host memory. Launch: BLOCK threads; a tile of T threads
// works on a row; a part begins at a block. Twin: NumPy indexing.
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
  if (tile.rank == 0) p.versions[at] = p.row_versions[pick];
  if (!source) return;
  if (tile.rank == 0) p.source[at] = source;
  const unit* from = (const unit*)(p.rows + pick * p.row_bytes);
  unit* to = (unit*)(p.out + at * p.row_bytes);
  for (int c = tile.rank; c < (int)p.row_bytes / UNIT; c += T) to[c] = from[c];
}
