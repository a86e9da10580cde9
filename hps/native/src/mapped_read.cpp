#include "hps/mapped_read.hpp"

#include <memory>

#include "by_row_bytes.hpp"
#include "mapped_reader.hpp"

#define HPS_STRINGIFY(x) #x
#define HPS_NAME(x) HPS_STRINGIFY(x)

namespace hps {
namespace HPS_ISA {

void pool_rows(const PoolRequest& request);
void decode_rows(const DecodeRequest& request);

namespace {

template <std::size_t RowBytes>
std::size_t gather_rows(const MappedView& view, const std::int64_t* keys, std::size_t n,
                        std::uint8_t* out, std::uint32_t* left) {
  MappedReader<RowBytes> reader(view);
  std::size_t unanswered = 0;
  reader.look_up(
      n, [&](std::size_t i) { return keys[i]; },
      [&](std::size_t i, Held held, const std::uint8_t* row) HPS_INLINE_CALLBACK {
        if (__builtin_expect(held != Held::kRow, 0)) {
          if (left != nullptr) left[unanswered] = static_cast<std::uint32_t>(i);
          ++unanswered;
          return left != nullptr;
        }
        std::memcpy(out + i * reader.row_bytes(), row, reader.row_bytes());
        return true;
      });
  return unanswered;
}

template <std::size_t RowBytes>
std::size_t gather_each_row(const MappedView& view, const std::int64_t* keys,
                            const std::uint32_t* places, std::size_t n, const EachOutput& output) {
  MappedReader<RowBytes> reader(view);
  std::size_t unanswered = 0;
  reader.look_up(
      n, [&](std::size_t j) { return keys[j]; },
      [&](std::size_t j, Held held, const std::uint8_t* row) HPS_INLINE_CALLBACK {
        const bool found = held == Held::kRow;
        if (found) std::memcpy(output.rows + places[j] * output.stride, row, reader.row_bytes());
        output.sources[places[j]] = found ? output.code : output.absent;
        unanswered += !found;
        return true;
      });
  return unanswered;
}

template <std::size_t RowBytes>
void fetch_rows(const MappedView& view, const std::int64_t* keys, const std::int64_t* missing,
                std::size_t m, std::uint64_t version, const FetchOutput& output, LeftKeys& left) {
  MappedReader<RowBytes> reader(view);
  reader.look_up(
      m, [&](std::size_t i) { return keys[missing[i]]; },
      [&](std::size_t i, Held held, const std::uint8_t* row) HPS_INLINE_CALLBACK {
        const auto at = static_cast<std::size_t>(missing[i]);
        if (__builtin_expect(held == Held::kRow, 1)) {
          std::memcpy(output.out + at * reader.row_bytes(), row, reader.row_bytes());
          output.versions[at] = version;
          output.source[at] = output.code;
        } else if (held == Held::kOverridden) {
          left.overridden[left.n_overridden++] = missing[i];
        } else {
          left.absent[left.n_absent++] = missing[i];
        }
        return true;
      });
}

template <std::size_t RowBytes>
void copy_records(const MappedView& view, const std::int64_t* positions, std::size_t n,
                  std::uint8_t* out) {
  const MappedReader<RowBytes> reader(view);
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) reader.prefetch(static_cast<std::uint32_t>(positions[i + kAhead]));
    std::memcpy(out + i * reader.row_bytes(),
                reader.record(static_cast<std::size_t>(positions[i])) + kKeyBytes,
                reader.row_bytes());
  }
}

std::size_t gather(const MappedView& view, const std::int64_t* keys, std::size_t n,
                   std::uint8_t* out,
                   std::uint32_t* left){HPS_BY_ROW_BYTES(gather_rows, view, keys, n, out, left)}

std::size_t gather_each(const MappedView& view, const std::int64_t* keys,
                        const std::uint32_t* places, std::size_t n, const EachOutput& output) {
  HPS_BY_ROW_BYTES(gather_each_row, view, keys, places, n, output)
}

void fetch(const MappedView& view, const std::int64_t* keys, const std::int64_t* missing,
           std::size_t m, std::uint64_t version, const FetchOutput& output, LeftKeys& left) {
  HPS_BY_ROW_BYTES(fetch_rows, view, keys, missing, m, version, output, left)
}

void copy(const MappedView& view, const std::int64_t* positions, std::size_t n, std::uint8_t* out) {
  HPS_BY_ROW_BYTES(copy_records, view, positions, n, out)
}

void find(const MappedView& view, const std::int64_t* keys, std::size_t n,
          std::int64_t* positions) {
  MappedReader<0> reader(view);
  const auto key_at = [&](std::size_t i) { return keys[i]; };
  if (view.rows == 0) {
    for (std::size_t i = 0; i < n; ++i) positions[i] = -1;
    return;
  }
  reader.locate<true>(n, key_at, [&](std::size_t i, std::uint32_t position) {
    const bool absent = reader.held(position, keys[i]) == Held::kAbsent;
    positions[i] = absent ? -1 : static_cast<std::int64_t>(position);
    return true;
  });
}

void guess(const MappedView& view, const std::int64_t* keys, std::size_t n,
           std::int64_t* positions) {
  MappedReader<0> reader(view);
  const auto key_at = [&](std::size_t i) { return keys[i]; };
  if (view.rows == 0) return;
  reader.locate<false>(n, key_at, [&](std::size_t i, std::uint32_t position) {
    positions[i] = static_cast<std::int64_t>(position);
    return true;
  });
}

constexpr std::size_t kPoolKeys = 1024;

// The rows of up to `capacity` keys, in a buffer that fits the second-level cache, and which of
// them have one.
struct RowBuffer {
  std::size_t capacity = 0;
  std::unique_ptr<std::uint8_t[]> rows, sources;
  std::unique_ptr<std::uint32_t[]> places;

