// Readers beside a writer: stress SECONDS [READERS [EVICTION]]. Every row tells its key and
// version, so a torn or a wrong one shows itself. Meant to be run under sanitizers: make
// check-native.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "hps/cache_table.hpp"

namespace {

constexpr std::size_t kKeys = 600, kBatch = 200;

std::uint64_t word(std::int64_t key, std::uint64_t version, std::size_t i) {
  std::uint64_t x = static_cast<std::uint64_t>(key) * 0x9E3779B97F4A7C15ULL + version + (i << 40);
  return (x ^ (x >> 31)) * 0xD6E8FEB86659FD93ULL;
}

// A row: its version, then words made of key, version and position.
void make_row(std::int64_t key, std::uint64_t version, std::uint8_t* row, std::size_t bytes) {
  std::memcpy(row, &version, 8);
  for (std::size_t i = 1; i < bytes / 8; ++i) {
    const std::uint64_t value = word(key, version, i);
    std::memcpy(row + 8 * i, &value, 8);
  }
}

std::uint64_t check_row(std::int64_t key, const std::uint8_t* row, std::size_t bytes) {
  std::uint64_t version;
  std::memcpy(&version, row, 8);
  for (std::size_t i = 1; i < bytes / 8; ++i) {
    std::uint64_t value;
    std::memcpy(&value, row + 8 * i, 8);
    if (value == word(key, version, i)) continue;
    std::printf("key %lld: torn row, word %zu\n", static_cast<long long>(key), i);
    std::exit(1);
  }
  return version;
}

void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

struct Soak {
  hps::CacheTable table;
  std::size_t row_bytes;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> reads{0}, writes{0};

  Soak(std::size_t capacity, std::size_t bytes, hps::Eviction eviction,
       const hps::ReadKernels& kernels)
      : table(capacity, bytes, eviction, kernels), row_bytes(bytes) {}

  void write() {
    std::mt19937_64 random(1);
    std::vector<std::int64_t> keys(kBatch);
    std::vector<std::uint64_t> versions(kBatch);
    std::vector<std::uint8_t> rows(kBatch * row_bytes);
    std::uint64_t version = 1;
    while (!stop) {
      const std::size_t n = 1 + random() % kBatch;
      for (std::size_t i = 0; i < n; ++i) {
        keys[i] = static_cast<std::int64_t>(random() % kKeys) - 5;
        versions[i] = ++version;
        make_row(keys[i], version, &rows[i * row_bytes], row_bytes);
      }
      const unsigned verb = random() % 8;
      if (verb == 0) {
        table.evict(keys.data(), n / 4);
      } else {
        const std::uint8_t* from = verb == 1 ? nullptr : rows.data();
        table.write({keys.data(), versions.data(), from, verb == 1 ? n / 4 : n, 0, verb == 2});
      }
      writes += n;
    }
  }

  void read(unsigned seed) {
    std::mt19937_64 random(seed);
    std::vector<std::int64_t> keys(kBatch), missing(kBatch), left(kBatch);
    std::vector<std::uint64_t> versions(kBatch), newest(kKeys, 0);
    std::vector<std::uint8_t> rows(kBatch * row_bytes), source(kBatch);
    while (!stop) {
      const std::size_t n = 1 + random() % kBatch;
      for (std::size_t i = 0; i < n; ++i) {
        keys[i] = static_cast<std::int64_t>(random() % kKeys) - 5;
        missing[i] = static_cast<std::int64_t>(i);
        source[i] = 0;
        versions[i] = 0;
      }
      const auto seen = [&](std::size_t i, std::uint64_t version) {
        std::uint64_t& last = newest[static_cast<std::size_t>(keys[i] + 5)];
        if (version < last) fail("an older version after a newer one");
        last = version;
      };
      if (random() % 2 == 0) {
        const std::size_t few = 1 + n % 4;
        if (table.gather(keys.data(), few, rows.data()))
          for (std::size_t i = 0; i < few; ++i)
            seen(i, check_row(keys[i], &rows[i * row_bytes], row_bytes));
      } else {
        const hps::CacheAnswer answer{rows.data(), versions.data(), source.data(), 2};
        const std::size_t gone =
            table.fetch(keys.data(), missing.data(), n, 0, answer, left.data());
        std::size_t unanswered = 0;
        for (std::size_t i = 0; i < n; ++i) {
          if (source[i] == 2 && check_row(keys[i], &rows[i * row_bytes], row_bytes) != versions[i])
            fail("a row beside another's version");
          if (versions[i] != 0) seen(i, versions[i]);
          unanswered += versions[i] == 0;
        }
        if (unanswered != gone) fail("a key both answered and left");
      }
      reads += n;
    }
  }
};

hps::Eviction eviction_of(const char* name) {
  const char* names[] = {"lru", "lfu", "random", "fifo"};
  for (unsigned i = 0; i < 4; ++i)
    if (std::strcmp(name, names[i]) == 0) return static_cast<hps::Eviction>(i);
  fail("EVICTION is lru, lfu, random or fifo");
  return hps::Eviction::kLru;
}

void soak(double seconds, unsigned readers, hps::Eviction eviction, std::size_t row_bytes,
          const hps::ReadKernels& kernels) {
  Soak soak(400, row_bytes, eviction, kernels);
  std::vector<std::thread> threads;
  threads.emplace_back([&] { soak.write(); });
  for (unsigned i = 0; i < readers; ++i) threads.emplace_back([&, i] { soak.read(i + 2); });
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  soak.stop = true;
  for (std::thread& thread : threads) thread.join();
  const hps::CacheCounts counts = soak.table.counts();
  if (counts.rows + counts.tombstones > 400) fail("more rows than the capacity");
  if (soak.table.top_k(10000).size() != counts.rows) fail("the count of rows is wrong");
  if (soak.reads == 0 || soak.writes == 0 || counts.evictions == 0) fail("nothing happened");
  std::printf("%s, rows of %zu bytes: %.1f M keys read, %.1f M written, %.1f M evicted\n",
              kernels.name, row_bytes, static_cast<double>(soak.reads) / 1e6,
              static_cast<double>(soak.writes) / 1e6, static_cast<double>(counts.evictions) / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0;
  if (seconds <= 0) {
    std::printf("usage: stress SECONDS [READERS [EVICTION]]\n");
    return 2;
  }
  const auto readers = static_cast<unsigned>(argc > 2 ? std::atoi(argv[2]) : 2);
  const hps::Eviction eviction = eviction_of(argc > 3 ? argv[3] : "lru");
  // Lengths with a copy of their own, the last without.
  const std::size_t lengths[] = {128, 512, 72};
  const auto kernels = hps::runnable_kernels();
  for (const hps::ReadKernels* each : kernels)
    for (const std::size_t bytes : lengths)
      soak(seconds / static_cast<double>(3 * kernels.size()), readers, eviction, bytes, *each);
  return 0;
}
