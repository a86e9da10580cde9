// A kernel launch that repeats with few changes of its arguments, without the host work of a
// library.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "hps/cuda_driver.hpp"

namespace hps {

// One thread at a time; the context of the kernel must be current. Methods throw std::runtime_error
// if the driver reports an error. `Launch` does not own what it points to.
struct KernelLaunch {
  using Address = CudaDriver::Address;

  CudaDriver::Handle function;
  std::uint32_t blocks, threads;
  void* arguments;  // the kernel's only argument, by value
  // Fields that receive the address of a block of device memory plus an offset.
  std::vector<std::pair<Address*, Address>> outs;
  std::vector<Address*> keys;  // fields that receive the addresses of keys
  // Fields of 32 bits and the cells that they are copied from before each launch.
  std::vector<std::pair<std::uint32_t*, const std::uint32_t*>> fresh;

  // Launches on `stream` with `addresses`, one for each of `keys`, and records `end` behind it.
  void run(CudaDriver::Handle stream, CudaDriver::Handle end, Address block,
           const Address* addresses) const;
};

// Makes later work on `stream` wait for the work on `other` so far, by `event`.
void order_after(CudaDriver::Handle stream, CudaDriver::Handle other, CudaDriver::Handle event);

// Waits for an event.
void wait_for_event(CudaDriver::Handle event);

}  // namespace hps
