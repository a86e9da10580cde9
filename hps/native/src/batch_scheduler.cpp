#include "hps/batch_scheduler.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <stdexcept>

#include "hps/relaxed.hpp"

namespace hps {

namespace {

// Batches of a size are filled at once if more than this share of the recent ones missed rows. The
// steps that ask the device alone take some 10 us less, and are lost if rows are missing.
constexpr float kOftenMissing = 0.125F, kRecent = 1.0F / 16;
// Bounds of a report.
constexpr std::size_t kReportedTimes = 4096, kReportedKeys = 1 << 12;

std::int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void pause_briefly() {
  for (int i = 0; i < 16; ++i) cpu_relax();
}

std::uint64_t sum(const std::vector<std::uint32_t>& widths) {
  std::uint64_t total = 0;
  for (const std::uint32_t width : widths) total += width;
  return total;
}

enum class FillEnd { kNone, kLaunched, kFailed };

}  // namespace

// Passes work from the scheduler's thread to others.
template <typename T>
class BatchScheduler::Handoff {
 public:
  void put(T item) {
    {
      const std::lock_guard<std::mutex> held(lock_);
      items_.push_back(item);
      size_.store(items_.size(), std::memory_order_relaxed);
    }
    ready_.notify_one();
  }

  bool closed() {
    const std::lock_guard<std::mutex> held(lock_);
    return closed_;
  }

  // Looks for an item for some 50 us, so that the next one need not wake this thread.
  void look() const {
    for (unsigned i = 0; i < kSpins && size_.load(std::memory_order_relaxed) == 0; ++i) cpu_relax();
  }

  bool take(T& item, int timeout_ms) {
    std::unique_lock<std::mutex> held(lock_);
    ready_.wait_for(held, std::chrono::milliseconds(timeout_ms),
                    [&] { return closed_ || !items_.empty(); });
    if (items_.empty()) return false;
    item = items_.front();
    items_.pop_front();
    size_.store(items_.size(), std::memory_order_relaxed);
    return true;
  }

  void close() {
    {
      const std::lock_guard<std::mutex> held(lock_);
      closed_ = true;
    }
    ready_.notify_all();
  }

 private:
  static constexpr unsigned kSpins = 2000;  // pauses of some 20 to 40 ns

  std::mutex lock_;
  std::condition_variable ready_;
  std::deque<T> items_;
  std::atomic<std::size_t> size_{0};
  bool closed_ = false;
};

struct BatchScheduler::Counters {
  Count requests, samples, batches, expired, failed, incomplete, slow, device_ns;

  ModelCounts read() const {
    ModelCounts counts;
    counts.requests = requests;
    counts.samples = samples;
    counts.batches = batches;
    counts.expired = expired;
    counts.failed = failed;
    counts.incomplete = incomplete;
    counts.slow = slow;
    counts.device_ns = device_ns;
    return counts;
  }
};

struct BatchScheduler::Channel {
  Channel(int file, int wake_client) : server(file, wake_client) {}
  ChannelServer server;
  bool open = true;  // false: its client has ended
};

struct BatchScheduler::Request {
  std::shared_ptr<Channel> channel;
  std::uint32_t offset, model, batch;
  std::int64_t deadline_ns;
  std::uint64_t in_bytes, out_bytes;
  std::uint8_t *inputs, *outputs;
  std::uint32_t started = 0;          // samples that are in batches, or were
  std::uint32_t in_flight = 0;        // batches with samples of it
  std::uint32_t direct = 0;           // samples whose rows all were on the device
  bool slow = false;                  // a batch could not be completed
  std::uint32_t filled = 0;           // samples of batches that a MissFill completed
  std::vector<std::uint32_t> missed;  // per feature: keys of `filled` with rows from host memory
  RequestStatus failure = RequestStatus::kPending;
  std::string error;  // why it failed
  std::int64_t launched_ns = 0;

  bool all_started() const { return started == batch || slow || failed(); }
  bool failed() const { return failure != RequestStatus::kPending; }
};

struct BatchScheduler::Lane {
  struct Piece {
    Request* request;
    std::uint32_t start, count;
  };
  // Fetching, filling, finishing: the states of a MissFill.
  enum class State { kIdle, kRunning, kFetching, kFilling, kFinishing };

  Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane() {
    for (void* event : {reader, done, sent[0], sent[1]})
      if (event != nullptr) CudaDriver::get()->event_destroy(event);
  }

