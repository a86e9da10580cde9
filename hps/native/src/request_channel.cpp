#include "hps/request_channel.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace hps {

namespace {

constexpr std::uint64_t kMagic = 0x3130'4c45'5350'4848;  // "HHPSEL01": changes with the layout
constexpr std::size_t kArenaAt = (sizeof(ChannelHeader) + 4095) / 4096 * 4096;
// Pages of larger slots go back to the system when they are freed.
constexpr std::uint64_t kKeptBytes = 4 << 20;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::uint64_t slot_bytes(std::uint64_t in_bytes, std::uint64_t out_bytes) {
  return padded(sizeof(RequestSlot)) + padded(in_bytes) + padded(out_bytes);
}

void notify(int event) {
  const std::uint64_t one = 1;
  // Fails only if the count is full: then the other side is awake anyway.
  if (write(event, &one, sizeof one) < 0) return;
}

}  // namespace

ChannelMemory::ChannelMemory(int file, bool create) {
  struct stat status;
  if (fstat(file, &status) != 0) fail("fstat of a channel");
  bytes_ = static_cast<std::size_t>(status.st_size);
  if (bytes_ < 2 * kArenaAt || bytes_ / kSlotAlign > UINT32_MAX)
    throw std::invalid_argument("a channel must have more bytes than its header, below 256 GiB");
  void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) fail("mmap of a channel");
  base_ = static_cast<std::uint8_t*>(base);
  if (create) {
    header().magic = kMagic;
    header().bytes = bytes_;
  } else if (header().magic != kMagic || header().bytes != bytes_) {
    munmap(base_, bytes_);
    throw std::invalid_argument("the file is not a channel of this version");
  }
}

ChannelMemory::~ChannelMemory() { munmap(base_, bytes_); }

ChannelClient::ChannelClient(int file, int wake, int woken)
    : memory_(file, false), file_(file), wake_(wake), woken_(woken) {
  free_[kArenaAt / kSlotAlign] =
      static_cast<std::uint32_t>((memory_.bytes() - kArenaAt) / kSlotAlign);
}

ChannelClient::~ChannelClient() {
  for (const int each : {file_, wake_, woken_}) close(each);
}

std::size_t ChannelClient::capacity() const {
  return memory_.bytes() - kArenaAt - padded(sizeof(RequestSlot)) - 2 * kSlotAlign;
}

RequestSlot* ChannelClient::allocate(std::uint64_t in_bytes, std::uint64_t out_bytes) {
  if (in_bytes > memory_.bytes() || out_bytes > memory_.bytes()) return nullptr;
  const std::uint64_t units = slot_bytes(in_bytes, out_bytes) / kSlotAlign;
  std::uint32_t offset;
  {
    const std::lock_guard<std::mutex> held(lock_);
    if (in_flight_ == kRing) return nullptr;
    auto range = free_.begin();
    while (range != free_.end() && range->second < units) ++range;
    if (range == free_.end()) return nullptr;
    offset = range->first;
    const auto left = static_cast<std::uint32_t>(range->second - units);
    auto after = free_.erase(range);
    if (left != 0) free_.emplace_hint(after, static_cast<std::uint32_t>(offset + units), left);
    ++in_flight_;
  }
  RequestSlot& slot = memory_.slot(offset);
  slot.in_bytes = in_bytes;
  slot.out_bytes = out_bytes;
  slot.status = RequestStatus::kPending;
  slot.reply_bytes = 0;
  slot.launched_ns = slot.ended_ns = 0;
  return &slot;
}

void ChannelClient::free(RequestSlot* slot) {
  const std::uint64_t bytes = slot_bytes(slot->in_bytes, slot->out_bytes);
  std::uint32_t offset = offset_of(slot), units = static_cast<std::uint32_t>(bytes / kSlotAlign);
  if (bytes > kKeptBytes) {
    const std::size_t from = (offset * kSlotAlign + 4095) / 4096 * 4096;
    const std::size_t to = (offset * kSlotAlign + bytes) / 4096 * 4096;
    madvise(memory_.base() + from, to - from, MADV_REMOVE);
  }
  const std::lock_guard<std::mutex> held(lock_);
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + units) {
    units += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += units;
      units = 0;
    }
  }
  if (units != 0) free_.emplace_hint(after, offset, units);
  --in_flight_;
}

void ChannelClient::submit(RequestSlot* slot) {
  ChannelHeader& header = memory_.header();
  {
    // There is a place: at most kRing slots are allocated.
    const std::lock_guard<std::mutex> held(lock_);
    const std::uint32_t at = header.submitted.at.load(std::memory_order_relaxed);
    header.submissions[at % kRing] = offset_of(slot);
    header.submitted.at.store(at + 1, std::memory_order_seq_cst);
  }
  if (header.scheduler_sleeps.load(std::memory_order_seq_cst) != 0 &&
      header.scheduler_sleeps.exchange(0) != 0)
    notify(wake_);
}

