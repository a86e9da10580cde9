// Threads that stay for many short calls: `parallel_for` starts threads for each call, which costs
// some 20 us apiece.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace hps {

// Thread-safe: calls from several threads share the workers. Workers start with the first call that
// needs them, spin for some 50 us (four of them 200) after their work and then sleep; a call wakes
// two, who wake two each. After a fork the child's calls run on the calling thread alone.
class WorkerPool {
 public:
  // `threads`: the most threads of one call, the caller's included; at least 1.
  explicit WorkerPool(std::size_t threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  std::size_t threads() const { return threads_; }

  // Calls work(piece) for every piece in [0, pieces), on this thread and the workers, and returns
  // when all calls have ended. Pieces start in order; `work` must not throw.
  template <typename Work>
  void run(std::size_t pieces, const Work& work) {
    Job job;
    job.work = [](const void* of, std::size_t piece) { (*static_cast<const Work*>(of))(piece); };
    job.argument = &work;
    job.pieces = pieces;
    run(job);
  }

 private:
  struct Job {
    void (*work)(const void*, std::size_t);
    const void* argument;
    std::size_t pieces;
    std::atomic<std::size_t> next{0};
    std::atomic<std::size_t> helpers{0};  // workers that may still use the job
    std::size_t wanted = 0;               // workers to be woken for it
    Job* later = nullptr;
  };

  void run(Job& job);
  void work(unsigned spins);
  static std::size_t take_wakes(Job& job);
  Job* take();
  void start_workers();
  void withdraw(Job& job);
  static void run_pieces(Job& job);

  const std::size_t threads_;
  const int process_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Job* jobs_ = nullptr;  // in order of arrival; jobs leave when their pieces have been started
  std::atomic<std::size_t> arrivals_{0};  // jobs since the start
  std::size_t sleeping_ = 0, spinning_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace hps
