// Shared memory between a client process and the batch scheduler: requests one way, answers back.
//
// The memory is an anonymous file (memfd_create), so the kernel frees it once both processes have
// ended, however they ended. It holds a header with two rings of slot offsets, and an arena of
// slots. The client allocates a slot, fills it, and pushes its offset; the scheduler writes the
// answer into the same slot and pushes the offset back; the client frees the slot. A side that
// sleeps says so in the header, and is woken by an eventfd.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace hps {

constexpr std::uint32_t kRing = 1024;  // the most requests in flight per channel; a power of two
constexpr std::size_t kSlotAlign = 64;

enum class RequestStatus : std::uint32_t {
  kPending = 0,
  kDone = 1,         // the outputs are complete
  kReplied = 2,      // the answer is `reply_bytes` of the outputs' space, encoded by Python
  kExpired = 3,      // the deadline passed before all of the request ran
  kFailed = 4,       // the device failed; the outputs' space has a message of `reply_bytes`
  kUnavailable = 5,  // the model was closed, or the scheduler stopped
};

// The head of a slot. `in_bytes` of inputs follow it, then `out_bytes` for the answer, each rounded
// up to kSlotAlign. Inputs are columns, one after the other, each (batch, width) bytes; so are the
// outputs.
struct RequestSlot {
  std::uint64_t ticket;      // the client's number of the request
  std::uint32_t model;       // the scheduler's number of the model
  std::uint32_t batch;       // samples; 0: the inputs are encoded by Python, for the slow path
  std::int64_t deadline_ns;  // CLOCK_MONOTONIC; 0: none
  std::uint64_t in_bytes, out_bytes;
  RequestStatus status;
  std::uint64_t reply_bytes;           // kDone: the samples whose rows all were on the device
  std::int64_t launched_ns, ended_ns;  // CLOCK_MONOTONIC, of the first batch that ran it
  std::uint64_t column_bytes;          // of the outputs; the client's
};

struct alignas(kSlotAlign) RingEnd {
  std::atomic<std::uint32_t> at;
};

struct ChannelHeader {
  std::uint64_t magic, bytes;
  RingEnd submitted, taken, completed, received;  // positions, mod 2^32
  alignas(kSlotAlign) std::atomic<std::uint32_t> scheduler_sleeps, client_sleeps;
  alignas(kSlotAlign) std::uint32_t submissions[kRing];
  alignas(kSlotAlign) std::uint32_t completions[kRing];
};

// The file of a channel, mapped.
class ChannelMemory {
 public:
  // Maps `file`; with `create`, its header is written. Throws std::system_error, and
  // std::invalid_argument for a file that is not a channel.
  ChannelMemory(int file, bool create);
  ~ChannelMemory();
  ChannelMemory(const ChannelMemory&) = delete;
  ChannelMemory& operator=(const ChannelMemory&) = delete;

  ChannelHeader& header() const { return *reinterpret_cast<ChannelHeader*>(base_); }
  RequestSlot& slot(std::uint32_t offset) const {
    return *reinterpret_cast<RequestSlot*>(base_ + offset * kSlotAlign);
  }
  std::size_t bytes() const { return bytes_; }
  std::uint8_t* base() const { return base_; }

 private:
  std::uint8_t* base_;
  std::size_t bytes_;
};

// The client's end. Thread-safe.
class ChannelClient {
 public:
  // `wake` is the scheduler's eventfd, `woken` the client's, both non-blocking. All three are
  // closed with the object.
  ChannelClient(int file, int wake, int woken);
  ~ChannelClient();

  // Returns a slot with space for the bytes; null if the channel is full for now.
  RequestSlot* allocate(std::uint64_t in_bytes, std::uint64_t out_bytes);
  void free(RequestSlot* slot);
  // Sends a filled slot.
  void submit(RequestSlot* slot);
  // Appends the slots that were answered since the last call; waits up to `timeout_ms` for one.
  // One thread at a time.
  void receive(std::vector<RequestSlot*>& answered, int timeout_ms);
  // Announces that this side sleeps until its eventfd is readable; false if an answer has arrived.
  bool sleep();
  // Ends a `receive` that waits.
  void interrupt();

  static std::uint8_t* inputs(RequestSlot* slot);
  static std::uint8_t* outputs(RequestSlot* slot);

  // The most bytes that one request may take.
  std::size_t capacity() const;

 private:
  std::uint32_t offset_of(const RequestSlot* slot) const;

  ChannelMemory memory_;
  const int file_, wake_, woken_;
  std::mutex lock_;
  std::map<std::uint32_t, std::uint32_t> free_;  // offset -> size, in units of kSlotAlign
  std::uint32_t in_flight_ = 0;
};

// The scheduler's end. One thread. It trusts nothing in the memory: a client that breaks the
// protocol harms its own requests only.
class ChannelServer {
 public:
  // `file` is empty but for its size. `wake_client` is closed with the object, or if this throws.
  ChannelServer(int file, int wake_client);
  ~ChannelServer();

  // Takes the next submitted slot whose head is valid; false if there is none. `head` is a copy:
  // the client cannot change it later. A slot with wrong sizes fails. Nothing more is taken from a
  // client with impossible positions, or more requests in flight than it has slots.
  bool take(std::uint32_t& offset, RequestSlot& head);
  // Sends a slot back; `finish` once after some of them.
  void complete(std::uint32_t offset);
  void finish();
  // Announces that the scheduler sleeps; false if a request has arrived.
  bool sleep();
  void awake();

  RequestSlot& slot(std::uint32_t offset) const { return memory_.slot(offset); }

 private:
  // An eventfd, which is closed with the object.
  struct Event {
    ~Event();
    const int file;
  };

  bool contains(std::uint32_t offset) const;
  bool valid(std::uint32_t offset, const RequestSlot& head) const;

  const Event wake_client_;
  ChannelMemory memory_;
  // Copies of the positions in the header, which the client could change.
  std::uint32_t taken_ = 0, completed_ = 0;
  std::uint32_t in_flight_ = 0;
  bool notifies_ = false;  // a slot was completed since `finish`
  bool broken_ = false;    // the client broke the protocol
};

inline std::uint64_t padded(std::uint64_t bytes) {
  return (bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
}

inline std::uint8_t* inputs_of(RequestSlot& slot) {
  return reinterpret_cast<std::uint8_t*>(&slot) + padded(sizeof(RequestSlot));
}

inline std::uint8_t* outputs_of(RequestSlot& slot, std::uint64_t in_bytes) {
  return inputs_of(slot) + padded(in_bytes);
}

}  // namespace hps