  std::uint32_t number, model;
  std::vector<SizeClass> classes;
  void *context, *stream, *reader = nullptr, *done = nullptr;
  void* sent[2] = {};  // of the halves of a MissFill's memory
  State state = State::kIdle;
  std::atomic<FillEnd> fill_end{FillEnd::kNone};  // set by the thread that ends the fill
  bool wakes_threads = false;                     // for the fill
  std::vector<Piece> pieces;
  std::uint32_t used = 0, samples = 0;           // the batch's size class, and its samples
  std::int64_t launched_ns = 0, counted_ns = 0;  // counted: until then, as time on the device
  std::int64_t fetched_ns = 0;                   // when the fetch began; then its duration
  std::vector<std::uint32_t> piece_of;           // per sample
  // Threads of `fill_batches` may still ask it for work when the lane is gone.
  const std::shared_ptr<MissFiller> filler = std::make_shared<MissFiller>();
  std::string error;

  SizeClass& size() { return classes[used]; }
};

// The stream of a lane, for a MissFill.
class BatchScheduler::LaneStream : public FillStream {
 public:
  LaneStream(BatchScheduler& scheduler, Lane& lane) : scheduler_(scheduler), lane_(lane) {}
  bool run(Step& step) override { return scheduler_.run_step(lane_, step); }
  bool mark(unsigned half) override {
    return lane_.done == nullptr ||
           check(CudaDriver::get()->event_record(lane_.sent[half], lane_.stream));
  }
  bool wait(unsigned half) override {
    return lane_.done == nullptr || check(CudaDriver::get()->event_synchronize(lane_.sent[half]));
  }
  bool end() override { return scheduler_.record_end(lane_); }

 private:
  bool check(int code) {
    if (code != kCudaSuccess) lane_.error = CudaDriver::get()->name_of(code);
    return code == kCudaSuccess;
  }

  BatchScheduler& scheduler_;
  Lane& lane_;
};

struct BatchScheduler::Model {
  std::uint32_t number;
  ModelLayout layout;
  std::uint64_t in_width, out_width;
  std::vector<Lane*> lanes;
  std::deque<Request*> queue;
  std::unordered_map<Request*, std::unique_ptr<Request>> requests;
  std::vector<float> missing;  // per size class: the share of recent batches that missed rows
  bool closing = false;
  std::vector<std::shared_ptr<std::promise<void>>> closed;  // of the callers of `remove_model`
  std::shared_ptr<Counters> counters;

  void note_missing(std::uint32_t size_class, bool some) {
    if (missing.size() <= size_class) missing.resize(size_class + 1);
    missing[size_class] += kRecent * ((some ? 1.0F : 0.0F) - missing[size_class]);
  }
  bool often_misses(std::uint32_t size_class) const {
    return size_class < missing.size() && missing[size_class] > kOftenMissing;
  }

