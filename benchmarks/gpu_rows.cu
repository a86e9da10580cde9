// Gathers of rows by number that decode them to float32, in many shapes; the fastest is the floor
// of a fetch that decodes. gpu_rows.py launches them. For measurements only.
#include "row_formats.cuh"

struct DecodeArgs {
  const char* rows;
  const u32* numbers;  // (n,)
  float* out;          // (n, DIM)
  u32 n;
  u32 stride;
};

// Four values a lane, ROWS rows a lane: all their loads before the first store. A warp's rows are
// neighbours in `out`.
template <u32 FORMAT, int DIM, int ROWS, int BLOCK_THREADS>
__global__ void __launch_bounds__(BLOCK_THREADS) decode(const __grid_constant__ DecodeArgs a) {
  constexpr int T = DIM / 4, STEP = 32 / T, BYTES = value_bits(FORMAT) / 2;
  const int lane = threadIdx.x % 32, rank = lane % T;
  const u32 warp = blockIdx.x * (BLOCK_THREADS / 32) + threadIdx.x / 32;
  const u32 first = warp * STEP * ROWS + lane / T;
  const char* from[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const u32 i = first + r * STEP;
    from[r] = a.rows + (size_t)(i < a.n ? __ldcs(a.numbers + i) : 0) * a.stride;
  }
  u32 raw[ROWS][(BYTES + 3) / 4], tail[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    load_words<BYTES>(raw[r], from[r] + rank * BYTES);
    tail[r] = 0;
    if (is_scaled(FORMAT)) load_words<4>(&tail[r], from[r] + value_bytes(FORMAT, DIM));
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const u32 i = first + r * STEP;
    if (i >= a.n) continue;
    const Scale by = scale_of(FORMAT, tail[r]);
    float4 value;
    value.x = value_of(FORMAT, raw[r], 0, by), value.y = value_of(FORMAT, raw[r], 1, by);
    value.z = value_of(FORMAT, raw[r], 2, by), value.w = value_of(FORMAT, raw[r], 3, by);
    __stcs((float4*)(a.out + (size_t)i * DIM) + rank, value);
  }
}
