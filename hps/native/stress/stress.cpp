// Readers in parallel to a writer: stress SECONDS [READERS [EVICTION]]. Every row encodes its key
// and version, and so does a sum of rows, so that torn and wrong rows are detected. Run it under
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
#include "hps/miss_gather.hpp"

namespace {

constexpr std::size_t kKeys = 600, kBatch = 200;

void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

constexpr std::size_t kBag = 5;

// The format of rows of whole numbers: three parts of the version, then a linear function of the
// first two, the key and the position. So the relation also holds for sums. Numbers are small
// enough for exact sums: below 2^24, or 2^11 in float16, where fewer bits of each are encoded.
struct Rows {
  std::size_t bytes;
  bool halves;

  std::size_t dim() const { return bytes / (halves ? sizeof(hps::Half) : sizeof(float)); }
  unsigned bits() const { return halves ? 2 : 12; }  // per part of the version
  std::uint64_t encoded(std::uint64_t version) const {
    return version & ((1ULL << 3 * bits()) - 1);
  }
  std::int64_t encoded(std::int64_t key) const { return halves ? key & 15 : key; }
  float place(std::size_t i) const { return static_cast<float>(halves ? i % 32 : i); }

  float number(const std::uint8_t* row, std::size_t i) const {
    hps::Half half;
    float value;
    std::memcpy(&half, row + i * sizeof half, sizeof half);
    if (halves) return static_cast<float>(half);
    std::memcpy(&value, row + i * sizeof value, sizeof value);
    return value;
  }

  void put(float value, std::uint8_t* row, std::size_t i) const {
    const auto half = static_cast<hps::Half>(value);
    if (halves) {
      std::memcpy(row + i * sizeof half, &half, sizeof half);
    } else {
      std::memcpy(row + i * sizeof value, &value, sizeof value);
    }
  }

  void make(std::int64_t key, std::uint64_t version, std::uint8_t* row) const {
    const auto part = [&](std::size_t i) {
      return static_cast<float>(version >> bits() * i & ((1U << bits()) - 1));
    };
    for (std::size_t i = 0; i < dim(); ++i)
      put(i < 3 ? part(i) : part(0) * place(i) + part(1) + static_cast<float>(encoded(key)), row,
          i);
  }

  // Checks a row, or the sum of rows of keys whose encoded parts add up to `keys`.
  void check_sum(std::int64_t keys, const std::uint8_t* row) const {
    const float first = number(row, 0), second = number(row, 1), sum = static_cast<float>(keys);
    for (std::size_t i = 3; i < dim(); ++i) {
      if (number(row, i) == first * place(i) + second + sum) continue;
      std::printf("keys %lld: torn row, number %zu\n", static_cast<long long>(keys), i);
      std::exit(1);
    }
  }

  // Checks a row and returns the encoded part of its version.
  std::uint64_t check(std::int64_t key, const std::uint8_t* row) const {
    check_sum(encoded(key), row);
    std::uint64_t version = 0;
    for (unsigned i = 0; i < 3; ++i)
      version |= static_cast<std::uint64_t>(number(row, i)) << bits() * i;
    return version;
  }
};

struct Soak {
  hps::CacheTable table;
  hps::WorkerPool workers{2};
  Rows format;
  std::size_t row_bytes;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> reads{0}, writes{0}, pooled{0}, gathered{0};

  Soak(std::size_t capacity, const Rows& rows, hps::Eviction eviction,
       const hps::ReadKernels& kernels)
      : table(capacity, rows.bytes, eviction, kernels), format(rows), row_bytes(rows.bytes) {}

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
        format.make(keys[i], version, &rows[i * row_bytes]);
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

  // Sums bags of kBag keys, or takes means of doubled rows; then supplies rows to bags that miss
  // some.
  void pool(const std::int64_t* keys, std::size_t bags, bool mean) {
    const std::vector<float> twos(bags * kBag, 2);
    std::vector<std::uint8_t> sums(bags * row_bytes), row(row_bytes);
    std::vector<float> supplied(kBag * format.dim());
    std::vector<std::int64_t> left(bags * kBag), again(kBag);
    hps::PoolRequest request{};
    request.keys = keys;
    request.hotness = kBag;
    request.format = format.halves ? hps::RowFormat::kFloat16 : hps::RowFormat::kFloat32;
    request.dim = format.dim();
    request.halves = format.halves;
    request.last = bags;
    request.out = sums.data();
    if (mean) request.weights = request.divisors = twos.data();
    const std::size_t n = table.pool(request, left.data());
    for (std::size_t bag = 0, at = 0; bag < bags; ++bag) {
      const std::size_t from = at;
      for (; at < n && left[at] < static_cast<std::int64_t>((bag + 1) * kBag); ++at) {
        format.make(keys[left[at]], at, row.data());
        hps::runnable_kernels().front()->decode_rows(
            {request.format, request.dim, row.data(), nullptr, 1, false,
             reinterpret_cast<std::uint8_t*>(&supplied[(at - from) * request.dim])});
      }
      hps::PoolRequest rest = request;
      rest.first = bag;
      rest.last = bag + 1;
      rest.supplied = left.data() + from;
      rest.n_supplied = at - from;
      rest.vectors = supplied.data();
      if (at != from && table.pool(rest, again.data()) != 0) continue;  // evicted meanwhile
      std::int64_t sum = 0;
      for (std::size_t i = bag * kBag; i < (bag + 1) * kBag; ++i) sum += format.encoded(keys[i]);
      format.check_sum(sum, &sums[bag * row_bytes]);
      ++pooled;
    }
  }

