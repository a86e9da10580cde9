// Access to memory that one thread writes while others read it. The optimizer must neither tear nor
// repeat such accesses, and ThreadSanitizer must know that they are intended.
//
// Everything has internal linkage: cache_read.cpp is compiled once per instruction set, and the
// linker must not exchange one set's functions for another's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_THREAD__)
#define HPS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HPS_TSAN 1
#endif
#endif

namespace hps {

template <typename T>
static inline T load(const T& from) {
  return __atomic_load_n(&from, __ATOMIC_RELAXED);
}

template <typename T>
static inline T load_acquire(const T& from) {
  return __atomic_load_n(&from, __ATOMIC_ACQUIRE);
}

template <typename T>
static inline void store(T& to, T value) {
  __atomic_store_n(&to, value, __ATOMIC_RELAXED);
}

template <typename T>
static inline void store_release(T& to, T value) {
  __atomic_store_n(&to, value, __ATOMIC_RELEASE);
}

// ThreadSanitizer does not support fences. It reports nothing without them, because under it every
// access to shared memory is atomic.
static inline void acquire_fence() {
#ifndef HPS_TSAN
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

static inline void release_fence() {
#ifndef HPS_TSAN
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

// Keeps stores in program order, so that another process finds a consistent prefix of them after
// this one was killed: a processor never drops a store that precedes a completed one.
static inline void compiler_fence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Copies of rows that may be written at the same time. The reader detects that afterwards and
// discards the copy, so an ordinary memcpy will do.
#ifdef HPS_TSAN
static inline void copy_from_shared(std::uint8_t* to, const std::uint8_t* shared, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) to[i] = load(shared[i]);
}
static inline void copy_to_shared(std::uint8_t* shared, const std::uint8_t* from, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) store(shared[i], from[i]);
}
#else
static inline void copy_from_shared(std::uint8_t* to, const std::uint8_t* shared, std::size_t n) {
  std::memcpy(to, shared, n);
}
static inline void copy_to_shared(std::uint8_t* shared, const std::uint8_t* from, std::size_t n) {
  std::memcpy(shared, from, n);
}
#endif

static inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hps