  // Takes the request out of the queue, if pieces of it wait there, and gives it to the caller.
  std::unique_ptr<Request> release(Request* request) {
    if (request->started < request->batch)
      queue.erase(std::remove(queue.begin(), queue.end(), request), queue.end());
    const auto found = requests.find(request);
    std::unique_ptr<Request> owned = std::move(found->second);
    requests.erase(found);
    return owned;
  }
};

BatchScheduler::BatchScheduler(int wake, std::uint32_t spin_us, std::size_t gathered_here)
    : wake_(wake),
      spin_us_(spin_us),
      gathered_here_(gathered_here),
      fills_(std::make_unique<Handoff<FillWork>>()),
      slow_requests_(std::make_unique<Handoff<SlowRequest>>()) {}

BatchScheduler::~BatchScheduler() { close(wake_); }

// -- changes from other threads ------------------------------------------------------------------

void BatchScheduler::enqueue(std::function<void()> change) {
  {
    const std::lock_guard<std::mutex> held(changes_lock_);
    changes_.push_back(std::move(change));
    changed_.store(true, std::memory_order_seq_cst);
  }
  const std::uint64_t one = 1;
  if (write(wake_, &one, sizeof one) < 0) return;  // full: the thread is awake
}

void BatchScheduler::apply_changes() {
  std::vector<std::function<void()>> changes;
  {
    const std::lock_guard<std::mutex> held(changes_lock_);
    changes.swap(changes_);
    changed_.store(false, std::memory_order_seq_cst);
  }
  for (const auto& change : changes) change();
}

std::uint32_t BatchScheduler::add_model(ModelLayout layout) {
  const std::uint32_t number = next_model_++;
  auto model = std::make_shared<std::unique_ptr<Model>>(std::make_unique<Model>());
  (*model)->number = number;
  (*model)->in_width = sum(layout.input_widths);
  (*model)->out_width = sum(layout.output_widths);
  (*model)->layout = std::move(layout);
  (*model)->counters = std::make_shared<Counters>();
  {
    const std::lock_guard<std::mutex> held(counters_lock_);
    counters_[number] = (*model)->counters;
  }
  enqueue([this, model, number] {
    models_[number] = std::move(*model);
    turn_.push_back(number);
  });
  return number;
}

std::uint32_t BatchScheduler::add_lane(std::uint32_t model, std::vector<SizeClass> classes,
                                       void* context, void* stream) {
  auto lane = std::make_shared<std::unique_ptr<Lane>>(std::make_unique<Lane>());
  Lane& made = **lane;
  const std::uint32_t number = next_lane_++;
  made.number = number;
  made.model = model;
  made.classes = std::move(classes);
  made.context = context;
  made.stream = stream;
  if (context != nullptr) {
    const CudaDriver* driver = CudaDriver::get();
    if (driver == nullptr) throw std::runtime_error("libcuda.so.1 cannot be loaded");
    // The caller's thread has a current context, which stays as it is: events are created by it.
    if (driver->event_create(&made.done, kEventDisableTiming) != kCudaSuccess ||
        driver->event_create(&made.reader, kEventDisableTiming) != kCudaSuccess ||
        driver->event_create(&made.sent[0], kEventDisableTiming) != kCudaSuccess ||
        driver->event_create(&made.sent[1], kEventDisableTiming) != kCudaSuccess)
      throw std::runtime_error("a lane's CUDA events cannot be created");
  }
  enqueue([this, lane, number] {
    const auto found = models_.find((*lane)->model);
    if (found == models_.end() || found->second->closing) return;
    const std::lock_guard<std::mutex> held(readers_lock_);
    if (lanes_.size() <= number) lanes_.resize(number + 1);
    lanes_[number] = std::move(*lane);
    found->second->lanes.push_back(lanes_[number].get());
  });
  return number;
}

void BatchScheduler::remove_model(std::uint32_t model) {
  auto closed = std::make_shared<std::promise<void>>();
  std::future<void> end = closed->get_future();
  enqueue([this, model, closed] {
    const auto found = models_.find(model);
    if (found == models_.end()) return closed->set_value();
    found->second->closing = true;
    found->second->closed.push_back(closed);
  });
  while (end.wait_for(std::chrono::milliseconds(10)) != std::future_status::ready) {
    // Without a running thread nothing uses the model: it goes with the scheduler.
    if (!running_.load()) return;
  }
}

std::uint32_t BatchScheduler::add_channel(int file, int wake_client) {
  auto channel = std::make_shared<Channel>(file, wake_client);
  const std::uint32_t number = next_channel_++;
  enqueue([this, channel, number] { channels_[number] = channel; });
  return number;
}

void BatchScheduler::remove_channel(std::uint32_t channel) {
  enqueue([this, channel] {
    const auto found = channels_.find(channel);
    if (found == channels_.end()) return;
    found->second->open = false;  // its requests still refer to it
    channels_.erase(found);
  });
}

ModelCounts BatchScheduler::counts(std::uint32_t model) const {
  const std::lock_guard<std::mutex> held(counters_lock_);
  const auto found = counters_.find(model);
  return found == counters_.end() ? ModelCounts() : found->second->read();
}

void BatchScheduler::fill_batches() {
  ++fill_threads_;
  while (!fills_->closed()) {
    FillWork work;
    if (!fills_->take(work, 1000)) continue;
    while (gather(*work.filler, work.lane)) continue;
    fills_->look();
  }
  --fill_threads_;
}

bool BatchScheduler::take_report(FillReport& report, int timeout_ms) {
  std::unique_lock<std::mutex> held(reports_lock_);
  reported_.wait_for(held, std::chrono::milliseconds(timeout_ms),
                     [&] { return stopping_ || !reports_.empty(); });
  if (reports_.empty()) return false;
  report = std::move(reports_.begin()->second);
  reports_.erase(reports_.begin());
  return true;
}

bool BatchScheduler::take_slow(SlowRequest& request, int timeout_ms) {
  return slow_requests_->take(request, timeout_ms);
}

void BatchScheduler::answer_slow(std::uint64_t number, RequestStatus status,
                                 std::uint64_t reply_bytes) {
  enqueue([this, number, status, reply_bytes] {
    const auto found = slow_.find(number);
    if (found == slow_.end()) return;
    Request* request = found->second.get();
    request->channel->server.slot(request->offset).reply_bytes =
        std::min(reply_bytes, request->out_bytes);
    end_request(request, status);
    slow_.erase(found);
  });
}

int BatchScheduler::hold_back(void* stream) {
  const CudaDriver* driver = CudaDriver::get();
  const std::lock_guard<std::mutex> held(readers_lock_);
  for (const auto& lane : lanes_) {
    if (lane == nullptr || lane->reader == nullptr) continue;
    if (const int code = driver->stream_wait(stream, lane->reader, 0); code != kCudaSuccess)
      return code;
  }
  return kCudaSuccess;
}

// -- the thread ----------------------------------------------------------------------------------

void BatchScheduler::run() {
  running_.store(true);
  std::int64_t idle_from = 0;
  while (!stopping_.load(std::memory_order_relaxed)) {
    bool progress = changed_.load(std::memory_order_relaxed);
    if (progress) apply_changes();
    progress |= take_requests();
    progress |= end_batches();
    finish_channels();
    progress |= start_batches();
    finish_channels();
    if (progress) {
      idle_from = 0;
      continue;
    }
    const bool busy = std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
      return lane != nullptr && lane->state != Lane::State::kIdle;
    });
    if (!busy) {
      if (idle_from == 0) idle_from = now_ns();
      if (now_ns() - idle_from >= spin_us_ * std::int64_t{1000}) sleep();
    }
    pause_briefly();
  }
  for (const auto& lane : lanes_)
    while (lane != nullptr && lane->state != Lane::State::kIdle) {
      if (changed_.load(std::memory_order_relaxed)) apply_changes();
      end_batches();
      pause_briefly();
    }
  for (auto& [number, model] : models_) {
    for (auto& [pointer, request] : model->requests)
      end_request(pointer, RequestStatus::kUnavailable);
  }
  for (auto& [number, request] : slow_) end_request(request.get(), RequestStatus::kUnavailable);
  finish_channels();
  running_.store(false);
  close_handoffs();
}

