// Arguments of the kernels that pool rows of the cache: pool.cu, pool_warp.cu.
#pragma once

#include "row_formats.cuh"

struct PoolPart {
  char* lines;
  const char* rows;
  const char* host_rows;
  const u64* keys;
  const i64* offsets;
  const float* weights;
  char* out;
  u32 buckets;
  u32 stride;
  u32 dim;
  u32 on_device;
  u32 bags;
  u32 hotness;
  u32 first_block;
  u32 now;
  u32 policy;
  u32 mean;    // else the sum
  u32 half;    // out is float16, else float32
  u32 hidden;  // see row_mask
  u32 format;  // of the rows
  u32 each;    // pool_warp_kernel: bags a warp
};

constexpr int PARTS = 32;

struct PoolArgs {
  u32* missing;
  u32* done;    // (1,) the number of blocks that have ended
  u32* result;  // in host memory: receives missing, which is reset to zero
  u32 parts;
  u32 unused;
  PoolPart part[PARTS];
};

static_assert(sizeof(PoolPart) == 112, "must equal launch.POOL_PART");
static_assert(sizeof(PoolArgs) == 32 + PARTS * 112, "must equal launch.POOL_ARGS");
