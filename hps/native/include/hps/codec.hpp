// Codec of update messages, in HPS's wire format and the native one. Input bytes are untrusted. All
// functions are thread-safe. The
// formats are described byte by byte in docs/wire-format.md. Little-endian machines only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hps {

// The bytes of a message; data is nullptr if it has none (Kafka's tombstone).
struct Payload {
  const std::uint8_t* data;
  std::size_t size;
};

// The result of decoding a message; below kTruncated it is valid. The numbers are part of the
// Python interface (hps.native.twin_codec.Reason).
enum class Reason : std::uint8_t {
  kOk = 0,
  kBeacon = 1,
  kNull = 2,
  kKeyed = 3,
  kTruncated = 16,
  kBadMagic = 17,
  kUnknownVersion = 18,
  kChecksum = 19,
  kRowSize = 20,
  kOversize = 21,
  kMalformed = 22,
};

// A reason, and the position of the byte that caused it.
struct Verdict {
  Reason reason;
  std::size_t at;
};

// --- HPS's format: "HCTR", u32 row bytes, then a key and a row in turn ---

struct HpsFormat {
  std::size_t key_bytes;  // 8, or 4: unsigned
  std::size_t row_bytes;  // at least 1
  std::size_t max_bytes;  // longer payloads are rejected
};

Verdict check_hps(const Payload& payload, const HpsFormat& format, std::size_t* rows);
// Decodes a payload that holds `rows` rows according to check_hps.
void read_hps(const Payload& payload, const HpsFormat& format, std::size_t rows, std::int64_t* keys,
              std::uint8_t* vectors);
// Writes hps_bytes(format, rows) bytes.
void write_hps(const HpsFormat& format, std::size_t rows, const std::int64_t* keys,
               const std::uint8_t* vectors, std::uint8_t* out);
constexpr std::size_t hps_bytes(const HpsFormat& format, std::size_t rows) {
  return 8 + rows * (format.key_bytes + format.row_bytes);
}

// --- The native format ---

// The header fields of a message; the layout is part of the Python interface
// (hps.native.twin_codec.MESSAGE).
struct Message {
  Reason reason = Reason::kOk;
  std::uint8_t unused[3] = {};
  std::int32_t group = -1;  // the number of the group that holds its rows; -1: none
  std::uint32_t at = 0;
  std::uint32_t upserts = 0;
  std::uint32_t deletes = 0;
  std::uint32_t ttl_s = 0;
  std::int64_t event_ms = 0;
  std::uint64_t step = 0;
  std::uint64_t dense_version = 0;
};
static_assert(sizeof(Message) == 48);

// The rows of all messages for one table in one row format, in the messages' order.
struct Group {
  std::string table;
  std::uint8_t dtype;
  std::uint32_t dim;
  std::size_t row_bytes;
  std::size_t upserts = 0, deletes = 0;
  std::unique_ptr<std::int64_t[]> keys, deleted;
  std::unique_ptr<std::uint64_t[]> versions, deleted_versions;
  std::unique_ptr<std::uint8_t[]> vectors;
};

// Decodes payloads[0..n) into messages[0..n) and returns their groups, in the order of the groups'
// first messages.
std::vector<Group> decode_native(const Payload* payloads, std::size_t n, std::size_t max_bytes,
                                 Message* messages);

}  // namespace hps