void BatchScheduler::close_handoffs() {
  fills_->close();
  slow_requests_->close();
}

void BatchScheduler::stop() {
  {
    const std::lock_guard<std::mutex> held(reports_lock_);
    stopping_.store(true);
  }
  reported_.notify_all();
  enqueue([] {});
  if (!running_.load()) close_handoffs();
}

void BatchScheduler::sleep() {
  bool quiet = true;
  for (auto& [number, channel] : channels_) quiet &= channel->server.sleep();
  if (quiet && !changed_.load(std::memory_order_seq_cst)) {
    pollfd waited{wake_, POLLIN, 0};
    poll(&waited, 1, 1000);
  }
  for (auto& [number, channel] : channels_) channel->server.awake();
  std::uint64_t count;
  if (read(wake_, &count, sizeof count) < 0) count = 0;  // nothing to clear
}

void BatchScheduler::finish_channels() {
  for (auto& [number, channel] : channels_) channel->server.finish();
}

bool BatchScheduler::take_requests() {
  bool any = false;
  RequestSlot head;
  std::uint32_t offset;
  for (auto& [number, channel] : channels_)
    // No more at a time, so that a client that sends without end delays the others little.
    for (std::uint32_t i = 0; i < kRing && channel->server.take(offset, head); ++i) {
      any = true;
      accept(channel, offset, head);
    }
  return any;
}

void BatchScheduler::accept(const std::shared_ptr<Channel>& channel, std::uint32_t offset,
                            const RequestSlot& head) {
  auto request = std::make_unique<Request>();
  request->channel = channel;
  request->offset = offset;
  request->model = head.model;
  request->batch = head.batch;
  request->deadline_ns = head.deadline_ns;
  request->in_bytes = head.in_bytes;
  request->out_bytes = head.out_bytes;
  request->inputs = inputs_of(channel->server.slot(offset));
  request->outputs = outputs_of(channel->server.slot(offset), head.in_bytes);
  const auto found = models_.find(head.model);
  if (found == models_.end() || found->second->closing)
    return end_request(request.get(), RequestStatus::kUnavailable);
  Model& model = *found->second;
  ++model.counters->requests;
  Request* const pointer = request.get();
  model.requests.emplace(pointer, std::move(request));
  if (head.batch == 0 || model.lanes.empty()) return make_slow(pointer);
  if (head.in_bytes != head.batch * model.in_width ||
      head.out_bytes < head.batch * model.out_width) {
    return end_request(model.release(pointer).get(), RequestStatus::kFailed,
                       "the request does not have the model's layout");
  }
  model.counters->samples += head.batch;
  model.queue.push_back(pointer);
}

