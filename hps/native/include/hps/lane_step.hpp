// Steps of a lane of the batch scheduler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace hps {

// A step of a lane's work: one call of the driver, or a function.
struct Step {
  enum class Kind { kCopyIn, kCopyOut, kClear, kKernel, kGraph, kCall };
  // A field of a kernel's arguments that is copied before each launch, for example a clock.
  using Refresh = std::pair<std::uint32_t*, const std::uint32_t*>;

  Kind kind = Kind::kCall;
  std::uint64_t device = 0;    // copies, clears: the address on the device
  void* host = nullptr;        // copies: pinned memory; kernels: the struct of arguments
  std::size_t bytes = 0;       // copies, clears
  void* function = nullptr;    // kernels: CUfunction; graphs: CUgraphExec
  std::uint32_t blocks = 0;    // kernels
  std::uint32_t threads = 0;   // kernels
  bool reads_tables = false;   // kernels: writers of tables wait for its end
  std::vector<Refresh> fresh;  // kernels
  std::function<bool()> call;  // calls: false if it failed
};

}  // namespace hps