  // Gathers as for a GPU cache's misses, the keys in two parts and each twice in the list, with the
  // threads of a pool that the readers share; their rows are placed in order as they are complete.
  void gather_misses(const std::int64_t* keys, std::size_t n) {
    const auto half = static_cast<std::uint32_t>(n / 2);
    const hps::MissPart parts[] = {{&table, keys, 0}, {&table, keys + half, half}};
    std::vector<std::uint32_t> positions(20 * hps::kMissPiece + 5);
    for (std::size_t i = 0; i < positions.size(); ++i)
      positions[i] = static_cast<std::uint32_t>(i * 7 % n);
    const std::size_t m = positions.size(), stride = row_bytes + 8;
    std::vector<std::uint8_t> rows(m * stride), sources(m);
    std::uint32_t counts[4] = {};
    std::size_t placed = 0;
    std::size_t unanswered = hps::gather_misses(
        {parts, 2, positions.data(), nullptr, m, rows.data(), stride, sources.data(), 2, counts},
        &workers, [&](std::size_t first, std::size_t count) {
          if (first != placed) fail("rows were placed in a wrong order");
          for (placed += count; first < placed; ++first)
            if (sources[first] == 0) fail("rows were placed before they were gathered");
        });
    if (placed != m) fail("rows were not placed");
    if (counts[0] + counts[2] != m || counts[1] + counts[3] + unanswered != m)
      fail("the misses were counted wrongly");
    for (std::size_t i = 0; i < m; ++i) {
      if (sources[i] == 2) {
        format.check(keys[positions[i]], &rows[i * stride]);
      } else if (sources[i] == hps::kUnanswered) {
        --unanswered;
      } else {
        fail("a miss was given no source");
      }
    }
    if (unanswered != 0) fail("the number of keys without a row is wrong");
    gathered += m;
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
        if (version < last) fail("an older version was read after a newer one");
        last = version;
      };
      const unsigned verb = random() % 64;
      if (verb == 63) {
        gather_misses(keys.data(), n);
      } else if (verb % 3 == 0) {
        pool(keys.data(), n / kBag, random() % 2 == 0);
      } else if (verb % 3 == 1) {
        const std::size_t few = 1 + n % 4;
        if (table.gather(keys.data(), few, rows.data()))
          for (std::size_t i = 0; i < few; ++i) {
            const std::uint64_t shown = format.check(keys[i], &rows[i * row_bytes]);
            if (!format.halves) seen(i, shown);
          }
      } else {
        const hps::FetchOutput output{rows.data(), versions.data(), source.data(), 2};
        const std::size_t gone =
            table.fetch(keys.data(), missing.data(), n, 0, output, left.data());
        std::size_t unanswered = 0;
        for (std::size_t i = 0; i < n; ++i) {
          if (source[i] == 2 &&
              format.check(keys[i], &rows[i * row_bytes]) != format.encoded(versions[i]))
            fail("a row was returned with another's version");
          if (versions[i] != 0) seen(i, versions[i]);
          unanswered += versions[i] == 0;
        }
        if (unanswered != gone) fail("a key was both answered and reported missing");
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

void soak(double seconds, unsigned readers, hps::Eviction eviction, const Rows& rows,
          const hps::ReadKernels& kernels) {
  Soak soak(400, rows, eviction, kernels);
  std::vector<std::thread> threads;
  threads.emplace_back([&] { soak.write(); });
  for (unsigned i = 0; i < readers; ++i) threads.emplace_back([&, i] { soak.read(i + 2); });
  const auto least = [&] {
    return std::min({soak.reads.load(), soak.writes.load(), soak.pooled.load(),
                     soak.gathered.load(), soak.table.counts().evictions});
  };
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  // A busy machine may need longer until everything was exercised.
  for (int tries = 0; tries < 3000 && least() == 0; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  soak.stop = true;
  for (std::thread& thread : threads) thread.join();
  const hps::CacheCounts counts = soak.table.counts();
  if (counts.rows + counts.tombstones > 400) fail("more rows than the capacity");
  if (soak.table.top_k(10000).size() != counts.rows) fail("the row count is wrong");
  if (least() == 0) fail("the run exercised nothing");
  const auto millions = [](std::uint64_t n) { return static_cast<double>(n) / 1e6; };
  std::printf(
      "%s, rows of %zu %s, in millions: %.1f keys read, %.1f bags, %.1f misses, %.1f written, "
      "%.1f evicted\n",
      kernels.name, rows.dim(), rows.halves ? "float16" : "float32", millions(soak.reads),
      millions(soak.pooled), millions(soak.gathered), millions(soak.writes),
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
  // Row lengths with and without specialized kernels.
  const std::vector<Rows> formats{{128, false}, {512, false}, {72, false},
                                  {64, true},   {128, true},  {72, true}};
  const auto kernels = hps::runnable_kernels();
  const double each = seconds / static_cast<double>(formats.size() * kernels.size());
  for (const hps::ReadKernels* set : kernels)
    for (const Rows& rows : formats) soak(each, readers, eviction, rows, *set);
  return 0;
}