bool BatchScheduler::start_batches() {
  bool any = false;
  // Another model is the first in each pass.
  if (turn_.size() > 1) std::rotate(turn_.begin(), turn_.begin() + 1, turn_.end());
  for (std::size_t i = 0; i < turn_.size();) {
    Model& model = *models_[turn_[i]];
    if (model.closing && close_model(model)) {
      turn_.erase(turn_.begin() + static_cast<std::ptrdiff_t>(i));
      any = true;
      continue;
    }
    ++i;
    for (Lane* lane : model.lanes) {
      if (model.queue.empty()) break;
      if (lane->state == Lane::State::kIdle) any |= form_batch(model, *lane);
    }
  }
  return any;
}

// Ends the waiting requests of a model that is being removed; true if it was removed, since none of
// its batches is running.
bool BatchScheduler::close_model(Model& model) {
  while (!model.queue.empty()) {
    Request* const request = model.queue.front();
    model.queue.pop_front();
    request->failure = RequestStatus::kUnavailable;
    // Otherwise its last batch ends it.
    if (request->in_flight == 0)
      end_request(model.release(request).get(), RequestStatus::kUnavailable);
  }
  const bool idle = std::all_of(model.lanes.begin(), model.lanes.end(),
                                [](const Lane* lane) { return lane->state == Lane::State::kIdle; });
  if (!idle) return false;
  std::vector<std::unique_ptr<Lane>> removed;  // destroyed without the lock
  {
    const std::lock_guard<std::mutex> held(readers_lock_);
    for (const Lane* lane : model.lanes) removed.push_back(std::move(lanes_[lane->number]));
  }
  removed.clear();
  {
    const std::lock_guard<std::mutex> held(counters_lock_);
    counters_.erase(model.number);
  }
  const auto closed = std::move(model.closed);
  models_.erase(model.number);
  for (const auto& each : closed) each->set_value();
  return true;
}

// Drops a request that waits, if its client has ended or its deadline has passed.
bool BatchScheduler::abandon(Model& model, Request* request) {
  const bool open = request->channel->open;
  if (open && (request->deadline_ns == 0 || now_ns() <= request->deadline_ns)) return false;
  if (open) ++model.counters->expired;
  request->failure = RequestStatus::kExpired;
  // Otherwise its last batch ends it.
  if (request->in_flight == 0) end_request(model.release(request).get(), RequestStatus::kExpired);
  return true;
}

// Takes samples from the model's queue for one batch and starts it; false if none was waiting.
bool BatchScheduler::form_batch(Model& model, Lane& lane) {
  const std::uint32_t most = lane.classes.back().batch;
  lane.pieces.clear();
  lane.samples = 0;
  while (!model.queue.empty() && lane.samples < most) {
    Request* const request = model.queue.front();
    model.queue.pop_front();
    if (request->all_started()) continue;  // a batch of it failed, or was not complete
    if (abandon(model, request)) continue;
    const std::uint32_t count = std::min(most - lane.samples, request->batch - request->started);
    lane.pieces.push_back({request, request->started, count});
    lane.samples += count;
    request->started += count;
    ++request->in_flight;
    if (request->started < request->batch) model.queue.push_back(request);
  }
  if (lane.pieces.empty()) return false;
  lane.used = 0;
  while (lane.classes[lane.used].batch < lane.samples) ++lane.used;
  ++model.counters->batches;
  copy_in(lane, lane.size(), lane.samples);
  lane.launched_ns = lane.counted_ns = now_ns();
  for (const Lane::Piece& piece : lane.pieces)
    if (piece.request->launched_ns == 0) piece.request->launched_ns = lane.launched_ns;
  if (lane.size().fill != nullptr && model.often_misses(lane.used)) {
    start_fill(lane);
  } else if (launch(lane, lane.size().steps)) {
    lane.state = Lane::State::kRunning;
  } else {
    fail_batch(lane, lane.error);
  }
  return true;
}

