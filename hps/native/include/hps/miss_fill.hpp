// Completion of batches whose rows are not all on the device: it fetches the rows that it has and
// lists the other keys; their rows are gathered from tables in host memory, and placed beside them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hps/lane_step.hpp"
#include "hps/miss_gather.hpp"

namespace hps {

// Keys of one feature in a fetch: `count` of them, from the feature's key number `first` on.
struct FillPart {
  const RowReader* table;  // null: no row is found
  std::uint32_t base;      // the position of the first key in the fetch; bases ascend
  std::uint32_t first, count, hotness, feature;
  std::uint32_t* used;  // receives the number of keys to fetch, the first ones of the part
};

// One launch of a fetch, the list of its misses in host memory, and the step that places rows.
struct FillChunk {
  std::vector<FillPart> parts;
  const std::uint32_t* missing;    // the number of misses
  const std::uint32_t* positions;  // of the missing keys, in any order
  const std::int64_t* keys;        // the missing keys, in the same order
  // Places n rows of the misses; a kernel gets a block for each `rows_per_block` of them.
  Step place;
  std::uint32_t rows_per_block;
  // The step's arguments: addresses of positions, rows and source codes, and n.
  std::uint64_t *at_positions, *at_rows, *at_sources;
  std::uint32_t* at_n;
};

// The work of a lane for batches of one size that miss rows.
struct MissFill {
  std::vector<Step> fetch, rest;  // `rest` follows the placing of rows
  std::vector<FillChunk> chunks;
  std::uint8_t* memory;  // pinned memory for rows and their source codes, 16-byte aligned
  std::size_t bytes;     // of it: 2 * (16 + stride + 1) at least
  std::size_t stride;    // bytes from row to row, a multiple of 16
  std::uint8_t code;     // source code of rows in host memory
  std::uint32_t features;

  // Lets the fetch take the keys of `samples` samples.
  void use(std::uint32_t samples);
  std::size_t missing() const;
};

// What a fill found. Reused, so that it allocates nothing once it has grown.
struct FillOutcome {
  std::vector<std::uint8_t> unresolved;  // per sample: 1 if a key has no row
  std::vector<std::uint32_t> missed;     // (groups, features): misses
  std::vector<std::uint32_t> left;       // per feature: misses without a row
  std::int64_t gather_ns = 0;
  std::vector<std::uint32_t> features;  // of the keys to be promoted
  std::vector<std::int64_t> keys;       // to be promoted: a sample of the misses with rows
};

// The stream on which a fill's steps run.
class FillStream {
 public:
  virtual ~FillStream() = default;
  virtual bool run(Step& step) = 0;
  // Remembers the work so far, which uses half number `half` of the memory, for `wait`.
  virtual bool mark(unsigned half) = 0;
  virtual bool wait(unsigned half) = 0;
  // Called after the last step.
  virtual bool end() = 0;
};

// Gathers and places the rows of a batch's misses, and starts the rest. Several threads gather
// pieces of it; the thread that gathered the last piece continues.
class MissFiller {
 public:
  enum class Piece { kNone, kSome, kLast };
  enum class Progress { kGathering, kLaunched, kFailed };

  // Begins a fill whose fetch has ended, of a batch that is not filled yet. `group_of (samples,)`:
  // the group, of so many, under which a sample's misses are counted. Both must stay as they are.
  void begin(MissFill& fill, const std::vector<std::uint32_t>& group_of, std::size_t groups);

  // Gathers a piece; kNone if all are taken. The thread that gets kLast must call `advance`.
  // Thread-safe, also after the fill.
  Piece gather();

  // Places what was gathered; begins to gather the next rows, in so many `pieces`, or starts the
  // rest. To be called once after `begin`. With kGathering, others may have continued already.
  Progress advance(FillStream& stream, std::size_t& pieces);

  const FillOutcome& outcome() const { return outcome_; }

 private:
  static constexpr std::size_t kPiece = 256;  // misses, some 15 us

  bool place(FillStream& stream);
  bool begin_slice(FillStream& stream, std::size_t& pieces);
  void count(std::size_t first, std::size_t last);
  void choose_promoted();

  MissFill* fill_ = nullptr;
  const std::vector<std::uint32_t>* group_of_ = nullptr;
  FillOutcome outcome_;
  std::vector<MissPart> parts_;
  std::size_t chunk_ = 0, start_ = 0;  // of the next slice
  unsigned slices_ = 0;                // begun so far
  bool reuses_ = false;                // a half of the memory is used by several slices
  std::int64_t began_ns_ = 0;

  // The slice that is gathered: stays as it is until all of its pieces have ended.
  const FillChunk* of_ = nullptr;
  MissList list_{};
  std::atomic<std::uint64_t> next_{0};  // pieces << 32 | the next one to take
  std::atomic<std::size_t> ended_{0}, left_{0};
};

}  // namespace hps
