#include "hps/codec.hpp"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "hps/crc32.hpp"
#include "hps/row_format.hpp"

namespace hps {

namespace {

constexpr std::size_t kHpsHeader = 8;
constexpr char kHpsMagic[] = "HCTR", kNativeMagic[] = "HPSU";

constexpr std::size_t kNativeHeader = 64;
constexpr std::uint8_t kMajor = 1, kMinor = 0;
constexpr std::uint32_t kLargestDim = 1 << 20;
// A version has no more bits for the time.
constexpr std::int64_t kLatestMs = std::int64_t{1} << 44;

// Byte offsets of a header's fields.
enum Field : std::size_t {
  kMajorAt = 4,
  kMinorAt = 5,
  kHeaderBytesAt = 6,
  kChecksumAt = 8,
  kMessageBytesAt = 12,
  kUpsertsAt = 16,
  kDeletesAt = 20,
  kDimAt = 24,
  kDtypeAt = 28,
  kFlagsAt = 29,
  kTableBytesAt = 30,
  kEventAt = 32,
  kTtlAt = 40,
  kStepAt = 48,
  kDenseVersionAt = 56,
};

template <typename T>
T read(const Payload& payload, std::size_t at) {
  T value;
  std::memcpy(&value, payload.data + at, sizeof value);
  return value;
}

// The bytes of a row; a message's dtype is the code of its rows' format.
std::size_t bytes_of(std::uint8_t dtype, std::uint32_t dim) {
  return row_bytes(static_cast<RowFormat>(dtype), dim);
}

// The first checks of both formats: a payload that is not too long and has the right magic.
Verdict check_start(const Payload& payload, const char* magic, std::size_t max_bytes) {
  if (payload.data == nullptr) return {Reason::kNull, 0};
  if (payload.size > max_bytes) return {Reason::kOversize, max_bytes};
  const std::size_t prefix = std::min<std::size_t>(payload.size, 4);
  if (std::memcmp(payload.data, magic, prefix) != 0) return {Reason::kBadMagic, 0};
  if (prefix < 4) return {Reason::kTruncated, payload.size};
  return {Reason::kOk, 0};
}

// RowBytes 0: the length is known at run time only. Rows of a length known at compile time are
// copied without a call of memcpy.
template <typename Key, std::size_t RowBytes>
void read_rows(const std::uint8_t* from, std::size_t row_bytes, std::size_t rows,
               std::int64_t* keys, std::uint8_t* vectors) {
  const std::size_t bytes = RowBytes == 0 ? row_bytes : RowBytes;
  for (std::size_t i = 0; i < rows; ++i) {
    Key key;
    std::memcpy(&key, from, sizeof key);
    keys[i] = static_cast<std::int64_t>(key);
    std::memcpy(vectors + i * bytes, from + sizeof key, bytes);
    from += sizeof key + bytes;
  }
}

template <typename Key, std::size_t RowBytes>
void write_rows(const std::int64_t* keys, const std::uint8_t* vectors, std::size_t row_bytes,
                std::size_t rows, std::uint8_t* to) {
  const std::size_t bytes = RowBytes == 0 ? row_bytes : RowBytes;
  for (std::size_t i = 0; i < rows; ++i) {
    const Key key = static_cast<Key>(keys[i]);
    std::memcpy(to, &key, sizeof key);
    std::memcpy(to + sizeof key, vectors + i * bytes, bytes);
    to += sizeof key + bytes;
  }
}

template <typename Key>
auto select_reader(std::size_t row_bytes) {
  switch (row_bytes) {
    case 64:
      return read_rows<Key, 64>;
    case 128:
      return read_rows<Key, 128>;
    case 512:
      return read_rows<Key, 512>;
    default:
      return read_rows<Key, 0>;
  }
}

template <typename Key>
auto select_writer(std::size_t row_bytes) {
  switch (row_bytes) {
    case 64:
      return write_rows<Key, 64>;
    case 128:
      return write_rows<Key, 128>;
    case 512:
      return write_rows<Key, 512>;
    default:
      return write_rows<Key, 0>;
  }
}

// Byte offsets of a valid message's columns.
struct Columns {
  std::size_t name, keys, versions, rows;
};

// Reads the fields after the checksum was verified: a fault found here is the producer's.
Verdict check_fields(const Payload& payload, Message* message, Columns* columns) {
  if (read<std::uint8_t>(payload, kFlagsAt) != 0) return {Reason::kUnknownVersion, kFlagsAt};
  const std::uint8_t dtype = read<std::uint8_t>(payload, kDtypeAt);
  if (dtype >= kRowFormats) return {Reason::kUnknownVersion, kDtypeAt};
  const std::size_t header = read<std::uint16_t>(payload, kHeaderBytesAt);
  if (header < kNativeHeader || header % 8 != 0 || header > payload.size)
    return {Reason::kMalformed, kHeaderBytesAt};
  const std::uint32_t dim = read<std::uint32_t>(payload, kDimAt);
  if (dim == 0 || dim > kLargestDim) return {Reason::kRowSize, kDimAt};
  const std::int64_t event_ms = read<std::int64_t>(payload, kEventAt);
  if (event_ms < 0 || event_ms >= kLatestMs) return {Reason::kMalformed, kEventAt};
  const std::size_t name_bytes = read<std::uint16_t>(payload, kTableBytesAt);
  if (name_bytes == 0 || name_bytes > payload.size - header)
    return {Reason::kMalformed, kTableBytesAt};
  for (std::size_t i = 0; i < name_bytes; ++i)
    if (payload.data[header + i] < 0x21 || payload.data[header + i] > 0x7E)
      return {Reason::kMalformed, header + i};

  message->upserts = read<std::uint32_t>(payload, kUpsertsAt);
  message->deletes = read<std::uint32_t>(payload, kDeletesAt);
  const std::uint64_t entries = std::uint64_t{message->upserts} + message->deletes;
  columns->name = header;
  columns->keys = header + (name_bytes + 7) / 8 * 8;
  columns->versions = columns->keys + 8 * entries;
  columns->rows = columns->versions + 8 * entries;
  // No overflow: 2^32 rows of 2^22 bytes at most.
  const std::uint64_t end = columns->rows + message->upserts * bytes_of(dtype, dim);
  const bool newer = read<std::uint8_t>(payload, kMinorAt) > kMinor;
  if (end > payload.size || (end < payload.size && !newer)) return {Reason::kMalformed, kUpsertsAt};
  return {Reason::kOk, 0};
}

Verdict check_native(const Payload& payload, std::size_t max_bytes, Message* message,
                     Columns* columns) {
  const Verdict start = check_start(payload, kNativeMagic, max_bytes);
  if (start.reason != Reason::kOk) return start;
  if (payload.size > kMajorAt && payload.data[kMajorAt] != kMajor)
    return {Reason::kUnknownVersion, kMajorAt};
  if (payload.size < kNativeHeader) return {Reason::kTruncated, payload.size};
  const std::size_t size = read<std::uint32_t>(payload, kMessageBytesAt);
  if (size > payload.size) return {Reason::kTruncated, payload.size};
  if (size < payload.size) return {Reason::kMalformed, kMessageBytesAt};
  // Over all bytes but itself.
  const std::uint32_t checksum = crc32(payload.data + kMessageBytesAt, size - kMessageBytesAt,
                                       crc32(payload.data, kChecksumAt));
  if (read<std::uint32_t>(payload, kChecksumAt) != checksum)
    return {Reason::kChecksum, kChecksumAt};
  return check_fields(payload, message, columns);
}

// The groups found so far, by table and row format.
class Groups {
 public:
  std::vector<Group> all;

