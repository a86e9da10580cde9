#include "hps/bus_errors.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <stdexcept>

namespace hps {
namespace {

// The handler reads the entries without a lock, which a signal handler must not take. An entry is
// valid while `damaged` is set.
struct Guarded {
  std::atomic<std::uintptr_t> begin{0}, end{0};
  std::atomic<std::atomic<bool>*> damaged{nullptr};
};

constexpr std::size_t kEntries = 1 << 16;
Guarded guarded[kEntries];
std::atomic<std::size_t> used{0};  // entries from here on were never valid
std::mutex changes;
struct sigaction previous;
std::uintptr_t page_bytes = 4096;
thread_local int chained = 0;

bool replace_page(std::uintptr_t at) {
  for (std::size_t i = 0; i < used.load(std::memory_order_acquire); ++i) {
    std::atomic<bool>* damaged = guarded[i].damaged.load(std::memory_order_acquire);
    if (damaged == nullptr || at < guarded[i].begin || at >= guarded[i].end) continue;
    damaged->store(true, std::memory_order_seq_cst);
    void* page = reinterpret_cast<void*>(at & ~(page_bytes - 1));
    return mmap(page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
           MAP_FAILED;
  }
  return false;
}

// Calls the handler that was installed before; without one, the signal takes its default effect
// when the faulting instruction runs again.
void pass_on(int signal, siginfo_t* info, void* context) {
  const bool is_default = (previous.sa_flags & SA_SIGINFO) == 0 &&
                          (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN);
  if (is_default || chained != 0) {
    struct sigaction fallback{};
    fallback.sa_handler = SIG_DFL;
    sigaction(signal, &fallback, nullptr);
    if (info->si_code <= 0) raise(signal);  // it was sent, and no instruction will fault again
    return;
  }
  ++chained;
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal, info, context);
  } else {
    previous.sa_handler(signal);
  }
  --chained;
}

void handle(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const bool replaced =
      info->si_code > 0 && replace_page(reinterpret_cast<std::uintptr_t>(info->si_addr));
  if (!replaced) pass_on(signal, info, context);
  errno = error;
}

// Another library may have replaced the handler since.
void install() {
  struct sigaction current{};
  if (sigaction(SIGBUS, nullptr, &current) != 0) return;
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == handle) return;
  page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  previous = current;
  struct sigaction own{};
  own.sa_sigaction = handle;
  own.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&own.sa_mask);
  sigaction(SIGBUS, &own, nullptr);
}

}  // namespace

BusErrorGuard::BusErrorGuard(const std::uint8_t* begin, std::size_t bytes,
                             std::atomic<bool>& damaged)
    : entry_(0) {
  const std::lock_guard<std::mutex> lock(changes);
  const std::size_t entries = used.load(std::memory_order_relaxed);
  while (entry_ < entries && guarded[entry_].damaged.load(std::memory_order_relaxed) != nullptr)
    ++entry_;
  if (entry_ == kEntries) throw std::runtime_error("too many tables are mapped at a time");
  install();
  guarded[entry_].begin = reinterpret_cast<std::uintptr_t>(begin);
  guarded[entry_].end = reinterpret_cast<std::uintptr_t>(begin) + bytes;
  guarded[entry_].damaged.store(&damaged, std::memory_order_release);
  if (entry_ == entries) used.store(entries + 1, std::memory_order_release);
}

BusErrorGuard::~BusErrorGuard() {
  const std::lock_guard<std::mutex> lock(changes);
  guarded[entry_].damaged.store(nullptr, std::memory_order_release);
}

}  // namespace hps
