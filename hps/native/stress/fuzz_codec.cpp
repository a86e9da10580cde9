// Fuzzer of the codec: fuzz_codec SECONDS [SEED]. Takes valid messages, truncates, extends and
// changes them at random, and corrects the checksum of some so that later checks are reached. Each
// message is in a block of exactly its size, so that a sanitizer reports a read past its end. Run
// it under sanitizers: make check-native.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "hps/codec.hpp"
#include "hps/crc32.hpp"

namespace {

using Random = std::mt19937_64;
using Message = std::vector<std::uint8_t>;

void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

template <typename T>
void put(Message& message, std::size_t at, T value) {
  std::memcpy(message.data() + at, &value, sizeof value);
}

void seal(Message& message) {
  if (message.size() < 16) return;
  const std::uint32_t start = hps::crc32(message.data(), 8);
  put(message, 8, hps::crc32(message.data() + 12, message.size() - 12, start));
}

Message native_message(Random& random) {
  const std::uint32_t up = random() % 9, down = random() % 5, dim = 1 + random() % 20;
  const std::size_t name = 1 + random() % 20, keys = 64 + (name + 7) / 8 * 8;
  const std::uint8_t dtype = random() % 2;
  Message message(keys + 16 * (up + down) + up * dim * (dtype == 0 ? 4 : 2));
  for (std::size_t i = keys; i < message.size(); ++i)
    message[i] = static_cast<std::uint8_t>(random());
  std::memcpy(message.data(), "HPSU\1\0\100\0", 8);
  std::memset(message.data() + 64, 'a' + static_cast<int>(random() % 3), name);
  put(message, 12, static_cast<std::uint32_t>(message.size()));
  put(message, 16, up);
  put(message, 20, down);
  put(message, 24, dim);
  message[28] = dtype;
  put(message, 30, static_cast<std::uint16_t>(name));
  seal(message);
  return message;
}

Message hps_message(Random& random, const hps::HpsFormat& format) {
  const std::size_t rows = random() % 9;
  std::vector<std::int64_t> keys(rows);
  std::vector<std::uint8_t> vectors(rows * format.row_bytes);
  for (std::int64_t& key : keys) key = static_cast<std::int64_t>(random());
  Message message(hps::hps_bytes(format, rows));
  hps::write_hps(format, rows, keys.data(), vectors.data(), message.data());
  return message;
}

void change(Message& message, Random& random) {
  const unsigned how = random() % 6;
  if (how == 0) message.resize(random() % (message.size() + 1));
  if (how == 1) message.resize(message.size() + 1 + random() % 40);
  for (unsigned times = how < 2 ? 0 : how - 2; times != 0 && !message.empty(); --times) {
    // Mostly in the header.
    const std::size_t range =
        random() % 4 != 0 ? std::min<std::size_t>(message.size(), 80) : message.size();
    message[random() % range] = static_cast<std::uint8_t>(random() % 3 == 0 ? 255 : random());
  }
  if (random() % 2 == 0) {
    if (message.size() >= 16 && random() % 2 == 0)
      put(message, 12, static_cast<std::uint32_t>(message.size()));
    seal(message);
  }
}

// Messages, each in a block of exactly its size.
struct Batch {
  std::vector<std::unique_ptr<std::uint8_t[]>> blocks;
  std::vector<hps::Payload> payloads;

  void add(const Message& message) {
    blocks.emplace_back(new std::uint8_t[message.size()]);
    if (!message.empty()) std::memcpy(blocks.back().get(), message.data(), message.size());
    payloads.push_back({blocks.back().get(), message.size()});
  }
};

std::size_t decode_all(const Batch& batch, std::size_t max_bytes) {
  std::vector<hps::Message> messages(batch.payloads.size());
  const auto groups =
      hps::decode_native(batch.payloads.data(), batch.payloads.size(), max_bytes, messages.data());
  std::size_t rows = 0, grouped = 0, decoded = 0;
  for (const hps::Message& each : messages) {
    if ((each.reason == hps::Reason::kOk) != (each.group >= 0))
      fail("a valid message has no group, or a faulty one has");
    rows += each.upserts;
    decoded += each.reason == hps::Reason::kOk;
  }
  for (const hps::Group& each : groups) grouped += each.upserts;
  if (rows != grouped) fail("rows of messages and of groups differ in number");
  return decoded;
}

std::size_t decode_hps(const Batch& batch, const hps::HpsFormat& format) {
  std::size_t decoded = 0;
  for (const hps::Payload& payload : batch.payloads) {
    std::size_t rows = 0;
    if (hps::check_hps(payload, format, &rows).reason != hps::Reason::kOk) continue;
    std::vector<std::int64_t> keys(rows);
    std::vector<std::uint8_t> vectors(rows * format.row_bytes);
    hps::read_hps(payload, format, rows, keys.data(), vectors.data());
    Message again(hps::hps_bytes(format, rows));
    hps::write_hps(format, rows, keys.data(), vectors.data(), again.data());
    if (std::memcmp(again.data(), payload.data, payload.size) != 0) fail("re-encoded bytes differ");
    ++decoded;
  }
  return decoded;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0;
  if (seconds <= 0) {
    std::printf("usage: fuzz_codec SECONDS [SEED]\n");
    return 2;
  }
  Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::size_t tried = 0, decoded = 0;
  while (std::chrono::steady_clock::now() < end) {
    const hps::HpsFormat format{random() % 2 == 0 ? 8U : 4U, 4 * (1 + random() % 40), 100000};
    Batch native, foreign;
    for (int i = 0; i < 200; ++i) {
      Message message = native_message(random), other = hps_message(random, format);
      if (i % 4 != 0) {
        change(message, random);
        change(other, random);
      }
      native.add(message);
      foreign.add(other);
    }
    tried += 400;
    decoded += decode_all(native, random() % 8 == 0 ? 100 : 100000) + decode_hps(foreign, format);
    if (decode_all(foreign, 100000) != 0) fail("a message in HPS's format was decoded as native");
  }
  if (decoded == 0 || decoded == tried) fail("the run exercised nothing");
  std::printf("%.1f M messages, %.1f M of them decoded\n", static_cast<double>(tried) / 1e6,
              static_cast<double>(decoded) / 1e6);
  return 0;
}