void ChannelClient::receive(std::vector<RequestSlot*>& answered, int timeout_ms) {
  ChannelHeader& header = memory_.header();
  if (timeout_ms != 0 && sleep()) {
    pollfd waited{woken_, POLLIN, 0};
    poll(&waited, 1, timeout_ms);
  }
  header.client_sleeps.store(0, std::memory_order_seq_cst);
  std::uint64_t count;
  if (read(woken_, &count, sizeof count) < 0) count = 0;  // nothing to clear
  std::uint32_t at = header.received.at.load(std::memory_order_relaxed);
  const std::uint32_t end = header.completed.at.load(std::memory_order_acquire);
  for (; at != end; ++at) answered.push_back(&memory_.slot(header.completions[at % kRing]));
  header.received.at.store(at, std::memory_order_release);
}

bool ChannelClient::sleep() {
  ChannelHeader& header = memory_.header();
  header.client_sleeps.store(1, std::memory_order_seq_cst);
  return header.completed.at.load(std::memory_order_seq_cst) ==
         header.received.at.load(std::memory_order_relaxed);
}

void ChannelClient::interrupt() { notify(woken_); }

std::uint8_t* ChannelClient::inputs(RequestSlot* slot) { return inputs_of(*slot); }

std::uint8_t* ChannelClient::outputs(RequestSlot* slot) {
  return outputs_of(*slot, slot->in_bytes);
}

std::uint32_t ChannelClient::offset_of(const RequestSlot* slot) const {
  const auto* at = reinterpret_cast<const std::uint8_t*>(slot);
  return static_cast<std::uint32_t>((at - memory_.base()) / kSlotAlign);
}

ChannelServer::Event::~Event() { close(file); }

ChannelServer::ChannelServer(int file, int wake_client)
    : wake_client_{wake_client}, memory_(file, true) {}

ChannelServer::~ChannelServer() = default;

bool ChannelServer::contains(std::uint32_t offset) const {
  const std::size_t from = offset * kSlotAlign;
  return from >= kArenaAt && from + padded(sizeof(RequestSlot)) <= memory_.bytes();
}

bool ChannelServer::valid(std::uint32_t offset, const RequestSlot& head) const {
  const std::size_t at = offset * kSlotAlign, bytes = memory_.bytes();
  return head.in_bytes <= bytes && head.out_bytes <= bytes &&
         at + slot_bytes(head.in_bytes, head.out_bytes) <= bytes;
}

bool ChannelServer::take(std::uint32_t& offset, RequestSlot& head) {
  ChannelHeader& header = memory_.header();
  const std::uint32_t end = header.submitted.at.load(std::memory_order_acquire);
  broken_ |= end - taken_ > kRing;
  bool found = false;
  while (!broken_ && !found && taken_ != end) {
    offset = header.submissions[taken_ % kRing];
    if (!contains(offset) || in_flight_ == kRing) {
      broken_ = true;
      break;
    }
    ++taken_;
    ++in_flight_;
    RequestSlot& slot = memory_.slot(offset);
    head.ticket = slot.ticket;
    head.model = slot.model;
    head.batch = slot.batch;
    head.deadline_ns = slot.deadline_ns;
    head.in_bytes = slot.in_bytes;
    head.out_bytes = slot.out_bytes;
    found = valid(offset, head);
    if (!found) {
      slot.reply_bytes = 0;
      slot.status = RequestStatus::kFailed;
      complete(offset);
    }
  }
  header.taken.at.store(taken_, std::memory_order_release);
  return found;
}

void ChannelServer::complete(std::uint32_t offset) {
  ChannelHeader& header = memory_.header();
  header.completions[completed_ % kRing] = offset;
  header.completed.at.store(++completed_, std::memory_order_seq_cst);
  --in_flight_;
  notifies_ = true;
}

void ChannelServer::finish() {
  ChannelHeader& header = memory_.header();
  if (notifies_ && header.client_sleeps.load(std::memory_order_seq_cst) != 0 &&
      header.client_sleeps.exchange(0) != 0)
    notify(wake_client_.file);
  notifies_ = false;
}

bool ChannelServer::sleep() {
  ChannelHeader& header = memory_.header();
  header.scheduler_sleeps.store(1, std::memory_order_seq_cst);
  return broken_ || header.submitted.at.load(std::memory_order_seq_cst) == taken_;
}

void ChannelServer::awake() {
  memory_.header().scheduler_sleeps.store(0, std::memory_order_relaxed);
}

}  // namespace hps
