#include "hps/worker_pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include "hps/relaxed.hpp"

namespace hps {
namespace {

// Pauses, of some 20 to 40 ns, after which an idle worker sleeps. Waking one takes 30 to 50 us: so
// a few stay awake for a caller that comes back soon.
constexpr unsigned kSpins = 2000, kLongSpins = 8000;
constexpr std::size_t kPatient = 4;    // workers that spin long
constexpr std::size_t kWakesEach = 2;  // by the caller, and by each worker that woke up

}  // namespace

WorkerPool::WorkerPool(std::size_t threads) : threads_(threads), process_(getpid()) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1");
}

WorkerPool::~WorkerPool() {
  if (getpid() != process_) {  // the workers belong to the parent
    for (std::thread& worker : workers_) worker.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::run_pieces(Job& job) {
  for (std::size_t piece; (piece = job.next.fetch_add(1, std::memory_order_relaxed)) < job.pieces;)
    job.work(job.argument, piece);
}

void WorkerPool::run(Job& job) {
  if (threads_ == 1 || job.pieces < 2 || getpid() != process_) {
    run_pieces(job);
    return;
  }
  std::size_t wake;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (workers_.empty()) start_workers();
    Job** last = &jobs_;
    while (*last != nullptr) last = &(*last)->later;
    *last = &job;
    arrivals_.fetch_add(1, std::memory_order_relaxed);
    const std::size_t awake = std::min(spinning_, job.pieces - 1);
    job.wanted = std::min(sleeping_, job.pieces - 1 - awake);
    wake = take_wakes(job);
  }
  for (; wake != 0; --wake) wake_.notify_one();
  run_pieces(job);
  withdraw(job);
  // At most a piece is left to each helper.
  while (job.helpers.load(std::memory_order_acquire) != 0) cpu_relax();
}

// Returns how many workers this thread wakes for a job.
std::size_t WorkerPool::take_wakes(Job& job) {
  const std::size_t wakes = std::min(job.wanted, kWakesEach);
  job.wanted -= wakes;
  return wakes;
}

void WorkerPool::start_workers() {
  workers_.reserve(threads_ - 1);
  try {
    for (std::size_t i = 1; i < threads_; ++i)
      workers_.emplace_back([this, i] { work(i <= kPatient ? kLongSpins : kSpins); });
  } catch (const std::system_error&) {
    // The system gives no more threads: the ones started, and the caller, do the work.
  }
}

// Removes a job from the list, if it is still there.
void WorkerPool::withdraw(Job& job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Job** at = &jobs_; *at != nullptr; at = &(*at)->later) {
    if (*at != &job) continue;
    *at = job.later;
    return;
  }
}

// Returns a job with pieces to start, and counts as its helper; null if there is none.
WorkerPool::Job* WorkerPool::take() {
  for (Job* job = jobs_; job != nullptr; job = job->later) {
    if (job->next.load(std::memory_order_relaxed) >= job->pieces) continue;
    job->helpers.fetch_add(1, std::memory_order_relaxed);
    return job;
  }
  return nullptr;
}

void WorkerPool::work(unsigned spins) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    if (Job* job = take()) {
      std::size_t wake = take_wakes(*job);
      lock.unlock();
      for (; wake != 0; --wake) wake_.notify_one();
      run_pieces(*job);
      job->helpers.fetch_sub(1, std::memory_order_release);
      lock.lock();
      continue;
    }
    const std::size_t seen = arrivals_;
    ++spinning_;
    lock.unlock();
    for (unsigned i = 0; i < spins && arrivals_.load(std::memory_order_relaxed) == seen; ++i)
      cpu_relax();
    lock.lock();
    --spinning_;
    if (arrivals_ != seen || stop_) continue;
    ++sleeping_;
    wake_.wait(lock);
    --sleeping_;
  }
}

}  // namespace hps
