// The peer of benchmarks/updates.py: what an update costs in RocksDB from C++, one thread.
//
//   rocksdb_updates FOLDER FAMILY VALUE_BYTES
//
// opens the database for writing with the options that ours has, and says "ready". Then for each
// line "FILE BATCH" of its input it reads FILE, records of an 8-byte stored key and a value that
// begins with its version (u64, little endian), and applies BATCH of them after the other: sorts
// them, asks for what is stored by MultiGet, leaves out what is older, writes the rest by one
// WriteBatch through the log. It says "WRITTEN CPU_SECONDS WALL_SECONDS".

#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <numeric>
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

uint64_t version_of(const char* value) {
  uint64_t version;
  std::memcpy(&version, value, sizeof version);
  return version;
}

size_t apply(rocksdb::DB& db, rocksdb::ColumnFamilyHandle* family, const char* records,
             size_t count, size_t value_bytes) {
  const size_t record_bytes = kKeyBytes + value_bytes;
  std::vector<const char*> sorted(count);
  for (size_t i = 0; i < count; ++i) sorted[i] = records + i * record_bytes;
  std::sort(sorted.begin(), sorted.end(),
            [](const char* a, const char* b) { return std::memcmp(a, b, kKeyBytes) < 0; });
  std::vector<rocksdb::Slice> names;
  names.reserve(count);
  for (const char* each : sorted) names.emplace_back(each, kKeyBytes);
  std::vector<rocksdb::PinnableSlice> values(count);
  std::vector<rocksdb::Status> statuses(count);
  db.MultiGet(rocksdb::ReadOptions(), family, count, names.data(), values.data(), statuses.data(),
              /*sorted_input=*/true);
  rocksdb::WriteBatch batch;
  size_t written = 0;
  for (size_t i = 0; i < count; ++i) {
    const char* value = sorted[i] + kKeyBytes;
    const bool older = statuses[i].ok() && values[i].size() >= sizeof(uint64_t) &&
                       version_of(value) < version_of(values[i].data());
    if (older) continue;
    batch.Put(family, names[i], rocksdb::Slice(value, value_bytes));
    ++written;
  }
  const rocksdb::Status status = db.Write(rocksdb::WriteOptions(), &batch);
  if (!status.ok()) std::exit(fail(status));
  return written;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string folder = argv[1], name = argv[2];
  const size_t value_bytes = std::strtoull(argv[3], nullptr, 10);

  rocksdb::BlockBasedTableOptions blocks;
  blocks.no_block_cache = true;
  blocks.block_size = 1024;
  blocks.format_version = 5;
  blocks.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
  blocks.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10, false));
  rocksdb::Options options;
  options.compression = rocksdb::kNoCompression;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(blocks));
  options.max_background_jobs = 8;
  options.db_write_buffer_size = 64 << 20;
  options.write_buffer_size = 4 << 20;
  options.max_write_buffer_number = 8;
  options.level0_file_num_compaction_trigger = 8;
  options.arena_block_size = 64 << 10;
  options.max_total_wal_size = 256 << 20;
  options.max_open_files = -1;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;

  std::vector<std::string> names;
  rocksdb::Status status = rocksdb::DB::ListColumnFamilies(options, folder, &names);
  if (!status.ok()) return fail(status);
  std::vector<rocksdb::ColumnFamilyDescriptor> descriptors;
  for (const std::string& each : names) descriptors.emplace_back(each, options);
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  rocksdb::DB* opened = nullptr;
  status = rocksdb::DB::Open(options, folder, descriptors, &handles, &opened);
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
    const std::string records = read_file(file);
    const size_t record_bytes = kKeyBytes + value_bytes, count = records.size() / record_bytes;
    size_t written = 0;
    const double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID), wall = seconds(CLOCK_MONOTONIC);
    for (size_t at = 0; at < count; at += batch) {
      written += apply(*db, family, records.data() + at * record_bytes, std::min(batch, count - at),
                       value_bytes);
    }
    std::cout << written << ' ' << seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu << ' '
              << seconds(CLOCK_MONOTONIC) - wall << std::endl;
  }
  for (auto* handle : handles) db->DestroyColumnFamilyHandle(handle);
  return 0;
}