  void reserve(std::size_t n, std::size_t row_bytes) {
    if (n <= capacity) return;
    capacity = n < kPoolKeys ? kPoolKeys : n;
    rows.reset(new std::uint8_t[capacity * row_bytes]);
    places.reset(new std::uint32_t[capacity]);
    sources.reset(new std::uint8_t[capacity]);
    for (std::size_t i = 0; i < capacity; ++i) places[i] = static_cast<std::uint32_t>(i);
  }
};

// Decodes the n rows of `part`, which begin at the position `begin` of `request`, and puts the
// supplied vectors, from number `at` on, in their places. Returns the number of the next supplied
// vector; `vectors` holds the result.
std::size_t supply(const PoolRequest& request, PoolRequest& part, std::int64_t begin, std::size_t n,
                   std::size_t at, std::uint8_t* sources, std::unique_ptr<float[]>& vectors) {
  vectors.reset(new float[n * request.dim]);
  decode_rows({request.format, request.dim, part.rows, nullptr, n, false,
               reinterpret_cast<std::uint8_t*>(vectors.get())});
  const std::int64_t end = begin + static_cast<std::int64_t>(n);
  for (; at < request.n_supplied && request.supplied[at] < end; ++at) {
    const auto to = static_cast<std::size_t>(request.supplied[at] - begin);
    std::memcpy(vectors.get() + to * request.dim, request.vectors + at * request.dim,
                request.dim * sizeof(float));
    sources[to] = 1;
  }
  part.format = RowFormat::kFloat32;
  part.rows = reinterpret_cast<const std::uint8_t*>(vectors.get());
  return at;
}

// Copies the rows of some bags to a buffer, and pools them there. A bag that is longer than the
// buffer is copied as a whole.
std::size_t pool(const MappedView& view, const PoolRequest& request, std::int64_t* left) {
  std::size_t unanswered = 0, supplied = 0;
  RowBuffer buffer;
  std::unique_ptr<std::int64_t[]> offsets;
  std::unique_ptr<float[]> vectors;
  for (std::size_t bag = request.first, last = bag; bag < request.last; bag = last) {
    const std::int64_t begin = request.begin_of(bag);
    for (last = bag + 1; last < request.last; ++last)
      if (request.begin_of(last + 1) - begin > static_cast<std::int64_t>(kPoolKeys)) break;
    const auto n = static_cast<std::size_t>(request.begin_of(last) - begin);
    buffer.reserve(n == 0 ? 1 : n, view.row_bytes);
    offsets.reset(new std::int64_t[last - bag + 1]);
    for (std::size_t b = bag; b <= last; ++b) offsets[b - bag] = request.begin_of(b) - begin;
    std::uint8_t* sources = buffer.sources.get();
    gather_each(view, request.keys + begin, buffer.places.get(), n,
                {buffer.rows.get(), view.row_bytes, sources, 1, 0});
    PoolRequest part = request;
    part.keys = nullptr;
    part.offsets = offsets.get();
    part.first = 0;
    part.last = last - bag;
    part.weights = request.weights != nullptr ? request.weights + begin : nullptr;
    part.divisors = request.divisors != nullptr ? request.divisors + bag : nullptr;
    part.out = request.out_of(bag);
    part.supplied = nullptr;
    part.n_supplied = 0;
    part.rows = buffer.rows.get();
    while (supplied < request.n_supplied && request.supplied[supplied] < begin) ++supplied;
    if (supplied < request.n_supplied &&
        request.supplied[supplied] < begin + static_cast<std::int64_t>(n))
      supplied = supply(request, part, begin, n, supplied, sources, vectors);
    for (std::size_t i = 0; i < n; ++i)
      if (sources[i] == 0) left[unanswered++] = begin + static_cast<std::int64_t>(i);
    HPS_ISA::pool_rows(part);
  }
  return unanswered;
}

}  // namespace

extern const MappedKernels kMappedKernels;
const MappedKernels kMappedKernels{gather, gather_each, pool, fetch,
                                   find,   guess,       copy, HPS_NAME(HPS_ISA)};

}  // namespace HPS_ISA
}  // namespace hps
