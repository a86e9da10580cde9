// Concurrent fetches in single flight's table: stress_in_flight SECONDS [THREADS]. A follower must
// never be promised a row that the fetch does not keep, or another key's row. Run it under
// sanitizers: make check-native.
#include "hps/in_flight.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <thread>

namespace {

constexpr std::uint64_t kTables = 3;

using Answer = std::vector<std::vector<std::int64_t>>;  // per request, keys by place

void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

struct Stress {
  hps::InFlight table;
  std::mutex lock;
  std::condition_variable landed;
  std::map<std::uint64_t, std::shared_ptr<const Answer>> answers;
  std::atomic<std::uint64_t> numbers{0}, own{0}, left{0};
  std::atomic<bool> stop{false};

  void fetch(std::mt19937_64& random) {
    // Mostly small, over few keys; sometimes large enough for the table of slots to grow.
    const bool large = random() % 64 == 0;
    const std::size_t keys = large ? 5000 : 1 + random() % 100;
    std::vector<std::vector<std::int64_t>> names(kTables), missing(kTables);
    std::vector<hps::FlightRequest> requests;
    for (std::uint64_t t = 0; t < kTables; ++t) {
      std::int64_t key = static_cast<std::int64_t>(random() % 50);
      for (std::size_t i = 0; i < keys; ++i, key += 1 + static_cast<std::int64_t>(random() % 3)) {
        names[t].push_back(key);
        if (random() % 8 != 0) missing[t].push_back(static_cast<std::int64_t>(i));
      }
      requests.push_back({t, names[t].data(), missing[t].data(), missing[t].size()});
    }
    const std::uint64_t number = numbers++;
    hps::FlightClaim claim;
    {
      const std::lock_guard<std::mutex> held(table.lock);
      claim = table.claim(number, requests, now());
    }
    std::size_t total = 0;
    for (std::uint64_t t = 0; t < kTables; ++t) {
      total += claim.own[t].size();
      own += claim.own[t].size();
    }
    if (random() % 4 == 0) std::this_thread::yield();
    land(number, names, random() % 8 != 0);
    for (const hps::FlightShare& share : claim.shares) {
      total += share.positions.size();
      left += share.positions.size();
      copy(share, names[share.request]);
    }
    for (std::uint64_t t = 0; t < kTables; ++t) total -= missing[t].size();
    if (total != 0) fail("a key was read by no fetch, or by two");
    leave(claim.shares);
  }

  void land(std::uint64_t number, const std::vector<std::vector<std::int64_t>>& names, bool good) {
    Answer wanted;
    {
      const std::lock_guard<std::mutex> held(table.lock);
      wanted = table.land(number, good ? now() + 1e-4 : 0);
    }
    if (wanted.empty()) return;
    for (std::size_t request = 0; request < wanted.size(); ++request)
      for (std::int64_t& each : wanted[request])
        each = names[request][static_cast<std::size_t>(each)];
    {
      const std::lock_guard<std::mutex> held(lock);
      answers[number] = std::make_shared<const Answer>(std::move(wanted));
    }
    landed.notify_all();
  }

  void copy(const hps::FlightShare& share, const std::vector<std::int64_t>& keys) {
    std::shared_ptr<const Answer> answer;
    {
      std::unique_lock<std::mutex> held(lock);
      if (!landed.wait_for(held, std::chrono::minutes(1),
                           [&] { return answers.count(share.flight) != 0; }))
        fail("an answer never arrived");
      answer = answers[share.flight];
    }
    if (share.request != share.source_request) fail("a share refers to another table");
    const std::vector<std::int64_t>& kept = (*answer)[share.source_request];
    for (std::size_t i = 0; i < share.positions.size(); ++i) {
      const auto place = static_cast<std::size_t>(share.places[i]);
      if (place >= kept.size()) fail("a promised place was not kept");
      if (kept[place] != keys[static_cast<std::size_t>(share.positions[i])])
        fail("a place holds another key's row");
    }
  }

  void leave(const std::vector<hps::FlightShare>& shares) {
    std::map<std::uint64_t, bool> followed;
    for (const hps::FlightShare& share : shares) followed[share.flight] = false;
    {
      const std::lock_guard<std::mutex> held(table.lock);
      for (auto& [number, last] : followed) last = table.leave(number);
    }
    const std::lock_guard<std::mutex> held(lock);
    for (const auto& [number, last] : followed)
      if (last) answers.erase(number);
  }

  static double now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
  }
};

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0;
  if (seconds <= 0) {
    std::printf("usage: stress_in_flight SECONDS [THREADS]\n");
    return 2;
  }
  const int count = argc > 2 ? std::atoi(argv[2]) : 4;
  Stress stress;
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i)
    threads.emplace_back([&stress, i] {
      std::mt19937_64 random(static_cast<unsigned>(i) + 1);
      while (!stress.stop) stress.fetch(random);
    });
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stress.stop = true;
  for (std::thread& each : threads) each.join();
  if (stress.table.size() != 0 || !stress.answers.empty()) fail("an entry was never erased");
  if (stress.own == 0 || stress.left == 0) fail("the run exercised nothing");
  std::printf("%.1f M keys read, %.1f M left to other fetches, by %.0f thousand fetches\n",
              static_cast<double>(stress.own) / 1e6, static_cast<double>(stress.left) / 1e6,
              static_cast<double>(stress.numbers) / 1e3);
  return 0;
}
