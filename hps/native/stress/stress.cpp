// Readers beside a writer: stress SECONDS [READERS [EVICTION]]. Every row tells its key and
// version, and so does a sum of rows, so a torn or a wrong one shows itself. Meant to be run under
// sanitizers: make check-native.
#include <algorithm>
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

void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

// A row, of floats that are whole numbers: three parts of its version, 12 bits each, then what
// follows from the first two, the key and the position. That is linear, so that it holds for sums
// too, and stays below 2^24, so that sums are exact.
constexpr std::size_t kBag = 5;

void make_row(std::int64_t key, std::uint64_t version, std::uint8_t* row, std::size_t bytes) {
  const auto part = [&](unsigned i) { return static_cast<float>(version >> 12 * i & 0xFFF); };
  for (std::size_t i = 0; i < bytes / sizeof(float); ++i) {
    const auto at = static_cast<float>(i);
    const float value =
        i < 3 ? part(static_cast<unsigned>(i)) : part(0) * at + part(1) + static_cast<float>(key);
    std::memcpy(row + i * sizeof value, &value, sizeof value);
  }
}

float number(const std::uint8_t* row, std::size_t i) {
  float value;
  std::memcpy(&value, row + i * sizeof value, sizeof value);
  return value;
}

// A row, or the sum of several: of keys that add up to `key`.
void check_sum(std::int64_t key, const std::uint8_t* row, std::size_t bytes) {
  for (std::size_t i = 3; i < bytes / sizeof(float); ++i) {
    const float at = static_cast<float>(i), sum = static_cast<float>(key);
    if (number(row, i) == number(row, 0) * at + number(row, 1) + sum) continue;
    std::printf("keys %lld: torn row, float %zu\n", static_cast<long long>(key), i);
    std::exit(1);
  }
}

std::uint64_t check_row(std::int64_t key, const std::uint8_t* row, std::size_t bytes) {
  check_sum(key, row, bytes);
  std::uint64_t version = 0;
  for (unsigned i = 0; i < 3; ++i) version |= static_cast<std::uint64_t>(number(row, i)) << 12 * i;
  return version;
}

struct Soak {
  hps::CacheTable table;
  std::size_t row_bytes;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> reads{0}, writes{0}, pooled{0};

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

  // Sums bags of kBag keys, or their means of twice the rows; bags that lack rows are given them.
  void pool(const std::int64_t* keys, std::size_t bags, bool mean) {
    const std::vector<float> twos(bags * kBag, 2);
    std::vector<std::uint8_t> sums(bags * row_bytes), given(kBag * row_bytes);
    std::vector<std::int64_t> left(bags * kBag), again(kBag);
    hps::PoolAsk ask{};
    ask.keys = keys;
    ask.hotness = kBag;
    ask.last = bags;
    ask.out = sums.data();
    if (mean) ask.weights = ask.divisors = twos.data();
    const std::size_t n = table.pool(ask, left.data());
    for (std::size_t bag = 0, at = 0; bag < bags; ++bag) {
      const std::size_t from = at;
      for (; at < n && left[at] < static_cast<std::int64_t>((bag + 1) * kBag); ++at)
        make_row(keys[left[at]], at, &given[(at - from) * row_bytes], row_bytes);
      hps::PoolAsk rest = ask;
      rest.first = bag;
      rest.last = bag + 1;
      rest.given = left.data() + from;
      rest.n_given = at - from;
      rest.rows = given.data();
      if (at != from && table.pool(rest, again.data()) != 0) continue;  // evicted meanwhile
      std::int64_t sum = 0;
      for (std::size_t i = bag * kBag; i < (bag + 1) * kBag; ++i) sum += keys[i];
      check_sum(sum, &sums[bag * row_bytes], row_bytes);
      ++pooled;
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
      const unsigned verb = random() % 3;
      if (verb == 0) {
        pool(keys.data(), n / kBag, random() % 2 == 0);
      } else if (verb == 1) {
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
  if (std::min({soak.reads.load(), soak.writes.load(), soak.pooled.load(), counts.evictions}) == 0)
    fail("nothing happened");
  const auto millions = [](std::uint64_t n) { return static_cast<double>(n) / 1e6; };
  std::printf(
      "%s, rows of %zu bytes, in millions: %.1f keys read, %.1f bags, %.1f written, %.1f evicted\n",
      kernels.name, row_bytes, millions(soak.reads), millions(soak.pooled), millions(soak.writes),
      millions(counts.evictions));
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
