// The functions of the CUDA driver that the batch scheduler calls, loaded at run time: the core is
// built, and runs, on machines without CUDA. Signatures: CUDA driver API, versions 12 and 13.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hps {

struct CudaDriver {
  using Handle = void*;  // CUcontext, CUstream, CUevent, CUfunction or CUgraphExec
  using Address = std::uint64_t;

  int (*context_set)(Handle context);
  int (*primary_retain)(Handle* context, int device);
  int (*primary_release)(int device);
  int (*copy_in)(Address to, const void* from, std::size_t bytes, Handle stream);
  int (*copy_out)(void* to, Address from, std::size_t bytes, Handle stream);
  int (*clear)(Address to, unsigned char value, std::size_t bytes, Handle stream);
  int (*launch)(Handle function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                unsigned threads_y, unsigned threads_z, unsigned shared, Handle stream,
                void** arguments, void** extra);
  int (*graph_launch)(Handle graph, Handle stream);
  int (*event_create)(Handle* event, unsigned flags);
  int (*event_destroy)(Handle event);
  int (*event_record)(Handle event, Handle stream);
  int (*event_query)(Handle event);
  int (*event_synchronize)(Handle event);
  int (*stream_wait)(Handle stream, Handle event, unsigned flags);
  int (*error_name)(int code, const char** name);

  // Returns the driver of this machine, loaded once; null if there is none.
  static const CudaDriver* get();

  // Returns the name of the error `code`, for example CUDA_ERROR_ILLEGAL_ADDRESS.
  std::string name_of(int code) const;
};

constexpr int kCudaSuccess = 0, kCudaNotReady = 600;
constexpr unsigned kEventDisableTiming = 2;

}  // namespace hps
