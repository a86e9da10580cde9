// Continuous batching on a device: requests that arrive while a batch runs form the next one.
//
// One thread takes requests from channels, copies their samples into the input memory of a free
// lane, starts the lane's steps, and copies the outputs back when they have ended. It never waits
// for a timer, and never holds Python's GIL except in a step or a callback that is Python's.
//
// A request is `batch` samples in columns of fixed widths, so any samples can run in one batch. A
// request larger than a batch runs in pieces, and goes to the end of its model's queue after each:
// a small request that arrives meanwhile is in the next batch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hps/cuda_driver.hpp"
#include "hps/lane_step.hpp"
#include "hps/miss_fill.hpp"
#include "hps/request_channel.hpp"

namespace hps {

// The steps of one lane for batches of up to `batch` samples.
struct SizeClass {
  std::uint32_t batch = 0;
  std::vector<std::uint8_t*> inputs, outputs;      // per column, host memory of the lane
  std::vector<Step> steps;                         // in order, on the lane's stream
  std::vector<const std::uint32_t*> missing_keys;  // counts that the steps leave; their sum
  std::shared_ptr<MissFill> fill;  // completes batches with missing rows; null: they are slow
};

struct ModelLayout {
  std::vector<std::uint32_t> input_widths, output_widths;  // bytes per sample and column
};

struct ModelCounts {
  std::uint64_t requests = 0, samples = 0, batches = 0, expired = 0, failed = 0;
  std::uint64_t incomplete = 0;  // batches that missed rows on the device
  std::uint64_t slow = 0;        // requests that went to `take_slow`
  std::uint64_t device_ns = 0;   // from launch to end, summed over batches
};

// Batches of one model that were completed by a MissFill, since the former report.
struct FillReport {
  std::uint32_t model = 0;
  std::uint64_t samples = 0;             // of these batches
  std::vector<std::uint64_t> missed;     // per feature: keys that the device missed
  std::vector<std::uint64_t> found;      // per feature: those of them with rows in host memory
  std::uint64_t answered = 0;            // samples of requests that ended, none of them slow
  std::vector<std::uint64_t> filled;     // per feature: their keys with rows from host memory
  std::vector<float> fetch_s, gather_s;  // per batch: seconds on the device, and of the gather
  std::vector<float> request_s;          // per request that ended: seconds from its launch
  std::vector<std::uint32_t> features;   // of the keys to be promoted
  std::vector<std::int64_t> keys;        // to be promoted: some of those found in host memory
};

// A count that one thread changes, and others may read.
class Count {
 public:
  void operator+=(std::uint64_t more) {
    value_.store(value_.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }
  void operator++() { *this += 1; }
  operator std::uint64_t() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

class BatchScheduler {
 public:
  // A request that the lanes cannot run, for the caller of `take_slow`. The pointers are valid
  // until it is answered.
  struct SlowRequest {
    std::uint64_t number;
    std::uint32_t model, batch;
    std::int64_t deadline_ns;
    std::uint8_t *inputs, *outputs;
    std::uint64_t in_bytes, out_bytes;
  };

  // `wake`: the scheduler's eventfd (non-blocking), which is closed with it. `spin_us`: time that
  // the thread looks for requests before it sleeps. `gathered_here`: up to so many misses of a
  // batch are gathered by the scheduler's thread: in some 10 us, as another thread would take to
  // wake. Of more it gathers a piece at a time, between its other work; if this is 0, only others
  // do.
  BatchScheduler(int wake, std::uint32_t spin_us, std::size_t gathered_here = 256);
  ~BatchScheduler();

  // Runs until `stop`; the thread of the scheduler.
  void run();
  // Ends `run` once the running batches have ended; waiting requests are unavailable. Thread-safe.
  void stop();

  // The following may be called from any thread, also before `run`.
  // Returns the model's number, which requests name.
  std::uint32_t add_model(ModelLayout layout);
  // Adds a lane of `model`: `stream` of the device with the context `context`, or null and null for
  // steps that are calls. Size classes by ascending batch. While batches of a size miss rows often,
  // their steps are skipped for those of the MissFill. Returns the lane's number.
  std::uint32_t add_lane(std::uint32_t model, std::vector<SizeClass> classes, void* context,
                         void* stream);
  // Removes a model and its lanes, after their batches have ended. Waiting requests are
  // unavailable; those that were given to the caller of `take_slow` are not waited for. Blocks.
  void remove_model(std::uint32_t model);
  // Adds a client's channel; returns its number. `wake_client` becomes the channel's. Throws as
  // ChannelMemory does.
  std::uint32_t add_channel(int file, int wake_client);
  // Removes a channel whose client has ended; its requests are dropped. Does not block.
  void remove_channel(std::uint32_t channel);
  // Does not disturb the scheduler's thread. Zeros for a model that was removed.
  ModelCounts counts(std::uint32_t model) const;

  // Helps to gather the rows of batches with many misses, in a thread of the caller, until `stop`.
  // Several threads may do so.
  void fill_batches();
  std::uint32_t filling_threads() const { return fill_threads_; }
  // Waits up to `timeout_ms` for a report of filled batches; false if none came, or after `stop`.
  bool take_report(FillReport& report, int timeout_ms);
  // Likewise for a request that needs the slow path: without columns, or with a key whose row is
  // neither on the device nor in host memory.
  bool take_slow(SlowRequest& request, int timeout_ms);
  // Ends it. `reply_bytes` are written in its outputs' space, if the status is kReplied or kFailed.
  void answer_slow(std::uint64_t number, RequestStatus status, std::uint64_t reply_bytes);

  // Makes later work on `stream` wait for all kernels launched before that read tables.
  // Thread-safe. Returns the driver's error code.
  int hold_back(void* stream);

 private:
  struct Channel;
  struct Request;
  struct Lane;
  class LaneStream;
  struct Model;
  struct Counters;
  template <typename T>
  class Handoff;

  void enqueue(std::function<void()> change);
  void apply_changes();
  bool take_requests();
  void accept(const std::shared_ptr<Channel>& channel, std::uint32_t offset,
              const RequestSlot& head);
  bool start_batches();
  bool close_model(Model& model);
  bool form_batch(Model& model, Lane& lane);
  bool abandon(Model& model, Request* request);
  void copy_in(const Lane& lane, const SizeClass& size, std::uint32_t samples);
  bool launch(Lane& lane, std::vector<Step>& steps);
  bool run_step(Lane& lane, Step& step);
  bool record_end(Lane& lane);
  bool enter_context(Lane& lane);
  void start_fill(Lane& lane);
  void end_fetch(Lane& lane);
  bool gather(MissFiller& filler, Lane* lane);
  void advance(Lane& lane);
  void end_fill(Lane& lane, bool launched);
  bool end_batches();
  void end_batch(Lane& lane);
  void deliver(Lane& lane);
  void copy_out(Lane& lane);
  void report_fill(Lane& lane);
  void report_end(const Request& request);
  FillReport& report_of(std::uint32_t model);
  void fail_batch(Lane& lane, const std::string& message);
  void end_request(Request* request, RequestStatus status, const std::string& message = {});
  void make_slow(Request* request);
  void sleep();
  void finish_channels();
  void close_handoffs();

  const int wake_;
  const std::uint32_t spin_us_;
  const std::size_t gathered_here_;
  std::atomic<bool> stopping_{false};

  std::mutex changes_lock_;
  std::vector<std::function<void()>> changes_;
  std::atomic<bool> changed_{false};
  std::atomic<bool> running_{false};

  mutable std::mutex counters_lock_;
  std::unordered_map<std::uint32_t, std::shared_ptr<Counters>> counters_;

  std::mutex readers_lock_;  // held while a kernel that reads tables starts, and in hold_back

  // The scheduler's thread alone uses what follows, once it runs.
  std::unordered_map<std::uint32_t, std::shared_ptr<Channel>> channels_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Model>> models_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::uint32_t> turn_;  // models in the order of their next batches
  std::unordered_map<std::uint64_t, std::unique_ptr<Request>> slow_;
  std::uint64_t next_slow_ = 1;
  std::atomic<std::uint32_t> next_model_{1}, next_channel_{1}, next_lane_{0};
  struct FillWork {
    std::shared_ptr<MissFiller> filler;
    Lane* lane;  // exists as long as the filler has work
  };
  std::unique_ptr<Handoff<FillWork>> fills_;
  std::atomic<std::uint32_t> fill_threads_{0};

  std::mutex reports_lock_;
  std::condition_variable reported_;
  std::unordered_map<std::uint32_t, FillReport> reports_;  // by model
  std::unique_ptr<Handoff<SlowRequest>> slow_requests_;
};

}  // namespace hps