void BatchScheduler::copy_in(const Lane& lane, const SizeClass& size, std::uint32_t samples) {
  const std::vector<std::uint32_t>& widths = models_[lane.model]->layout.input_widths;
  std::uint64_t before = 0;  // bytes of the columns before this one, per sample
  for (std::size_t c = 0; c < widths.size(); ++c) {
    const std::uint64_t width = widths[c];
    std::uint8_t* to = size.inputs[c];
    for (const Lane::Piece& piece : lane.pieces) {
      const std::uint8_t* column = piece.request->inputs + before * piece.request->batch;
      std::memcpy(to, column + piece.start * width, piece.count * width);
      to += piece.count * width;
    }
    // The rest of the size class repeats the first sample, whose keys the device has.
    for (std::uint32_t i = samples; i < size.batch; ++i, to += width)
      std::memcpy(to, size.inputs[c], width);
    before += width;
  }
}

bool BatchScheduler::enter_context(Lane& lane) {
  static thread_local void* current = nullptr;
  if (lane.context == nullptr || current == lane.context) return true;
  const CudaDriver* driver = CudaDriver::get();
  const int code = driver->context_set(lane.context);
  if (code == kCudaSuccess)
    current = lane.context;
  else
    lane.error = driver->name_of(code);
  return code == kCudaSuccess;
}

bool BatchScheduler::launch(Lane& lane, std::vector<Step>& steps) {
  if (!enter_context(lane)) return false;
  for (Step& step : steps)
    if (!run_step(lane, step)) return false;
  return record_end(lane);
}

bool BatchScheduler::record_end(Lane& lane) {
  if (lane.done == nullptr) return true;
  const CudaDriver* driver = CudaDriver::get();
  const int code = driver->event_record(lane.done, lane.stream);
  if (code != kCudaSuccess) lane.error = driver->name_of(code);
  return code == kCudaSuccess;
}

// Starts the fetch of the rows that the device has.
void BatchScheduler::start_fill(Lane& lane) {
  lane.size().fill->use(lane.samples);
  lane.fetched_ns = now_ns();
  if (!launch(lane, lane.size().fill->fetch)) return fail_batch(lane, lane.error);
  lane.state = Lane::State::kFetching;
}

// Fills the misses of a fetch that has ended: here, or with the threads of `fill_batches`.
void BatchScheduler::end_fetch(Lane& lane) {
  MissFill& fill = *lane.size().fill;
  Model& model = *models_[lane.model];
  const std::size_t missing = fill.missing();
  model.note_missing(lane.used, missing != 0);
  if (missing != 0) ++model.counters->incomplete;
  lane.fetched_ns = now_ns() - lane.fetched_ns;
  lane.piece_of.clear();
  for (std::uint32_t piece = 0; piece < lane.pieces.size(); ++piece)
    lane.piece_of.insert(lane.piece_of.end(), lane.pieces[piece].count, piece);
  lane.filler->begin(fill, lane.piece_of, lane.pieces.size());
  lane.state = Lane::State::kFilling;
  lane.fill_end.store(FillEnd::kNone, std::memory_order_relaxed);
  const bool here = missing <= gathered_here_ || fill_threads_ == 0;
  lane.wakes_threads = !here;
  advance(lane);
  while (here && lane.fill_end.load(std::memory_order_acquire) == FillEnd::kNone)
    gather(*lane.filler, &lane);
}

// Gathers a piece for the fill of `lane`, and continues after the last one; false if none is left
// to take. The lane exists only as long as one is.
bool BatchScheduler::gather(MissFiller& filler, Lane* lane) {
  const MissFiller::Piece piece = filler.gather();
  if (piece == MissFiller::Piece::kLast) advance(*lane);
  return piece != MissFiller::Piece::kNone;
}

void BatchScheduler::advance(Lane& lane) {
  LaneStream stream(*this, lane);
  const FillWork work{lane.filler, &lane};
  const bool wakes = lane.wakes_threads, entered = enter_context(lane);
  std::size_t pieces = 0;
  const auto progress =
      entered ? lane.filler->advance(stream, pieces) : MissFiller::Progress::kFailed;
  if (progress == MissFiller::Progress::kGathering) {
    // From here on, another thread may end the fill. Waking one costs this thread up to 5 us.
    const std::size_t helpers = std::min<std::size_t>(fill_threads_, (pieces + 3) / 4);
    for (std::size_t i = 0; wakes && i < helpers; ++i) fills_->put(work);
    return;
  }
  const bool launched = progress == MissFiller::Progress::kLaunched;
  lane.fill_end.store(launched ? FillEnd::kLaunched : FillEnd::kFailed, std::memory_order_release);
}

void BatchScheduler::end_fill(Lane& lane, bool launched) {
  if (!launched) return fail_batch(lane, lane.error);
  lane.state = Lane::State::kFinishing;
}

