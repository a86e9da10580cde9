// Many clients of a batch scheduler whose lanes are functions: stress_scheduler SECONDS [CLIENTS].
// Every answer must be that of its own request. Rows are missing, steps fail, deadlines pass,
// models are removed, clients disappear, and one writes anything into its memory. Run it under
// sanitizers: make check-native.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "hps/batch_scheduler.hpp"
#include "hps/cache_table.hpp"

namespace {

using Key = std::int64_t;
using Random = std::mt19937_64;

constexpr std::size_t kChannelBytes = 1 << 20;
constexpr std::uint32_t kBatches[] = {1, 4, 16, 64, 2048};
constexpr std::uint32_t kStable = 3;  // models that stay; one more comes and goes
constexpr std::uint32_t kLargest = 3000;
constexpr std::size_t kKeys = 50'000, kRowBytes = 16;
constexpr std::uint8_t kHost = 2;  // source code of rows in host memory

void fail(const char* what) {
  std::printf("%s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}

Key score_of(std::uint32_t model, Key key) { return 3 * key + model; }

void score(std::uint32_t model, const std::uint8_t* keys, std::uint8_t* scores, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    Key key;
    std::memcpy(&key, keys + i * sizeof key, sizeof key);
    // As unsigned numbers: the client that writes anything sends any key.
    const auto value = 3 * static_cast<std::uint64_t>(key) + model;
    std::memcpy(scores + i * sizeof value, &value, sizeof value);
  }
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Rows in host memory: 3 * key, for most keys of the requests.
struct HostRows {
  hps::CacheTable table{kKeys + kLargest, kRowBytes, hps::Eviction::kLru};

  HostRows() {
    std::vector<Key> keys;
    for (Key key = 0; key < static_cast<Key>(kKeys + kLargest); ++key)
      if (key % 512 != 0) keys.push_back(key);
    std::vector<std::uint64_t> versions(keys.size(), 1);
    std::vector<std::uint8_t> rows(keys.size() * kRowBytes);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const Key value = 3 * keys[i];
      std::memcpy(rows.data() + i * kRowBytes, &value, sizeof value);
    }
    table.write({keys.data(), versions.data(), rows.data(), keys.size(), 0, false});
  }
};

// The memory of one size class of a lane. Its steps run one after the other.
struct SizeMemory {
  std::uint32_t model = 0, missing = 0, used = 0, missed = 0, placed = 0;
  std::vector<Key> keys, scores, missed_keys;
  std::vector<std::uint32_t> positions;
  std::vector<std::uint8_t> rows;
  std::uint64_t at_positions = 0, at_rows = 0, at_sources = 0;
  Random random;

  static std::uint8_t* bytes(std::vector<Key>& values) {
    return reinterpret_cast<std::uint8_t*>(values.data());
  }

  // Some models miss rows often.
  bool misses() { return random() % (model % 2 == 0 ? 16 : 2) == 0; }

  bool run() {
    missing = misses();
    score(model, bytes(keys), bytes(scores), keys.size());
    return random() % 512 != 0;
  }

  bool fetch() {
    missed = 0;
    const bool some = misses();
    for (std::uint32_t i = 0; i < used; ++i) {
      scores[i] = -1;
      if (some && keys[i] % 4 != 0) {
        positions[missed] = i;
        missed_keys[missed++] = keys[i];
      } else {
        score(0, bytes(keys) + i * sizeof(Key), bytes(scores) + i * sizeof(Key), 1);
      }
    }
    return random() % 512 != 0;
  }

  bool place() {
    const auto* position = reinterpret_cast<const std::uint32_t*>(at_positions);
    const auto* row = reinterpret_cast<const std::uint8_t*>(at_rows);
    const auto* source = reinterpret_cast<const std::uint8_t*>(at_sources);
    for (std::uint32_t i = 0; i < placed; ++i)
      if (source[i] == kHost) std::memcpy(&scores[position[i]], row + i * kRowBytes, sizeof(Key));
    return true;
  }

  bool rest() {
    for (std::uint32_t i = 0; i < used; ++i)
      scores[i] = static_cast<Key>(static_cast<std::uint64_t>(scores[i]) + model);
    return random() % 512 != 0;
  }
};

hps::Step step_of(const std::shared_ptr<SizeMemory>& memory, bool (SizeMemory::*call)()) {
  hps::Step step;
  step.call = [memory, call] { return (*memory.*call)(); };
  return step;
}

struct Stress {
  const int wake = eventfd(0, EFD_NONBLOCK);
  HostRows host;
  hps::BatchScheduler scheduler{dup(wake), 20, 8};
  std::atomic<std::uint32_t> models[kStable + 1] = {};
  std::atomic<bool> stop{false}, ended{false};
  std::atomic<std::uint64_t> answered{0}, samples{0}, replied{0}, expired{0}, failed{0}, closed{0};
  std::atomic<std::uint64_t> filled{0};
  std::atomic<std::uint64_t> vanished{0}, removed{0};

  // Adds a model; returns its number.
  std::uint32_t add_model(std::uint32_t lane_count) {
    const std::uint32_t model = scheduler.add_model({{sizeof(Key)}, {sizeof(Key)}});
    for (std::uint32_t i = 0; i < lane_count; ++i) {
      std::vector<hps::SizeClass> classes;
      for (const std::uint32_t batch : kBatches) {
        auto memory = std::make_shared<SizeMemory>();
        memory->model = model;
        memory->random.seed(model * 7 + i);
        memory->keys.resize(batch);
        memory->scores.resize(batch);
        memory->missed_keys.resize(batch);
        memory->positions.resize(batch);
        memory->rows.resize(2 * (batch / 3 + 1) * (kRowBytes + 1) + 32);
        classes.push_back(size_class(memory));
      }
      scheduler.add_lane(model, std::move(classes), nullptr, nullptr);
    }
    return model;
  }

  hps::SizeClass size_class(const std::shared_ptr<SizeMemory>& memory) {
    hps::SizeClass made;
    made.batch = static_cast<std::uint32_t>(memory->keys.size());
    made.inputs = {SizeMemory::bytes(memory->keys)};
    made.outputs = {SizeMemory::bytes(memory->scores)};
    made.missing_keys = {&memory->missing};
    made.steps = {step_of(memory, &SizeMemory::run)};
    hps::FillChunk chunk{};
    chunk.parts = {{&host.table, 0, 0, made.batch, 1, 0, &memory->used}};
    chunk.missing = &memory->missed;
    chunk.positions = memory->positions.data();
    chunk.keys = memory->missed_keys.data();
    chunk.place = step_of(memory, &SizeMemory::place);
    chunk.rows_per_block = 64;
    chunk.at_positions = &memory->at_positions;
    chunk.at_rows = &memory->at_rows;
    chunk.at_sources = &memory->at_sources;
    chunk.at_n = &memory->placed;
    made.fill = std::make_shared<hps::MissFill>();
    made.fill->fetch = {step_of(memory, &SizeMemory::fetch)};
    made.fill->rest = {step_of(memory, &SizeMemory::rest)};
    made.fill->chunks = {chunk};
    made.fill->memory = memory->rows.data();
    made.fill->bytes = memory->rows.size();
    made.fill->stride = kRowBytes;
    made.fill->code = kHost;
    made.fill->features = 1;
    return made;
  }

  void remove_model(std::uint32_t model) {
    scheduler.remove_model(model);
    ++removed;
  }

  void take_reports() {
    hps::FillReport report;
    while (!ended) {
      if (!scheduler.take_report(report, 50)) continue;
      if (report.found.size() > 1 || report.features.size() != report.keys.size())
        fail("a report has another model's features");
      filled += report.answered;
    }
  }

  void answer_slow() {
    hps::BatchScheduler::SlowRequest request{};
    while (!ended) {
      if (!scheduler.take_slow(request, 50)) continue;
      const std::size_t n = std::min(request.in_bytes, request.out_bytes) / sizeof(Key);
      score(request.model, request.inputs, request.outputs, n);
      scheduler.answer_slow(request.number, hps::RequestStatus::kReplied, n * sizeof(Key));
    }
  }

  void churn() {
    while (!stop) {
      const std::uint32_t model = add_model(2);
      models[kStable] = model;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      remove_model(model);
    }
  }
};

// A client with threads that send, and one that receives and checks.
class Client {
 public:
  explicit Client(Stress& stress, unsigned seed) : stress_(stress), seed_(seed) {
    const int file = memfd_create("stress-channel", MFD_CLOEXEC);
    if (ftruncate(file, kChannelBytes) != 0) fail("no memory for a channel");
    const int woken = eventfd(0, EFD_NONBLOCK);
    raw_ = mmap(nullptr, kChannelBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    number_ = stress.scheduler.add_channel(file, dup(woken));
    client_ = std::make_unique<hps::ChannelClient>(file, dup(stress.wake), woken);
  }
  ~Client() { munmap(raw_, kChannelBytes); }

  // Sends from `threads` threads until `until_ns` and, unless the client vanishes, receives all.
  void run(unsigned threads, std::int64_t until_ns, bool vanishes) {
    std::vector<std::thread> senders;
    std::atomic<unsigned> sending{threads};
    for (unsigned i = 0; i < threads; ++i)
      senders.emplace_back([&, i] {
        Random random(seed_ * 1000 + i);
        while (now_ns() < until_ns) send(random);
        --sending;
      });
    const std::int64_t last_ns = until_ns + 60'000'000'000;
    while (sending != 0 || (!vanishes && received_ != sent_)) {
      receive(20);
      if (now_ns() > last_ns) fail("an answer never arrived");
    }
    for (std::thread& each : senders) each.join();
    stress_.scheduler.remove_channel(number_);
    if (vanishes) ++stress_.vanished;
  }

  // Writes anything anywhere, and wakes the scheduler.
  void scribble(std::int64_t until_ns) {
    Random random(seed_);
    auto* words = static_cast<std::uint32_t*>(raw_);
    constexpr std::size_t kWords = kChannelBytes / sizeof *words;
    for (int i = 0; i < 8; ++i) send(random);
    const std::uint32_t at = words[16] + static_cast<std::uint32_t>(random() % 1200);
    for (std::size_t i = 0; i < kWords; ++i)
      if (random() % 4 == 0) words[i] = static_cast<std::uint32_t>(random() % 40'000);
    words[16] = at;  // the position of submissions
    while (now_ns() < until_ns) {
      words[random() % kWords] = static_cast<std::uint32_t>(random() % 20'000);
      words[16] += static_cast<std::uint32_t>(random() % 3);
      const std::uint64_t one = 1;
      if (write(stress_.wake, &one, sizeof one) < 0) std::this_thread::yield();
    }
    stress_.scheduler.remove_channel(number_);
  }

 private:
  void send(Random& random) {
    const auto batch =
        static_cast<std::uint32_t>(random() % 8 != 0 ? 1 + random() % 6 : 1 + random() % kLargest);
    const std::size_t bytes = batch * sizeof(Key);
    hps::RequestSlot* slot = client_->allocate(bytes, bytes + 64);
    if (slot == nullptr) return std::this_thread::yield();
    const Key first = static_cast<Key>(random() % kKeys);
    slot->ticket = static_cast<std::uint64_t>(first);
    slot->model = stress_.models[random() % (kStable + 1)];
    slot->batch = random() % 64 == 0 ? 0 : batch;
    slot->deadline_ns =
        random() % 32 == 0 ? now_ns() + static_cast<std::int64_t>(random() % 100'000) : 0;
    slot->column_bytes = bytes;
    for (std::uint32_t i = 0; i < batch; ++i) {
      const Key key = first + i;
      std::memcpy(hps::ChannelClient::inputs(slot) + i * sizeof key, &key, sizeof key);
    }
    ++sent_;
    client_->submit(slot);
  }

  void receive(int timeout_ms) {
    std::vector<hps::RequestSlot*> slots;
    client_->receive(slots, timeout_ms);
    // What senders wrote comes back by the scheduler's mapping of the memory, which the thread
    // sanitizer does not know to be the same: this orders it for that.
    (void)sent_.load();
    for (hps::RequestSlot* slot : slots) {
      check(slot);
      client_->free(slot);
      ++received_;
    }
  }

  void check(hps::RequestSlot* slot) {
    ++stress_.answered;
    switch (slot->status) {
      case hps::RequestStatus::kReplied:
        if (slot->reply_bytes != slot->column_bytes) fail("a reply has another size");
        ++stress_.replied;
        break;
      case hps::RequestStatus::kDone:
        if (slot->reply_bytes > slot->batch) fail("more samples than the batch has");
        break;
      case hps::RequestStatus::kExpired:
        ++stress_.expired;
        return slot->deadline_ns == 0 ? fail("a request without a deadline expired") : void();
      case hps::RequestStatus::kFailed:
        ++stress_.failed;
        return slot->reply_bytes == 0 ? fail("a failed request has no message") : void();
      case hps::RequestStatus::kUnavailable:
        ++stress_.closed;
        return is_stable(slot->model) ? fail("a model that stays was unavailable") : void();
      default:
        fail("a request has no answer");
    }
    for (std::size_t i = 0; i < slot->column_bytes / sizeof(Key); ++i) {
      Key value;
      std::memcpy(&value, hps::ChannelClient::outputs(slot) + i * sizeof value, sizeof value);
      if (value != score_of(slot->model, static_cast<Key>(slot->ticket + i)))
        fail("a request has another one's answer");
    }
    stress_.samples += slot->batch;
  }

  bool is_stable(std::uint32_t model) const {
    for (std::uint32_t i = 0; i < kStable; ++i)
      if (stress_.models[i] == model) return true;
    return false;
  }

  Stress& stress_;
  const unsigned seed_;
  void* raw_;
  std::uint32_t number_;
  std::unique_ptr<hps::ChannelClient> client_;
  std::atomic<std::uint64_t> sent_{0}, received_{0};
};

// Clients that live shortly and leave requests in flight, and one that writes anything.
void run_bad_clients(Stress& stress, std::int64_t until_ns) {
  for (unsigned seed = 100; now_ns() < until_ns; ++seed) {
    Client(stress, seed).run(1, now_ns() + 5'000'000, true);
    Client(stress, seed).scribble(now_ns() + 5'000'000);
  }
}

void report(Stress& stress) {
  std::printf(
      "%.1f thousand answers of %.1f thousand samples, %.1f thousand filled: %llu by the slow "
      "path, %llu expired, "
      "%llu failed, %llu unavailable; %llu clients vanished, %llu models removed\n",
      static_cast<double>(stress.answered) / 1e3, static_cast<double>(stress.samples) / 1e3,
      static_cast<double>(stress.filled) / 1e3, static_cast<unsigned long long>(stress.replied),
      static_cast<unsigned long long>(stress.expired),
      static_cast<unsigned long long>(stress.failed),
      static_cast<unsigned long long>(stress.closed),
      static_cast<unsigned long long>(stress.vanished),
      static_cast<unsigned long long>(stress.removed));
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0;
  if (seconds <= 0) {
    std::printf("usage: stress_scheduler SECONDS [CLIENTS]\n");
    return 2;
  }
  const int count = argc > 2 ? std::atoi(argv[2]) : 3;
  Stress stress;
  for (std::uint32_t i = 0; i < kStable; ++i) stress.models[i] = stress.add_model(1 + i);
  std::thread loop([&] { stress.scheduler.run(); });
  std::vector<std::thread> fills;
  for (int i = 0; i < 2; ++i) fills.emplace_back([&] { stress.scheduler.fill_batches(); });
  std::thread reports([&] { stress.take_reports(); });
  std::thread slow([&] { stress.answer_slow(); });
  std::thread churn([&] { stress.churn(); });
  const std::int64_t until_ns = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
  std::vector<std::thread> clients;
  for (int i = 0; i < count; ++i)
    clients.emplace_back(
        [&, i] { Client(stress, static_cast<unsigned>(i) + 1).run(2, until_ns, false); });
  clients.emplace_back([&] { run_bad_clients(stress, until_ns); });
  for (std::thread& each : clients) each.join();
  stress.stop = true;
  churn.join();
  std::uint64_t batches = 0;
  for (std::uint32_t i = 0; i < kStable; ++i)
    batches += stress.scheduler.counts(stress.models[i]).batches;
  stress.scheduler.stop();
  for (std::thread* each : {&loop, &fills[0], &fills[1], &reports, &slow}) {
    if (each == &reports) stress.ended = true;
    each->join();
  }
  close(stress.wake);
  if (batches == 0 || stress.filled == 0 || stress.replied == 0 || stress.expired == 0 ||
      stress.failed == 0 || stress.vanished == 0 || stress.removed == 0)
    fail("the run exercised too little");
  report(stress);
  return 0;
}
