// Gathers of rows by number, in many shapes; the fastest is the floor of a fetch's time.
// gpu_gather.py launches them. For measurements only.

typedef unsigned int u32;
typedef unsigned long long u64;

struct GatherArgs {
  const uint4* rows;
  const u32* numbers;  // (n,)
  uint4* out;          // (n, UNITS)
  u32 n;
  u32 unused;
};

__device__ __forceinline__ u64 keep_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 pass_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}

#define LOAD(instruction)                                          \
  asm volatile(instruction " {%0, %1, %2, %3}, [%4];"              \
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)        \
               : "l"(from))
#define LOAD_WITH(instruction, policy)                             \
  asm volatile(instruction " {%0, %1, %2, %3}, [%4], %5;"          \
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)        \
               : "l"(from), "l"(policy))

// LOADS: 0 the default, 1 kept in the second-level cache, 2 not in the first, 3 both, 4 evicted
// first from the second.
template <int LOADS>
__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 v;
  if (LOADS == 0) LOAD("ld.global.nc.v4.u32");
  if (LOADS == 1) LOAD_WITH("ld.global.nc.L2::cache_hint.v4.u32", keep_policy());
  if (LOADS == 2) LOAD("ld.global.nc.L1::no_allocate.v4.u32");
  if (LOADS == 3)
    LOAD_WITH("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32", keep_policy());
  if (LOADS == 4) LOAD_WITH("ld.global.nc.L2::cache_hint.v4.u32", pass_policy());
  return v;
}

// STORES: 0 streaming, 1 the default, 2 evicted first from the second-level cache.
template <int STORES>
__device__ __forceinline__ void store(uint4* to, uint4 v) {
  if (STORES == 0) __stcs(to, v);
  if (STORES == 1) *to = v;
  if (STORES == 2)
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w), "l"(pass_policy())
                 : "memory");
}

// Rows of UNITS 16-byte units, THREADS threads a row, ROWS rows a thread: all their loads before
// the first store. A warp's rows are neighbours in `out`.
template <int UNITS, int THREADS, int ROWS, int LOADS, int STORES, int BLOCK>
__global__ void __launch_bounds__(BLOCK) gather(const __grid_constant__ GatherArgs a) {
  constexpr int EACH = UNITS / THREADS, STEP = 32 / THREADS;
  const int lane = threadIdx.x % 32, rank = lane % THREADS;
  const u32 warp = blockIdx.x * (BLOCK / 32) + threadIdx.x / 32;
  const u32 first = warp * STEP * ROWS + lane / THREADS;
  const uint4* from[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const u32 i = first + r * STEP;
    from[r] = a.rows + (size_t)(i < a.n ? __ldcs(a.numbers + i) : 0) * UNITS + rank;
  }
  uint4 value[ROWS][EACH];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int m = 0; m < EACH; m++) value[r][m] = load<LOADS>(from[r] + m * THREADS);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const u32 i = first + r * STEP;
    if (i >= a.n) continue;
    uint4* to = a.out + (size_t)i * UNITS + rank;
#pragma unroll
    for (int m = 0; m < EACH; m++) store<STORES>(to + m * THREADS, value[r][m]);
  }
}