bool BatchScheduler::run_step(Lane& lane, Step& step) {
  const CudaDriver* driver = CudaDriver::get();
  int code = kCudaSuccess;
  switch (step.kind) {
    case Step::Kind::kCopyIn:
      code = driver->copy_in(step.device, step.host, step.bytes, lane.stream);
      break;
    case Step::Kind::kCopyOut:
      code = driver->copy_out(step.host, step.device, step.bytes, lane.stream);
      break;
    case Step::Kind::kClear:
      code = driver->clear(step.device, 0, step.bytes, lane.stream);
      break;
    case Step::Kind::kGraph:
      code = driver->graph_launch(step.function, lane.stream);
      break;
    case Step::Kind::kKernel: {
      for (const auto& [field, value] : step.fresh) *field = *value;
      void* arguments[] = {step.host};
      std::unique_lock<std::mutex> held(readers_lock_, std::defer_lock);
      if (step.reads_tables) held.lock();
      code = driver->launch(step.function, step.blocks, 1, 1, step.threads, 1, 1, 0, lane.stream,
                            arguments, nullptr);
      if (code == kCudaSuccess && step.reads_tables)
        code = driver->event_record(lane.reader, lane.stream);
      break;
    }
    case Step::Kind::kCall:
      if (step.call()) return true;
      lane.error = "a step of the batch failed; the log has the reason";
      return false;
  }
  if (code != kCudaSuccess) lane.error = driver->name_of(code);
  return code == kCudaSuccess;
}

bool BatchScheduler::end_batches() {
  bool any = false;
  for (const auto& lane : lanes_) {
    if (lane == nullptr || lane->state == Lane::State::kIdle) continue;
    if (lane->state == Lane::State::kFilling) {
      any |= gathered_here_ != 0 && gather(*lane->filler, lane.get());
      const FillEnd end = lane->fill_end.load(std::memory_order_acquire);
      if (end == FillEnd::kNone) continue;
      any = true;
      end_fill(*lane, end == FillEnd::kLaunched);
      continue;
    }
    if (lane->done != nullptr) {
      const CudaDriver* driver = CudaDriver::get();
      const int code = driver->event_query(lane->done);
      if (code == kCudaNotReady) continue;
      if (code != kCudaSuccess) {
        fail_batch(*lane, driver->name_of(code));
        any = true;
        continue;
      }
    }
    any = true;
    end_batch(*lane);
  }
  return any;
}

void BatchScheduler::end_batch(Lane& lane) {
  if (lane.state == Lane::State::kFetching) return end_fetch(lane);
  Model& model = *models_[lane.model];
  const std::int64_t ended_ns = now_ns();
  model.counters->device_ns += static_cast<std::uint64_t>(ended_ns - lane.counted_ns);
  lane.counted_ns = ended_ns;
  if (lane.state == Lane::State::kFinishing) {
    report_fill(lane);
    return deliver(lane);
  }
  std::uint64_t missing = 0;
  for (const std::uint32_t* count : lane.size().missing_keys) missing += *count;
  if (missing == 0) {
    model.note_missing(lane.used, false);
    for (const Lane::Piece& piece : lane.pieces) piece.request->direct += piece.count;
  } else if (lane.size().fill != nullptr) {
    return start_fill(lane);
  } else {
    ++model.counters->incomplete;
    for (const Lane::Piece& piece : lane.pieces) piece.request->slow = true;
  }
  deliver(lane);
}

// Copies the outputs of a batch to its requests; ends those of which it was the last batch.
void BatchScheduler::deliver(Lane& lane) {
  Model& model = *models_[lane.model];
  copy_out(lane);
  lane.state = Lane::State::kIdle;
  for (const Lane::Piece& piece : lane.pieces) {
    Request* const request = piece.request;
    if (--request->in_flight != 0 || !request->all_started()) continue;
    if (request->slow && !request->failed()) {
      make_slow(request);
    } else {
      const std::unique_ptr<Request> ended = model.release(request);
      end_request(request, request->failed() ? request->failure : RequestStatus::kDone,
                  request->error);
      if (!request->failed() && request->filled != 0) report_end(*request);
    }
  }
  lane.pieces.clear();
}

void BatchScheduler::copy_out(Lane& lane) {
  const std::vector<std::uint32_t>& widths = models_[lane.model]->layout.output_widths;
  std::uint64_t before = 0;
  for (std::size_t c = 0; c < widths.size(); ++c) {
    const std::uint64_t width = widths[c];
    const std::uint8_t* from = lane.size().outputs[c];
    for (const Lane::Piece& piece : lane.pieces) {
      std::uint8_t* column = piece.request->outputs + before * piece.request->batch;
      if (piece.request->channel->open)
        std::memcpy(column + piece.start * width, from, piece.count * width);
      from += piece.count * width;
    }
    before += width;
  }
}

