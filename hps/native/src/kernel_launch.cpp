#include "hps/kernel_launch.hpp"

#include <stdexcept>
#include <string>

namespace hps {
namespace {

const CudaDriver& driver() {
  const CudaDriver* found = CudaDriver::get();
  if (found == nullptr) throw std::runtime_error("this machine has no CUDA driver");
  return *found;
}

void check(int code, const char* call) {
  if (code != kCudaSuccess)
    throw std::runtime_error(std::string(call) + " failed: " + driver().name_of(code));
}

}  // namespace

void KernelLaunch::run(CudaDriver::Handle stream, CudaDriver::Handle end, Address block,
                       const Address* addresses) const {
  for (const auto& [field, offset] : outs) *field = block + offset;
  for (std::size_t i = 0; i < keys.size(); ++i) *keys[i] = addresses[i];
  for (const auto& [field, cell] : fresh) *field = *cell;
  void* pointers[] = {arguments};
  check(driver().launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, nullptr),
        "cuLaunchKernel");
  check(driver().event_record(end, stream), "cuEventRecord");
}

void order_after(CudaDriver::Handle stream, CudaDriver::Handle other, CudaDriver::Handle event) {
  check(driver().event_record(event, other), "cuEventRecord");
  check(driver().stream_wait(stream, event, 0), "cuStreamWaitEvent");
}

void wait_for_event(CudaDriver::Handle event) {
  check(driver().event_synchronize(event), "cuEventSynchronize");
}

}  // namespace hps
