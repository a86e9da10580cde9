// What the drivers of the GPU cache's peers share: keys, times, results.
//
// Every driver is asked as benchmarks/gpu_cache.py asks ours: fresh random keys among those held
// for each call, medians of 30 calls after 6 to warm up, CUDA events for reads with the device kept
// busy before each, the host's clock for what waits. One line of JSON per figure, in 10^9 keys a
// second.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                   \
  do {                                                                                \
    const cudaError_t error_ = (call);                                                \
    if (error_ != cudaSuccess) {                                                      \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
      exit(1);                                                                        \
    }                                                                                 \
  } while (0)

constexpr size_t CALL = 1 << 20;
constexpr int ROUNDS = 30, WARM_UP = 6;

__global__ void random_keys(int64_t* keys, size_t n, uint64_t held, uint64_t seed,
                            uint64_t first = 0) {
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint64_t h = seed * 0x9e3779b97f4a7c15ULL + i;
  h ^= h >> 33, h *= 0xff51afd7ed558ccdULL, h ^= h >> 33, h *= 0xc4ceb9fe1a85ec53ULL, h ^= h >> 33;
  keys[i] = (int64_t)(first + h % held);
}

// The numbers first … first + n - 1, or a permutation of them.
__global__ void range_keys(int64_t* keys, size_t n, uint64_t first, uint64_t factor) {
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) keys[i] = (int64_t)(first + i * factor % n);
}

__global__ void spin(long long cycles) {
  const long long end = clock64() + cycles;
  while (clock64() < end) {
  }
}

template <typename T>
T* on_device(size_t n) {
  T* pointer;
  CHECK(cudaMalloc(&pointer, n * sizeof(T)));
  CHECK(cudaMemset(pointer, 1, n * sizeof(T)));
  return pointer;
}

inline unsigned blocks(size_t n) { return (unsigned)((n + 255) / 256); }

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Seconds that `work` takes on `stream`, by events.
template <typename Prepare, typename Work>
double device_time(cudaStream_t stream, Prepare prepare, Work work) {
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  for (int turn = 0; turn < WARM_UP + ROUNDS; turn++) {
    prepare(turn);
    spin<<<1, 1, 0, stream>>>(600000);
    CHECK(cudaEventRecord(start, stream));
    work();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, end));
    if (turn >= WARM_UP) times.push_back(ms / 1e3);
  }
  return median(times);
}

// Seconds until `work` is done on `stream`, by the host's clock.
template <typename Prepare, typename Work>
double host_time(cudaStream_t stream, int rounds, Prepare prepare, Work work) {
  std::vector<double> times;
  for (int turn = 0; turn < rounds + 1; turn++) {
    prepare(turn);
    CHECK(cudaStreamSynchronize(stream));
    const auto start = std::chrono::steady_clock::now();
    work();
    CHECK(cudaStreamSynchronize(stream));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (turn) times.push_back(took.count());
  }
  return median(times);
}

inline void report(const char* peer, const char* what, int dim, size_t capacity, size_t keys,
                   double seconds) {
  printf(
      "{\"peer\": \"%s\", \"what\": \"%s\", \"dim\": %d, \"rows\": %zu, \"keys\": %zu, \"rate\": "
      "%.4f}\n",
      peer, what, dim, capacity, keys, keys / seconds / 1e9);
  fflush(stdout);
}
