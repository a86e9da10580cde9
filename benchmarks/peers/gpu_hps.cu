// HPS's embedding cache and static table, asked as our cache is: gpu_hps DIM ROWS.
#include <limits>
#include <memory>
#include <nv_gpu_cache.hpp>
#include <static_table.hpp>

#include "gpu_common.cuh"

using Key = long long;
using Cache = gpu_cache::gpu_cache<Key, uint64_t, std::numeric_limits<Key>::max(),
                                   SET_ASSOCIATIVITY, SLAB_SIZE>;
using Static = gpu_cache::static_table<Key, float, float>;

int main(int, char** argv) {
  const int dim = atoi(argv[1]);
  const size_t rows = strtoull(argv[2], nullptr, 10), held = rows * 3 / 4;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  Key* keys = on_device<Key>(CALL);
  float* vectors = on_device<float>(CALL * dim);
  uint64_t* missing = on_device<uint64_t>(CALL);
  Key* missing_keys = on_device<Key>(CALL);
  size_t* missed = on_device<size_t>(1);
  auto range = [&](uint64_t first) {
    range_keys<<<blocks(CALL), 256, 0, stream>>>((int64_t*)keys, CALL, first, 1);
  };
  auto say = [&](const char* what, size_t n, double seconds) {
    report("hps", what, dim, rows, n, seconds);
  };
  const size_t small = 26 * 1024;
  auto few = [&](int turn) {
    random_keys<<<blocks(small), 256, 0, stream>>>((int64_t*)keys, small, held, turn);
  };
  auto any = [&](int turn) {
    random_keys<<<blocks(CALL), 256, 0, stream>>>((int64_t*)keys, CALL, held, turn);
  };
  {
    Cache cache(rows / (SET_ASSOCIATIVITY * SLAB_SIZE), dim);
    for (uint64_t first = 0; first < held; first += CALL) {
      range(first);
      cache.Replace(keys, CALL, vectors, stream);
    }
    auto query = [&](size_t n) {
      cache.Query(keys, n, vectors, missing, missing_keys, missed, stream);
    };
    say("query", CALL, device_time(stream, any, [&] { query(CALL); }));
    say("query", small, device_time(stream, few, [&] { query(small); }));
    uint64_t next = 1ULL << 40;
    say("replace", CALL,
        host_time(
            stream, 20, [&](int) { range(next += CALL); },
            [&] { cache.Replace(keys, CALL, vectors, stream); }));
    say("update", CALL,
        host_time(stream, 20, any, [&] { cache.Update(keys, CALL, vectors, stream); }));
  }
  Static table(held + CALL, dim);
  for (uint64_t first = 0; first < held; first += CALL) {
    range(first);
    table.Add(keys, CALL, vectors, nullptr, stream);
  }
  CHECK(cudaStreamSynchronize(stream));
  say("static query", CALL,
      device_time(stream, any, [&] { table.Query(keys, CALL, vectors, stream); }));
  say("static query", small,
      device_time(stream, few, [&] { table.Query(keys, small, vectors, stream); }));
  fflush(stdout);
  _Exit(0);
}
