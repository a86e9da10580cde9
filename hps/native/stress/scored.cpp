// Readers and writers of a scored table in parallel, with growth: stress_scored SECONDS. Every
// element of a row encodes the row's key and score, so that torn rows, rows of other keys and
// scores of other writes are detected. Run it under sanitizers: make check-native.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "hps/scored_table.hpp"

namespace {

constexpr std::size_t kBatch = 300, kKeys = 1500, kDim = 12;
constexpr std::size_t kRowBytes = kDim * sizeof(std::uint64_t);

void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

std::uint64_t element(std::int64_t key, std::uint64_t score) {
  return static_cast<std::uint64_t>(key) << 32 | score;
}

void check(std::int64_t key, std::uint64_t score, const std::uint64_t* row) {
  for (std::size_t i = 0; i < kDim; ++i)
    if (row[i] != element(key, score)) fail("a row is torn, or of another key or score");
}

// Arrays of one thread's batches.
struct Arrays {
  explicit Arrays(unsigned seed) : random(seed) {}

  void draw() {
    for (std::size_t i = 0; i < kBatch; ++i) {
      keys[i] = static_cast<std::int64_t>(random() % kKeys);
      scores[i] = random() % 100'000;
      for (std::size_t at = 0; at < kDim; ++at) rows[i * kDim + at] = element(keys[i], scores[i]);
    }
  }
  std::uint8_t* bytes(std::vector<std::uint64_t>& of) {
    return reinterpret_cast<std::uint8_t*>(of.data());
  }

  std::minstd_rand random;
  std::vector<std::int64_t> keys = std::vector<std::int64_t>(kBatch);
  std::vector<std::uint64_t> scores = std::vector<std::uint64_t>(kBatch);
  std::vector<std::uint64_t> rows = std::vector<std::uint64_t>(kBatch * kDim);
  std::vector<std::int64_t> evicted_keys = std::vector<std::int64_t>(kBatch);
  std::vector<std::uint64_t> evicted_scores = std::vector<std::uint64_t>(kBatch);
  std::vector<std::uint64_t> evicted_rows = std::vector<std::uint64_t>(kBatch * kDim);
  std::unique_ptr<bool[]> found{new bool[kBatch]};
};

void write(hps::ScoredTable& table, Arrays& of, std::atomic<std::uint64_t>& evictions) {
  of.draw();
  const auto operation =
      of.random() % 4 == 0 ? hps::ScoredWrite::kAssign : hps::ScoredWrite::kInsert;
  const hps::ScoredBatch batch{
      operation, of.keys.data(),         kBatch, of.bytes(of.rows), nullptr,
      nullptr,   hps::ScoreRule::kGiven, 0,      of.scores.data()};
  hps::EvictedRows evicted{of.evicted_keys.data(), of.evicted_scores.data(),
                           of.bytes(of.evicted_rows), 0};
  table.write(batch, of.found.get(), &evicted);
  for (std::size_t i = 0; i < evicted.n; ++i)
    check(evicted.keys[i], evicted.scores[i], of.evicted_rows.data() + i * kDim);
  evictions += evicted.n;
  if (of.random() % 8 == 0) table.erase(of.keys.data(), kBatch / 8, nullptr, of.found.get());
}

void read(const hps::ScoredTable& table, Arrays& of, std::atomic<std::uint64_t>& rows) {
  of.draw();
  table.find(of.keys.data(), kBatch, of.bytes(of.rows), of.scores.data(), of.found.get());
  for (std::size_t i = 0; i < kBatch; ++i) {
    check(of.keys[i], of.scores[i], of.rows.data() + i * kDim);  // unchanged if it was not found
    rows += of.found[i];
  }
  const std::size_t n = table.export_slots(of.random() % 200, kBatch, of.evicted_keys.data(),
                                           of.evicted_scores.data(), of.bytes(of.evicted_rows));
  for (std::size_t i = 0; i < n; ++i)
    check(of.evicted_keys[i], of.evicted_scores[i], of.evicted_rows.data() + i * kDim);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::printf("usage: stress_scored SECONDS\n");
    return 2;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[1]));
  std::atomic<std::uint64_t> rounds{0}, evictions{0}, rows{0};
  while (std::chrono::steady_clock::now() < end) {
    hps::ScoredTable table(1, 4, kRowBytes);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 4; ++i)
      threads.emplace_back([&, i] {
        Arrays arrays(static_cast<unsigned>(rounds) * 4 + i + 1);
        while (!stop) i < 2 ? write(table, arrays, evictions) : read(table, arrays, rows);
      });
    for (unsigned step = 0; step < 8; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (step == 2) table.reserve(2);
      if (step == 4) table.set_max_buckets(8);  // moves the arrays
      if (step == 5) table.reserve(8);
      if (step == 6) table.clear();
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    std::vector<std::int64_t> keys(8 * hps::kWays);
    std::vector<std::uint64_t> scores(8 * hps::kWays);
    if (table.export_slots(0, 8 * hps::kWays, keys.data(), scores.data(), nullptr) != table.size())
      fail("the size is not the number of rows");
    ++rounds;
  }
  std::printf("%llu rounds, %llu rows read, %llu evicted\n",
              static_cast<unsigned long long>(rounds), static_cast<unsigned long long>(rows),
              static_cast<unsigned long long>(evictions));
  return rows > 0 && evictions > 0 ? 0 : 1;
}
