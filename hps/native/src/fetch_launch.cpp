#include "hps/fetch_launch.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "hps/relaxed.hpp"

namespace hps {
namespace {

constexpr unsigned kThreads = 256;               // of a block: loader.BLOCK
constexpr std::chrono::milliseconds kPolled{2};  // then the driver waits, which also reports errors
constexpr unsigned kPollsAtATime = 16;

std::mutex launching;  // held from a launch until its event is recorded

thread_local std::chrono::nanoseconds waited{0};

const CudaDriver& driver() {
  const CudaDriver* found = CudaDriver::get();
  if (found == nullptr) throw std::runtime_error("this machine has no CUDA driver");
  return *found;
}

void check(int code, const char* call) {
  if (code != kCudaSuccess)
    throw std::runtime_error(std::string(call) + " failed: " + driver().name_of(code));
}

void launch_kernel(CudaDriver::Handle function, std::uint32_t blocks, void* arguments,
                   CudaDriver::Handle stream) {
  void* pointers[] = {arguments};
  check(driver().launch(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, pointers, nullptr),
        "cuLaunchKernel");
}

}  // namespace

std::uint32_t FetchLaunch::set(const Part* parts, std::size_t n, std::uint32_t keys_a_block) {
  std::uint32_t base = 0, blocks = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Part& from = parts[i];
    FetchPart& to = arguments->part[i];
    to.keys = from.keys, to.positions = from.positions, to.out = from.out;
    to.versions = from.versions, to.source = from.source;
    to.oldest_tombstone = from.oldest_tombstone;
    to.n = from.n, to.base = base, to.first_block = blocks;
    base += from.n;
    blocks += (from.n + keys_a_block - 1) / keys_a_block;
  }
  return blocks;
}

void FetchLaunch::launch(Handle function, std::uint32_t blocks, Handle stream, Handle end_event,
                         Report report) {
  for (std::size_t i = 0; i < now.size(); ++i) arguments->part[i].now = *now[i];
  launch_with(*arguments, function, blocks, stream, end_event, report);
}

void FetchLaunch::launch_keys(Handle function, std::uint32_t keys_a_block, std::size_t first,
                              std::size_t last, Handle stream, Handle end_event, Report report) {
  FetchArgs own;
  std::memcpy(&own, arguments, offsetof(FetchArgs, part));
  std::uint32_t blocks = 0;
  own.parts = 0;
  for (std::size_t i = 0; i < now.size(); ++i) {
    const FetchPart& whole = arguments->part[i];
    const std::size_t begin = std::max<std::size_t>(first, whole.base);
    const std::size_t stop = std::min<std::size_t>(last, std::size_t{whole.base} + whole.n);
    if (begin >= stop) continue;
    const std::uint64_t skipped = begin - whole.base;
    FetchPart& part = own.part[own.parts++] = whole;
    part.keys += 8 * skipped, part.out += whole.row_bytes * skipped;
    if (part.versions != 0) part.versions += 8 * skipped;
    if (part.source != 0) part.source += skipped;
    part.n = static_cast<std::uint32_t>(stop - begin);
    part.base = static_cast<std::uint32_t>(begin), part.first_block = blocks, part.now = *now[i];
    blocks += (part.n + keys_a_block - 1) / keys_a_block;
  }
  launch_with(own, function, blocks, stream, end_event, report);
}

void FetchLaunch::launch_with(FetchArgs& own, Handle function, std::uint32_t blocks, Handle stream,
                              Handle end_event, Report report) {
  if (report != Report::kNone) ++count_arguments->sequence;
  own.sequence = count_arguments->sequence;
  own.result = report == Report::kByFetch ? count_arguments->result : 0;
  end = end_event;
  const std::lock_guard<std::mutex> lock(launching);
  launch_kernel(function, blocks, &own, stream);
  if (report == Report::kBehind) launch_kernel(count, 1, count_arguments, stream);
  check(driver().event_record(end, stream), "cuEventRecord");
}

std::uint32_t FetchLaunch::wait() const {
  const auto& result = *reinterpret_cast<const std::uint64_t*>(count_arguments->result);
  const auto ended = [&] {
    return static_cast<std::uint32_t>(load_acquire(result) >> 32) == count_arguments->sequence;
  };
  const auto begun = std::chrono::steady_clock::now();
  auto polled = begun;
  while (!ended()) {
    for (unsigned i = 0; i < kPollsAtATime && !ended(); ++i) cpu_relax();
    polled = std::chrono::steady_clock::now();
    if (ended() || polled - begun < kPolled) continue;
    check(driver().event_synchronize(end), "cuEventSynchronize");
    if (!ended()) throw std::runtime_error("a fetch ended without a report of its misses");
  }
  waited += polled - begun;
  return static_cast<std::uint32_t>(load_acquire(result));
}

void PlaceLaunch::launch(const std::uint32_t* positions, const std::uint8_t* rows,
                         const std::uint8_t* sources, std::size_t n,
                         CudaDriver::Handle stream) const {
  arguments->positions = reinterpret_cast<std::uint64_t>(positions);
  arguments->rows = reinterpret_cast<std::uint64_t>(rows);
  arguments->sources = reinterpret_cast<std::uint64_t>(sources);
  arguments->n = static_cast<std::uint32_t>(n);
  launch_kernel(function, (arguments->n + rows_a_block - 1) / rows_a_block, arguments, stream);
}

std::uint64_t waited_ns() { return static_cast<std::uint64_t>(waited.count()); }

void hold_back(CudaDriver::Handle stream, const std::vector<CudaDriver::Handle>& events) {
  const std::lock_guard<std::mutex> lock(launching);
  for (const CudaDriver::Handle event : events)
    check(driver().stream_wait(stream, event, 0), "cuStreamWaitEvent");
}

void order_after(CudaDriver::Handle stream, CudaDriver::Handle other, CudaDriver::Handle event) {
  check(driver().event_record(event, other), "cuEventRecord");
  check(driver().stream_wait(stream, event, 0), "cuStreamWaitEvent");
}

}  // namespace hps
