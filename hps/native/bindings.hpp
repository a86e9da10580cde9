// Declarations that the binding files share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>

#include "bindings_gil.hpp"

namespace nb = nanobind;

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = Array<const std::int64_t>;
using Bytes = Array<const std::uint8_t>;
using Rows = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Below this many keys releasing the GIL costs more than the work itself.
constexpr std::size_t kReleaseGilFrom = 4096;

template <typename Work>
void without_gil(std::size_t n, Work work) {
  if (n < kReleaseGilFrom) {
    work();
  } else {
    const WithoutGil released;
    work();
  }
}

// Counts eight bytes as the work of one key.
template <typename Work>
void without_gil_for_bytes(std::size_t bytes, Work work) {
  without_gil(bytes / 8, work);
}

// A NumPy array (size,) that owns `data`, which may be longer.
template <typename T>
inline nb::ndarray<nb::numpy, T, nb::ndim<1>> as_numpy(std::unique_ptr<T[]> data,
                                                       std::size_t size) {
  T* raw = data.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(raw, {size}, owner);
}

// Adds gather_all and pool_rows.
void bind_gather(nb::module_& m);
// Adds CacheTable and the functions that belong to it.
void bind_cache(nb::module_& m);
// Adds the decoders and encoders of update messages.
void bind_codec(nb::module_& m);
// Adds InFlight.
void bind_in_flight(nb::module_& m);
// Adds FetchLaunch and the functions of launches.
void bind_launch(nb::module_& m);
// Adds MappedTable and the functions that build its file.
void bind_mapped(nb::module_& m);
// Adds WorkerPool, gather_misses and copy_keys.
void bind_misses(nb::module_& m);
// Adds set_onnx_kernels.
void bind_onnx(nb::module_& m);
// Adds RowReplies and ProtocolError.
void bind_resp(nb::module_& m);
// Adds ScoredTable.
void bind_scored(nb::module_& m);
// Adds BatchScheduler and ChannelClient.
void bind_scheduler(nb::module_& m);