  std::int32_t find_or_add(const Payload& payload, const Columns& columns) {
    const std::size_t name_bytes = read<std::uint16_t>(payload, kTableBytesAt);
    const auto* name = reinterpret_cast<const char*>(payload.data + columns.name);
    const std::uint32_t dim = read<std::uint32_t>(payload, kDimAt);
    const std::uint8_t dtype = read<std::uint8_t>(payload, kDtypeAt);
    if (!all.empty()) {  // usually the same as before
      const Group& group = all[last_];
      if (group.dim == dim && group.dtype == dtype && group.table.size() == name_bytes &&
          std::memcmp(group.table.data(), name, name_bytes) == 0)
        return last_;
    }
    std::string key(name, name_bytes);
    key.append(reinterpret_cast<const char*>(payload.data + kDimAt), 5);  // dim and dtype
    const auto [found, fresh] = numbers_.try_emplace(key, static_cast<std::int32_t>(all.size()));
    if (fresh) {
      Group group;
      group.table.assign(name, name_bytes);
      group.dtype = dtype;
      group.dim = dim;
      group.row_bytes = bytes_of(dtype, dim);
      all.push_back(std::move(group));
    }
    return last_ = found->second;
  }

 private:
  std::unordered_map<std::string, std::int32_t> numbers_;
  std::int32_t last_ = 0;
};

void allocate(Group& group) {
  group.keys.reset(new std::int64_t[group.upserts]);
  group.versions.reset(new std::uint64_t[group.upserts]);
  group.vectors.reset(new std::uint8_t[group.upserts * group.row_bytes]);
  group.deleted.reset(new std::int64_t[group.deletes]);
  group.deleted_versions.reset(new std::uint64_t[group.deletes]);
}

// Appends a message's entries to its group, whose counts are the number appended so far.
void append(const Payload& payload, const Columns& columns, const Message& message, Group& group) {
  const std::size_t up = message.upserts, down = message.deletes;
  const std::uint8_t* keys = payload.data + columns.keys;
  const std::uint8_t* versions = payload.data + columns.versions;
  std::memcpy(group.keys.get() + group.upserts, keys, 8 * up);
  std::memcpy(group.versions.get() + group.upserts, versions, 8 * up);
  std::memcpy(group.deleted.get() + group.deletes, keys + 8 * up, 8 * down);
  std::memcpy(group.deleted_versions.get() + group.deletes, versions + 8 * up, 8 * down);
  std::memcpy(group.vectors.get() + group.upserts * group.row_bytes, payload.data + columns.rows,
              up * group.row_bytes);
  group.upserts += up;
  group.deletes += down;
}

}  // namespace

Verdict check_hps(const Payload& payload, const HpsFormat& format, std::size_t* rows) {
  *rows = 0;
  const Verdict start = check_start(payload, kHpsMagic, format.max_bytes);
  if (start.reason != Reason::kOk) return start;
  if (payload.size < kHpsHeader) return {Reason::kTruncated, payload.size};
  if (payload.size == kHpsHeader) return {Reason::kBeacon, 0};
  if (read<std::uint32_t>(payload, 4) != format.row_bytes) return {Reason::kRowSize, 4};
  const std::size_t stride = format.key_bytes + format.row_bytes;
  const std::size_t n = (payload.size - kHpsHeader) / stride;
  // The whole message is rejected: a wrong length is the only sign of 32-bit instead of 64-bit
  // keys.
  if (hps_bytes(format, n) != payload.size) return {Reason::kTruncated, hps_bytes(format, n)};
  *rows = n;
  return {Reason::kOk, 0};
}

void read_hps(const Payload& payload, const HpsFormat& format, std::size_t rows, std::int64_t* keys,
              std::uint8_t* vectors) {
  const auto reader = format.key_bytes == 8 ? select_reader<std::int64_t>(format.row_bytes)
                                            : select_reader<std::uint32_t>(format.row_bytes);
  reader(payload.data + kHpsHeader, format.row_bytes, rows, keys, vectors);
}

void write_hps(const HpsFormat& format, std::size_t rows, const std::int64_t* keys,
               const std::uint8_t* vectors, std::uint8_t* out) {
  const auto row_bytes = static_cast<std::uint32_t>(format.row_bytes);
  std::memcpy(out, kHpsMagic, 4);
  std::memcpy(out + 4, &row_bytes, 4);
  const auto writer = format.key_bytes == 8 ? select_writer<std::int64_t>(format.row_bytes)
                                            : select_writer<std::uint32_t>(format.row_bytes);
  writer(keys, vectors, format.row_bytes, rows, out + kHpsHeader);
}

std::vector<Group> decode_native(const Payload* payloads, std::size_t n, std::size_t max_bytes,
                                 Message* messages) {
  Groups groups;
  std::vector<Columns> columns(n);
  for (std::size_t i = 0; i < n; ++i) {
    Message decoded;
    const Verdict verdict = check_native(payloads[i], max_bytes, &decoded, &columns[i]);
    messages[i] = Message{};
    messages[i].reason = verdict.reason;
    messages[i].at = static_cast<std::uint32_t>(verdict.at);
    if (verdict.reason != Reason::kOk) continue;
    messages[i].upserts = decoded.upserts;
    messages[i].deletes = decoded.deletes;
    messages[i].ttl_s = read<std::uint32_t>(payloads[i], kTtlAt);
    messages[i].event_ms = read<std::int64_t>(payloads[i], kEventAt);
    messages[i].step = read<std::uint64_t>(payloads[i], kStepAt);
    messages[i].dense_version = read<std::uint64_t>(payloads[i], kDenseVersionAt);
    messages[i].group = groups.find_or_add(payloads[i], columns[i]);
    Group& group = groups.all[static_cast<std::size_t>(messages[i].group)];
    group.upserts += decoded.upserts;
    group.deletes += decoded.deletes;
  }
  for (Group& group : groups.all) {
    allocate(group);
    group.upserts = group.deletes = 0;
  }
  for (std::size_t i = 0; i < n; ++i)
    if (messages[i].group >= 0)
      append(payloads[i], columns[i], messages[i],
             groups.all[static_cast<std::size_t>(messages[i].group)]);
  return std::move(groups.all);
}

}  // namespace hps