// Adds a filled batch to its model's report, and its misses to their requests.
void BatchScheduler::report_fill(Lane& lane) {
  const FillOutcome& filled = lane.filler->outcome();
  const std::size_t features = filled.left.size();
  const std::lock_guard<std::mutex> held(reports_lock_);
  FillReport& report = report_of(lane.model);
  report.samples += lane.samples;
  report.missed.resize(std::max(report.missed.size(), features));
  report.found.resize(report.missed.size());
  std::size_t sample = 0;
  for (std::size_t piece = 0; piece < lane.pieces.size(); ++piece) {
    Request& request = *lane.pieces[piece].request;
    request.filled += lane.pieces[piece].count;
    for (std::uint32_t i = 0; i < lane.pieces[piece].count; ++i)
      request.slow |= filled.unresolved[sample++] != 0;
    request.missed.resize(features);
    for (std::size_t f = 0; f < features; ++f) {
      const std::uint32_t missed = filled.missed[piece * features + f];
      request.missed[f] += missed;
      report.missed[f] += missed;
      report.found[f] += missed;
    }
  }
  for (std::size_t f = 0; f < features; ++f) report.found[f] -= filled.left[f];
  if (report.fetch_s.size() < kReportedTimes) {
    report.fetch_s.push_back(static_cast<float>(lane.fetched_ns) * 1e-9F);
    report.gather_s.push_back(static_cast<float>(filled.gather_ns) * 1e-9F);
  }
  const std::size_t taken =
      std::min(filled.keys.size(), kReportedKeys - std::min(kReportedKeys, report.keys.size()));
  const auto end = static_cast<std::ptrdiff_t>(taken);
  report.keys.insert(report.keys.end(), filled.keys.begin(), filled.keys.begin() + end);
  report.features.insert(report.features.end(), filled.features.begin(),
                         filled.features.begin() + end);
}

// Adds a request, which is answered with rows from host memory, to its model's report.
void BatchScheduler::report_end(const Request& request) {
  const std::lock_guard<std::mutex> held(reports_lock_);
  FillReport& report = report_of(request.model);
  report.answered += request.filled;
  report.filled.resize(std::max(report.filled.size(), request.missed.size()));
  for (std::size_t f = 0; f < request.missed.size(); ++f) report.filled[f] += request.missed[f];
  if (report.request_s.size() < kReportedTimes)
    report.request_s.push_back(static_cast<float>(now_ns() - request.launched_ns) * 1e-9F);
}

// The report to add to; the lock of reports is held.
FillReport& BatchScheduler::report_of(std::uint32_t model) {
  if (reports_.empty()) reported_.notify_one();
  FillReport& report = reports_[model];
  report.model = model;
  return report;
}

void BatchScheduler::fail_batch(Lane& lane, const std::string& message) {
  Model& model = *models_[lane.model];
  ++model.counters->failed;
  lane.state = Lane::State::kIdle;
  for (const Lane::Piece& piece : lane.pieces) {
    Request* const request = piece.request;
    request->failure = RequestStatus::kFailed;
    request->error = message;
    if (--request->in_flight == 0)
      end_request(model.release(request).get(), RequestStatus::kFailed, message);
  }
  lane.pieces.clear();
}

void BatchScheduler::make_slow(Request* request) {
  Model& model = *models_[request->model];
  ++model.counters->slow;
  const std::uint64_t number = next_slow_++;
  slow_[number] = model.release(request);
  slow_requests_->put({number, request->model, request->batch, request->deadline_ns,
                       request->inputs, request->outputs, request->in_bytes, request->out_bytes});
}

// Sends the answer; the caller then drops the request.
void BatchScheduler::end_request(Request* request, RequestStatus status,
                                 const std::string& message) {
  if (!request->channel->open) return;
  RequestSlot& slot = request->channel->server.slot(request->offset);
  if (!message.empty()) {
    slot.reply_bytes = std::min<std::uint64_t>(message.size(), request->out_bytes);
    std::memcpy(request->outputs, message.data(), slot.reply_bytes);
  }
  if (status == RequestStatus::kDone) slot.reply_bytes = request->direct;
  slot.status = status;
  slot.launched_ns = request->launched_ns;
  slot.ended_ns = now_ns();
  request->channel->server.complete(request->offset);
}

}  // namespace hps
