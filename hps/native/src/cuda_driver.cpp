#include "hps/cuda_driver.hpp"

#include <dlfcn.h>

namespace hps {

namespace {

template <typename Function>
bool load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

const CudaDriver* open() {
  int (*init)(unsigned flags) = nullptr;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr || !load(library, "cuInit", init) || init(0) != kCudaSuccess)
    return nullptr;
  static CudaDriver driver;
  const bool whole = load(library, "cuCtxSetCurrent", driver.context_set) &&
                     load(library, "cuDevicePrimaryCtxRetain", driver.primary_retain) &&
                     load(library, "cuDevicePrimaryCtxRelease_v2", driver.primary_release) &&
                     load(library, "cuMemcpyHtoDAsync_v2", driver.copy_in) &&
                     load(library, "cuMemcpyDtoHAsync_v2", driver.copy_out) &&
                     load(library, "cuMemsetD8Async", driver.clear) &&
                     load(library, "cuLaunchKernel", driver.launch) &&
                     load(library, "cuGraphLaunch", driver.graph_launch) &&
                     load(library, "cuEventCreate", driver.event_create) &&
                     load(library, "cuEventDestroy_v2", driver.event_destroy) &&
                     load(library, "cuEventRecord", driver.event_record) &&
                     load(library, "cuEventQuery", driver.event_query) &&
                     load(library, "cuEventSynchronize", driver.event_synchronize) &&
                     load(library, "cuStreamWaitEvent", driver.stream_wait) &&
                     load(library, "cuGetErrorName", driver.error_name);
  return whole ? &driver : nullptr;
}

}  // namespace

const CudaDriver* CudaDriver::get() {
  static const CudaDriver* const driver = open();
  return driver;
}

std::string CudaDriver::name_of(int code) const {
  const char* name = nullptr;
  if (error_name(code, &name) != kCudaSuccess || name == nullptr)
    return "CUDA error " + std::to_string(code);
  return name;
}

}  // namespace hps
