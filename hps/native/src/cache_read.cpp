#include "hps/cache_read.hpp"

#include <cstring>

#include "by_row_bytes.hpp"
#include "cache_reader.hpp"

#define HPS_STRINGIFY(x) #x
#define HPS_NAME(x) HPS_STRINGIFY(x)

namespace hps {
namespace HPS_ISA {
namespace {

template <std::size_t RowBytes>
bool gather_rows(const CacheView& view, const std::int64_t* keys, std::size_t n,
                 std::uint8_t* out) {
  Reader<RowBytes, false> reader(view);
  bool all = true;
  reader.look_up(
      n, [&](std::size_t i) { return keys[i]; },
      [&](std::size_t i) { return out + i * reader.row_bytes(); },
      [&](std::size_t, Outcome outcome, std::uint64_t) { return all = outcome == Outcome::kRow; });
  return all;
}

template <std::size_t RowBytes>
std::size_t gather_each_row(const CacheView& view, const std::int64_t* keys,
                            const std::uint32_t* places, std::size_t n, const EachOutput& output) {
  Reader<RowBytes, false> reader(view);
  std::size_t unanswered = 0;
  reader.look_up(
      n, [&](std::size_t j) { return keys[j]; },
      [&](std::size_t j) { return output.rows + places[j] * output.stride; },
      [&](std::size_t j, Outcome outcome, std::uint64_t) {
        const bool found = outcome == Outcome::kRow;
        output.sources[places[j]] = found ? output.code : output.absent;
        unanswered += !found;
        return true;
      });
  return unanswered;
}

template <std::size_t RowBytes>
std::size_t fetch_rows(const CacheView& view, const std::int64_t* keys, const std::int64_t* missing,
                       std::size_t m, std::uint64_t oldest_tombstone, const FetchOutput& output,
                       std::int64_t* left) {
  Reader<RowBytes, true> reader(view);
  std::size_t unanswered = 0;
  reader.look_up(
      m, [&](std::size_t i) { return keys[missing[i]]; },
      [&](std::size_t i) {
        return output.out + static_cast<std::size_t>(missing[i]) * reader.row_bytes();
      },
      [&](std::size_t i, Outcome outcome, std::uint64_t version) {
        const std::int64_t at = missing[i];
        if (outcome == Outcome::kMissing ||
            (outcome == Outcome::kTombstone && version < oldest_tombstone)) {
          left[unanswered++] = at;
        } else {
          output.versions[at] = version;
          if (outcome == Outcome::kRow) output.source[at] = output.code;
        }
        return true;
      });
  return unanswered;
}

bool gather(const CacheView& view, const std::int64_t* keys, std::size_t n,
            std::uint8_t* out){HPS_BY_ROW_BYTES(gather_rows, view, keys, n, out)}

std::size_t gather_each(const CacheView& view, const std::int64_t* keys,
                        const std::uint32_t* places, std::size_t n, const EachOutput& output){
    HPS_BY_ROW_BYTES(gather_each_row, view, keys, places, n, output)}

std::size_t fetch(const CacheView& view, const std::int64_t* keys, const std::int64_t* missing,
                  std::size_t m, std::uint64_t oldest_tombstone, const FetchOutput& output,
                  std::int64_t* left) {
  HPS_BY_ROW_BYTES(fetch_rows, view, keys, missing, m, oldest_tombstone, output, left)
}

template <std::size_t RowBytes>
void copy_rows_of(const std::uint8_t* rows, std::size_t row_bytes, const std::int64_t* numbers,
                  std::size_t n, std::uint8_t* out) {
  constexpr std::size_t kAhead = 24;
  const std::size_t bytes = RowBytes != 0 ? RowBytes : row_bytes;
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kAhead < n)
      prefetch_row(rows + static_cast<std::size_t>(numbers[i + kAhead]) * bytes, bytes);
    std::memcpy(out + i * bytes, rows + static_cast<std::size_t>(numbers[i]) * bytes, bytes);
  }
}

void copy_rows(const std::uint8_t* rows, std::size_t row_bytes, const std::int64_t* numbers,
               std::size_t n, std::uint8_t* out) {
  switch (row_bytes) {
    case 64:
      return copy_rows_of<64>(rows, row_bytes, numbers, n, out);
    case 128:
      return copy_rows_of<128>(rows, row_bytes, numbers, n, out);
    case 512:
      return copy_rows_of<512>(rows, row_bytes, numbers, n, out);
    default:
      return copy_rows_of<0>(rows, row_bytes, numbers, n, out);
  }
}

}  // namespace

std::size_t pool(const CacheView& view, const PoolRequest& request, std::int64_t* left);
void pool_rows(const PoolRequest& request);
void decode_rows(const DecodeRequest& request);
void encode_rows(const EncodeRequest& request);

extern const ReadKernels kKernels;
const ReadKernels kKernels{gather,      gather_each, fetch,
                           pool,        pool_rows,   decode_rows,
                           encode_rows, copy_rows,   HPS_NAME(HPS_ISA)};

}  // namespace HPS_ISA
}  // namespace hps
