// Launches of fetch_kernel that repeat with few changes of their arguments, without the host work
// of a library, and a wait for their end that polls host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "hps/cuda_driver.hpp"

namespace hps {

// FetchPart, FetchArgs and CountArgs of hps/cuda/fetch.cu.
struct FetchPart {
  std::uint64_t lines, rows, host_rows, row_versions, keys, positions, out, versions, source;
  std::uint64_t oldest_tombstone;
  std::uint32_t buckets, stride, row_bytes, on_device, n, base, first_block, now, policy, code;
};
struct FetchArgs {
  static constexpr std::size_t kParts = 32;
  std::uint64_t misses, miss_count, done, result, later, miss_keys;
  std::uint32_t parts;
  std::uint16_t window, window_shift;
  std::uint32_t sequence, unused;
  FetchPart part[kParts];
};
struct CountArgs {
  std::uint64_t miss_count, result;
  std::uint32_t sequence, unused;
};
static_assert(sizeof(FetchPart) == 120 && sizeof(FetchArgs) == 64 + 32 * 120);
static_assert(sizeof(CountArgs) == 24);

// One thread at a time, except that `wait` may be called by any one thread; the context of the
// kernels must be current. Methods throw std::runtime_error if the driver reports an error.
// `FetchLaunch` does not own what it points to.
struct FetchLaunch {
  using Address = CudaDriver::Address;
  using Handle = CudaDriver::Handle;
  // The kernel that reports the misses: that of a later launch, fetch_kernel, or count_kernel.
  enum class Report { kNone, kByFetch, kBehind };
  // What differs between the fetches of a table: FetchPart's fields.
  struct Part {
    std::uint64_t keys, positions, out, versions, source, oldest_tombstone;
    std::uint32_t n;
  };

  FetchArgs* arguments;
  std::vector<const std::uint32_t*> now;  // each part's cell for its field `now`, read at launch
  Handle count;                           // count_kernel
  // Its result, in host memory, and its last sequence number are also fetch_kernel's; launches that
  // take turns may share it.
  CountArgs* count_arguments;
  Handle end = nullptr;  // the event of the last launch

  void launch_with(FetchArgs& own, Handle function, std::uint32_t blocks, Handle stream, Handle end,
                   Report report);

  // Sets the parts for tables whose fields are filled in; returns the blocks to launch.
  std::uint32_t set(const Part* parts, std::size_t n, std::uint32_t keys_a_block);

  // Launches `function` on `stream`, with the report of misses, and records `end` behind it. The
  // writer's `hold_back` sees both or neither.
  void launch(Handle function, std::uint32_t blocks, Handle stream, Handle end, Report report);

  // The same for those keys of all parts joined that are in [first, last), of parts without
  // positions whose other fields are set.
  void launch_keys(Handle function, std::uint32_t keys_a_block, std::size_t first, std::size_t last,
                   Handle stream, Handle end, Report report);

  // Waits for the last launch and returns its number of misses.
  std::uint32_t wait() const;
};

// PlacePart and PlaceArgs of hps/cuda/scatter.cu.
struct PlacePart {
  std::uint64_t out, source;
  std::uint32_t base, row_bytes;
};
struct PlaceArgs {
  std::uint64_t positions, rows, sources;
  std::uint32_t n, stride, parts, unused;
  PlacePart part[FetchArgs::kParts];
};
static_assert(sizeof(PlaceArgs) == 40 + 32 * 24);

// Launches of place_kernel for ranges of the rows that the host has for missing keys. One thread at
// a time; the kernel's context must be current. Throws std::runtime_error like FetchLaunch.
struct PlaceLaunch {
  CudaDriver::Handle function;
  std::uint32_t rows_a_block;
  PlaceArgs* arguments;

  // Places `n` rows, `stride` bytes apart in memory that the device can read, as the other arrays.
  void launch(const std::uint32_t* positions, const std::uint8_t* rows, const std::uint8_t* sources,
              std::size_t n, CudaDriver::Handle stream) const;
};

// Returns the nanoseconds that this thread has spent in FetchLaunch::wait.
std::uint64_t waited_ns();

// Makes later work on `stream` wait for `events` of fetches.
void hold_back(CudaDriver::Handle stream, const std::vector<CudaDriver::Handle>& events);

// Makes later work on `stream` wait for the work on `other` so far, by `event`.
void order_after(CudaDriver::Handle stream, CudaDriver::Handle other, CudaDriver::Handle event);

}  // namespace hps
