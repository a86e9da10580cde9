#include "hps/miss_fill.hpp"

#include <time.h>

#include <algorithm>

namespace hps {
namespace {

// Misses for which a pool's threads are worth their start: the gather takes one thread some 0.1 ms.
constexpr std::size_t kPooledMisses = 2 * kMissPiece;
// Of a batch with more misses than the first number, some of the second one are promoted: a sample
// is as good, and does not delay the batch.
constexpr std::size_t kAllPromoted = 2048, kPromoted = 512;

std::int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

// Finds the part of a position; misses of one part often follow each other.
class PartFinder {
 public:
  explicit PartFinder(const std::vector<FillPart>& parts) : parts_(parts) {}

  const FillPart& of(std::uint32_t position) {
    const auto holds = [&](std::size_t part) {
      return parts_[part].base <= position &&
             (part + 1 == parts_.size() || position < parts_[part + 1].base);
    };
    if (!holds(last_)) {
      const auto after = std::upper_bound(
          parts_.begin(), parts_.end(), position,
          [](std::uint32_t value, const FillPart& part) { return value < part.base; });
      last_ = static_cast<std::size_t>(after - parts_.begin()) - 1;
    }
    return parts_[last_];
  }

 private:
  const std::vector<FillPart>& parts_;
  std::size_t last_ = 0;
};

void count(FillOutcome::Slice& slice, const std::vector<std::uint32_t>& group_of,
           std::uint32_t features, FillOutcome& outcome) {
  if (slice.n == 0) return;
  PartFinder parts(slice.chunk->parts);
  const std::size_t step = slice.n <= kAllPromoted ? 1 : slice.n / kPromoted;
  for (std::size_t i = 0, next = 0; i < slice.n; ++i) {
    const FillPart& part = parts.of(slice.positions[i]);
    const std::uint32_t key = part.first + slice.positions[i] - part.base;
    const std::uint32_t sample = part.hotness == 1 ? key : key / part.hotness;
    ++outcome.missed[std::size_t{group_of[sample]} * features + part.feature];
    const bool found = slice.sources[i] != kUnanswered;
    if (!found) {
      outcome.unresolved[sample] = 1;
      ++outcome.left[part.feature];
    }
    if (i != next) continue;
    next += step;
    if (!found) continue;
    outcome.features.push_back(part.feature);
    outcome.keys.push_back(slice.keys[i]);
  }
  slice.n = 0;
}

bool place(FillChunk& chunk, const MissList& list, FillStream& stream) {
  *chunk.at_positions = reinterpret_cast<std::uint64_t>(list.positions);
  *chunk.at_rows = reinterpret_cast<std::uint64_t>(list.rows);
  *chunk.at_sources = reinterpret_cast<std::uint64_t>(list.sources);
  *chunk.at_n = static_cast<std::uint32_t>(list.n);
  chunk.place.blocks =
      (static_cast<std::uint32_t>(list.n) + chunk.rows_per_block - 1) / chunk.rows_per_block;
  return stream.run(chunk.place);
}

}  // namespace

void MissFill::use(std::uint32_t samples) {
  for (const FillChunk& chunk : chunks)
    for (const FillPart& part : chunk.parts) {
      const std::uint64_t keys = std::uint64_t{samples} * part.hotness;
      *part.used =
          keys <= part.first
              ? 0
              : static_cast<std::uint32_t>(std::min<std::uint64_t>(keys - part.first, part.count));
    }
}

std::size_t MissFill::missing() const {
  std::size_t sum = 0;
  for (const FillChunk& chunk : chunks) sum += *chunk.missing;
  return sum;
}

void FillOutcome::begin(std::size_t samples, std::size_t groups, std::size_t n_features) {
  unresolved.assign(samples, 0);
  missed.assign(groups * n_features, 0);
  left.assign(n_features, 0);
  gather_ns = 0;
  for (Slice& slice : uncounted) slice = {};
  features.clear();
  keys.clear();
}

bool fill_misses(MissFill& fill, const std::vector<std::uint32_t>& group_of, FillStream& stream,
                 FillOutcome& outcome) {
  const std::size_t half = fill.bytes / 2 / 16 * 16;
  const std::size_t most = half / (fill.stride + 1);  // rows of a slice
  std::vector<MissPart>& parts = outcome.parts;
  const bool reuses = fill.chunks.size() > 1 || fill.missing() > 2 * most;
  const auto count_slice = [&](FillOutcome::Slice& slice) {
    count(slice, group_of, fill.features, outcome);
  };
  unsigned number = 0;
  for (FillChunk& chunk : fill.chunks) {
    parts.clear();
    for (const FillPart& part : chunk.parts) parts.push_back({part.table, nullptr, part.base});
    const std::size_t missing = *chunk.missing;
    for (std::size_t start = 0; start < missing; start += most, ++number) {
      const unsigned use = number % 2;
      count_slice(outcome.uncounted[use]);
      // Two slices before, this half of the memory was used.
      if (number >= 2 && !stream.wait(use)) return false;
      std::uint8_t* rows = fill.memory + use * half;
      const std::size_t n = std::min(most, missing - start);
      const MissList list{
          parts.data(), parts.size(), chunk.positions + start, chunk.keys + start, n,
          rows,         fill.stride,  rows + n * fill.stride,  fill.code,          nullptr};
      const std::int64_t began = now_ns();
      const bool pooled = fill.pool != nullptr && n >= kPooledMisses;
      const std::size_t left = pooled ? gather_misses(list, *fill.pool) : gather_misses(list);
      outcome.gather_ns += now_ns() - began;
      if (left < n && !place(chunk, list, stream)) return false;
      if (reuses && !stream.mark(use)) return false;
      outcome.uncounted[use] = {&chunk, list.positions, list.keys, list.sources, n};
    }
  }
  for (Step& step : fill.rest)
    if (!stream.run(step)) return false;
  if (!stream.end()) return false;
  for (FillOutcome::Slice& slice : outcome.uncounted) count_slice(slice);  // as the device works
  return true;
}

}  // namespace hps
