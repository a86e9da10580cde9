// HierarchicalKV, asked as our cache and our table are: gpu_hkv DIM ROWS [half]. `half`: half of
// the rows in host memory, and nothing but find is timed.
#include "gpu_common.cuh"
#include "merlin_hashtable.cuh"

using Table = nv::merlin::HashTable<uint64_t, float, uint64_t, nv::merlin::EvictStrategy::kLru>;

int main(int argc, char** argv) {
  const int dim = atoi(argv[1]);
  const size_t rows = strtoull(argv[2], nullptr, 10), held = rows * 3 / 4;
  nv::merlin::HashTableOptions options;
  options.init_capacity = options.max_capacity = rows;
  options.dim = dim;
  const bool half = argc > 3;
  options.max_hbm_for_vectors = half ? rows / 2 * dim * sizeof(float) : nv::merlin::GB(100);
  options.max_load_factor = 1.0f;
  Table table;
  table.init(options);
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  uint64_t* keys = on_device<uint64_t>(CALL);
  int64_t* signed_keys = (int64_t*)keys;
  float* vectors = on_device<float>(CALL * dim);
  float** addresses = on_device<float*>(CALL);
  bool *found = on_device<bool>(CALL), *yes = on_device<bool>(CALL);
  uint64_t* evicted = on_device<uint64_t>(CALL);
  uint64_t* scores = on_device<uint64_t>(CALL);
  float* evicted_vectors = on_device<float>(CALL * dim);
  auto range = [&](uint64_t first, uint64_t factor) {
    range_keys<<<blocks(CALL), 256, 0, stream>>>(signed_keys, CALL, first, factor);
  };
  uint64_t first = 0, end = 0;  // keys inserted
  auto fill = [&](uint64_t until) {
    for (; end < until; end += CALL) {
      range(end, 1);
      table.insert_or_assign(CALL, keys, vectors, nullptr, stream);
    }
    CHECK(cudaStreamSynchronize(stream));
  };
  auto any = [&](int turn) {
    random_keys<<<blocks(CALL), 256, 0, stream>>>(signed_keys, CALL, end - first, turn, first);
  };
  auto say = [&](const char* what, double seconds) {
    report("hkv", what, dim, rows, CALL, seconds);
  };
  auto find_pointers = [&] { table.find(CALL, keys, addresses, found, nullptr, stream); };
  fill(rows / 2);
  if (!half) say("find*, load 0.5", device_time(stream, any, find_pointers));
  fill(held);
  say("find",
      device_time(stream, any, [&] { table.find(CALL, keys, vectors, found, nullptr, stream); }));
  if (half) return 0;
  say("find*", device_time(stream, any, find_pointers));
  say("contains", device_time(stream, any, [&] { table.contains(CALL, keys, found, stream); }));
  auto mixed = [&](int turn) { range((uint64_t)turn * CALL, 0x9e3779b1); };
  say("assign",
      host_time(stream, 20, mixed, [&] { table.assign(CALL, keys, vectors, nullptr, stream); }));
  say("accum_or_assign", host_time(stream, 20, mixed, [&] {
        table.accum_or_assign(CALL, keys, vectors, yes, nullptr, stream);
      }));
  size_t* counter = on_device<size_t>(1);
  say("export_batch", host_time(
                          stream, 20, [&](int) { CHECK(cudaMemset(counter, 0, sizeof(size_t))); },
                          [&] {
                            table.export_batch((size_t)(CALL / 0.75 * 0.99), 0, counter, keys,
                                               vectors, scores, stream);
                          }));
  auto fresh = [&](int) { range(end, 1), end += CALL; };
  say("insert_or_assign", host_time(stream, 4, fresh, [&] {
        table.insert_or_assign(CALL, keys, vectors, nullptr, stream);
      }));
  say("find_or_insert", host_time(stream, 4, fresh, [&] {
        table.find_or_insert(CALL, keys, vectors, nullptr, stream);
      }));
  fill(rows * 8 / 5);  // full
  say("insert_and_evict", host_time(stream, 20, fresh, [&] {
        table.insert_and_evict(CALL, keys, vectors, nullptr, evicted, evicted_vectors, scores,
                               stream);
      }));
  say("insert_or_assign, full", host_time(stream, 20, fresh, [&] {
        table.insert_or_assign(CALL, keys, vectors, nullptr, stream);
      }));
  say("find_or_insert, full", host_time(stream, 20, fresh, [&] {
        table.find_or_insert(CALL, keys, vectors, nullptr, stream);
      }));
  first = end - 8 * CALL;  // the last keys are there
  say("find*, load 1.0", device_time(stream, any, find_pointers));
}
