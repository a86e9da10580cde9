// NVE's embedding cache, asked as our cache is: gpu_nve DIM ROWS. All keys hit; NVE keeps no
// recency of its own accord.
#include <cassert>
#include <cstdarg>

#include "ecache/embedding_cache_combined.cuh"
#include "ecache/embedding_cache_combined.h"
#include "gpu_common.cuh"

struct Plain : nve::Allocator {
  cudaError_t device_allocate(void** at, size_t size, int) noexcept override {
    return cudaMalloc(at, size);
  }
  cudaError_t device_free(void* at, int) noexcept override { return cudaFree(at); }
  cudaError_t host_allocate(void** at, size_t size) noexcept override {
    return cudaMallocHost(at, size);
  }
  cudaError_t host_free(void* at) noexcept override { return cudaFreeHost(at); }
};

using Cache = nve::CacheSAHostModify<int64_t, int64_t>;

void good(nve::ECError error) {
  if (error != ECERROR_SUCCESS) {
    fprintf(stderr, "NVE: error %u\n", error);
    exit(1);
  }
}

int main(int, char** argv) {
  const int dim = atoi(argv[1]);
  const size_t rows = strtoull(argv[2], nullptr, 10), held = rows * 3 / 4,
               width = dim * sizeof(float);
  Plain allocator;
  nve::Logger logger;
  Cache::CacheConfig config;
  config.cache_sz_in_bytes = rows * (width + sizeof(int64_t));
  config.embed_width_in_bytes = width;
  Cache cache(&allocator, &logger, config);
  good(cache.init());
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  nve::LookupContextHandle lookup;
  nve::ModifyContextHandle modify;
  good(cache.lookup_context_create(lookup, nullptr, 0));
  good(cache.modify_context_create(modify, CALL));
  nve::DefaultECEvent event(std::vector<cudaStream_t>{stream});
  int8_t* vectors = on_device<int8_t>(CALL * width);
  std::vector<int64_t> some(CALL);
  std::vector<float> priority(CALL, 1.0f);
  std::vector<const int8_t*> data(CALL, vectors);
  for (uint64_t first = 0; first < held; first += CALL) {
    for (size_t i = 0; i < CALL; i++) some[i] = first + i;
    good(cache.insert(modify, some.data(), priority.data(), data.data(),
                      std::min(CALL, held - first), 0, &event, stream));
    CHECK(cudaStreamSynchronize(stream));
  }
  int64_t* keys = on_device<int64_t>(CALL);
  int8_t* out = on_device<int8_t>(CALL * width);
  uint64_t* missing = on_device<uint64_t>(CALL);
  int64_t* missing_keys = on_device<int64_t>(CALL);
  size_t* missed = on_device<size_t>(1);
  for (size_t n : {CALL, (size_t)26 * 1024}) {
    auto any = [&](int turn) {
      random_keys<<<blocks(n), 256, 0, stream>>>(keys, n, held, turn);
      CHECK(cudaMemsetAsync(missed, 0, sizeof(size_t), stream));
    };
    report(
        "nve", "lookup", dim, rows, n, device_time(stream, any, [&] {
          good(cache.lookup(lookup, keys, n, out, missing, missing_keys, missed, 0, width, stream));
        }));
    size_t count;
    CHECK(cudaMemcpy(&count, missed, sizeof(count), cudaMemcpyDeviceToHost));
    fprintf(stderr, "NVE: %zu of %zu keys missed\n", count, n);
    report("nve", "lookup, table behind", dim, rows, n, device_time(stream, any, [&] {
             good(cache.lookup(lookup, keys, n, out, vectors, 0, width, stream));
           }));
  }
  _Exit(0);
}
