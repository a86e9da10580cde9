// The peer of benchmarks/stores_rocksdb.py: RocksDB's own batched read from C++, one thread.
//
//   rocksdb_multiget FOLDER FAMILY VALUE_BYTES MMAP
//
// opens the database for reading, without a block cache as ours, and says "ready". Then for each
// line "FILE BATCH" of its input it reads FILE, sorted 8-byte keys in batches of BATCH, asks for
// one batch after the other, copies what it finds into one array, and says "FOUND CPU_SECONDS
// WALL_SECONDS".

#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <time.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr size_t kKeyBytes = 8;

double seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

int fail(const rocksdb::Status& status) {
  std::cerr << status.ToString() << std::endl;
  return 1;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

size_t fetch(rocksdb::DB& db, rocksdb::ColumnFamilyHandle* family, const char* keys, size_t batch,
             size_t value_bytes, std::vector<char>& out) {
  std::vector<rocksdb::Slice> names;
  names.reserve(batch);
  for (size_t i = 0; i < batch; ++i) names.emplace_back(keys + i * kKeyBytes, kKeyBytes);
  std::vector<rocksdb::PinnableSlice> values(batch);
  std::vector<rocksdb::Status> statuses(batch);
  db.MultiGet(rocksdb::ReadOptions(), family, batch, names.data(), values.data(), statuses.data(),
              /*sorted_input=*/true);
  size_t found = 0;
  for (size_t i = 0; i < batch; ++i) {
    if (!statuses[i].ok() || values[i].size() != value_bytes) continue;
    std::memcpy(out.data() + i * value_bytes, values[i].data(), value_bytes);
    ++found;
  }
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const std::string folder = argv[1], name = argv[2];
  const size_t value_bytes = std::strtoull(argv[3], nullptr, 10);

  rocksdb::BlockBasedTableOptions blocks;
  blocks.no_block_cache = true;
  blocks.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10, false));
  rocksdb::ColumnFamilyOptions columns;
  columns.table_factory.reset(rocksdb::NewBlockBasedTableFactory(blocks));
  rocksdb::DBOptions options;
  options.allow_mmap_reads = argv[4][0] == '1';
  options.max_open_files = -1;

  std::vector<std::string> names;
  rocksdb::Status status = rocksdb::DB::ListColumnFamilies(options, folder, &names);
  if (!status.ok()) return fail(status);
  std::vector<rocksdb::ColumnFamilyDescriptor> descriptors;
  for (const std::string& each : names) descriptors.emplace_back(each, columns);
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  rocksdb::DB* opened = nullptr;
  status = rocksdb::DB::OpenForReadOnly(options, folder, descriptors, &handles, &opened);
  if (!status.ok()) return fail(status);
  std::unique_ptr<rocksdb::DB> db(opened);
  rocksdb::ColumnFamilyHandle* family = nullptr;
  for (auto* handle : handles) {
    if (handle->GetName() == name) family = handle;
  }
  if (family == nullptr) return fail(rocksdb::Status::NotFound(name));

  std::cout << "ready" << std::endl;
  std::string file;
  size_t batch = 0;
  while (std::cin >> file >> batch) {
    const std::string keys = read_file(file);
    std::vector<char> out(batch * value_bytes);
    size_t found = 0;
    const double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID), wall = seconds(CLOCK_MONOTONIC);
    for (size_t at = 0; at + batch * kKeyBytes <= keys.size(); at += batch * kKeyBytes) {
      found += fetch(*db, family, keys.data() + at, batch, value_bytes, out);
    }
    std::cout << found << ' ' << seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu << ' '
              << seconds(CLOCK_MONOTONIC) - wall << std::endl;
  }
  for (auto* handle : handles) db->DestroyColumnFamilyHandle(handle);
  return 0;
}
