#include "hps/miss_fill.hpp"

#include <time.h>

#include <algorithm>

namespace hps {
namespace {

// Of a slice with more misses than the first number, some of the second one are promoted: a sample
// is as good, and does not delay the batch.
constexpr std::size_t kAllPromoted = 1024, kPromoted = 512;

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

// Adds to a counter of several threads, but only when another one is counted.
class Sum {
 public:
  ~Sum() { flush(); }
  void add(std::uint32_t* counter) {
    if (counter != counter_) flush();
    counter_ = counter;
    ++sum_;
  }

 private:
  void flush() {
    if (sum_ != 0) __atomic_fetch_add(counter_, sum_, __ATOMIC_RELAXED);
    sum_ = 0;
  }

  std::uint32_t* counter_ = nullptr;
  std::uint32_t sum_ = 0;
};

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

void MissFiller::begin(MissFill& fill, const std::vector<std::uint32_t>& group_of,
                       std::size_t groups) {
  fill_ = &fill;
  group_of_ = &group_of;
  outcome_.unresolved.assign(group_of.size(), 0);
  outcome_.missed.assign(groups * fill.features, 0);
  outcome_.left.assign(fill.features, 0);
  outcome_.gather_ns = 0;
  outcome_.features.clear();
  outcome_.keys.clear();
  chunk_ = start_ = 0;
  slices_ = 0;
  of_ = nullptr;
}

MissFiller::Piece MissFiller::gather() {
  const auto is_left = [](std::uint64_t next) { return (next & 0xffffffff) < next >> 32; };
  if (!is_left(next_.load(std::memory_order_relaxed))) return Piece::kNone;
  const std::uint64_t taken = next_.fetch_add(1, std::memory_order_acquire);
  if (!is_left(taken)) return Piece::kNone;
  const std::uint64_t pieces = taken >> 32, piece = taken & 0xffffffff;
  const std::size_t first = piece * kPiece, last = std::min(list_.n, first + kPiece);
  left_.fetch_add(gather_piece(list_, first, last), std::memory_order_relaxed);
  count(first, last);
  const bool all = ended_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces;
  return all ? Piece::kLast : Piece::kSome;
}

void MissFiller::count(std::size_t first, std::size_t last) {
  PartFinder parts(of_->parts);
  Sum missed;
  for (std::size_t i = first; i < last; ++i) {
    const FillPart& part = parts.of(list_.positions[i]);
    const std::uint32_t key = part.first + list_.positions[i] - part.base;
    const std::uint32_t sample = part.hotness == 1 ? key : key / part.hotness;
    const std::size_t group = (*group_of_)[sample];
    missed.add(&outcome_.missed[group * fill_->features + part.feature]);
    if (list_.sources[i] != kUnanswered) continue;
    __atomic_store_n(&outcome_.unresolved[sample], std::uint8_t{1}, __ATOMIC_RELAXED);
    __atomic_fetch_add(&outcome_.left[part.feature], 1, __ATOMIC_RELAXED);
  }
}

MissFiller::Progress MissFiller::advance(FillStream& stream, std::size_t& pieces) {
  if (of_ != nullptr) {
    outcome_.gather_ns += now_ns() - began_ns_;
    if (!place(stream)) return Progress::kFailed;
  }
  for (; chunk_ < fill_->chunks.size(); ++chunk_, start_ = 0)
    if (start_ < *fill_->chunks[chunk_].missing)
      return begin_slice(stream, pieces) ? Progress::kGathering : Progress::kFailed;
  for (Step& step : fill_->rest)
    if (!stream.run(step)) return Progress::kFailed;
  return stream.end() ? Progress::kLaunched : Progress::kFailed;
}

bool MissFiller::begin_slice(FillStream& stream, std::size_t& pieces) {
  const std::size_t half = fill_->bytes / 2 / 16 * 16, most = half / (fill_->stride + 1);
  const FillChunk& chunk = fill_->chunks[chunk_];
  const unsigned use = slices_ % 2;
  // Two slices before, this half of the memory was used.
  if (slices_ >= 2 && !stream.wait(use)) return false;
  reuses_ = fill_->chunks.size() > 1 || *chunk.missing > 2 * most;
  if (start_ == 0) {
    parts_.clear();
    for (const FillPart& part : chunk.parts) parts_.push_back({part.table, nullptr, part.base});
  }
  const std::size_t n = std::min(most, *chunk.missing - start_);
  std::uint8_t* rows = fill_->memory + use * half;
  of_ = &chunk;
  list_ = {parts_.data(), parts_.size(), chunk.positions + start_, chunk.keys + start_, n,
           rows,          fill_->stride, rows + n * fill_->stride, fill_->code,         nullptr};
  start_ += n;
  ++slices_;
  began_ns_ = now_ns();
  left_.store(0, std::memory_order_relaxed);
  ended_.store(0, std::memory_order_relaxed);
  pieces = (n + kPiece - 1) / kPiece;
  next_.store(std::uint64_t{pieces} << 32, std::memory_order_release);
  return true;
}

// Starts the placing of the slice's rows.
bool MissFiller::place(FillStream& stream) {
  if (left_.load(std::memory_order_relaxed) == list_.n) return true;
  FillChunk& chunk = fill_->chunks[static_cast<std::size_t>(of_ - fill_->chunks.data())];
  *chunk.at_positions = reinterpret_cast<std::uint64_t>(list_.positions);
  *chunk.at_rows = reinterpret_cast<std::uint64_t>(list_.rows);
  *chunk.at_sources = reinterpret_cast<std::uint64_t>(list_.sources);
  *chunk.at_n = static_cast<std::uint32_t>(list_.n);
  chunk.place.blocks =
      (static_cast<std::uint32_t>(list_.n) + chunk.rows_per_block - 1) / chunk.rows_per_block;
  if (!stream.run(chunk.place)) return false;
  choose_promoted();  // while the device takes the rows
  return !reuses_ || stream.mark((slices_ - 1) % 2);
}

void MissFiller::choose_promoted() {
  PartFinder parts(of_->parts);
  const std::size_t step = list_.n <= kAllPromoted ? 1 : list_.n / kPromoted;
  for (std::size_t i = 0; i < list_.n; i += step) {
    if (list_.sources[i] == kUnanswered) continue;
    outcome_.features.push_back(parts.of(list_.positions[i]).feature);
    outcome_.keys.push_back(list_.keys[i]);
  }
}

}  // namespace hps
