// The only file that knows Python. Array contracts stand in the signatures; the GIL is released
// around every loop over keys that is long enough to be worth it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <stdexcept>

#include "hps/dedup.hpp"
#include "hps/partition_hash.hpp"

namespace nb = nanobind;

using Keys = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

// Below this many keys handing the GIL over costs more than the work itself.
constexpr std::size_t kReleaseGilFrom = 4096;

template <typename Work>
void without_gil(std::size_t n, Work work) {
  if (n < kReleaseGilFrom) {
    work();
  } else {
    nb::gil_scoped_release release;
    work();
  }
}

// A NumPy array that owns `data`; `capacity` may exceed `size` (the tail is never shown).
template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> own(std::unique_ptr<T[]> data, std::size_t size) {
  T* raw = data.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(raw, {size}, owner);
}

auto py_partition_hash(Keys keys) {
  const std::size_t n = keys.shape(0);
  std::unique_ptr<std::uint64_t[]> out(new std::uint64_t[n]);
  without_gil(n, [&] {
    for (std::size_t i = 0; i < n; ++i)
      out[i] = hps::partition_hash(static_cast<std::uint64_t>(keys.data()[i]));
  });
  return own(std::move(out), n);
}

auto py_dedup(Keys keys) {
  const std::size_t n = keys.shape(0);
  if (n >= UINT32_MAX) throw std::invalid_argument("dedup takes fewer than 2^32 - 1 keys per call");
  std::unique_ptr<std::int64_t[]> unique(new std::int64_t[n]);
  std::unique_ptr<std::int64_t[]> inverse(new std::int64_t[n]);
  std::size_t count = 0;
  without_gil(n, [&] { count = hps::dedup(keys.data(), n, unique.get(), inverse.get()); });
  return nb::make_tuple(own(std::move(unique), count), own(std::move(inverse), n));
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Compiled kernels of hps; hps.native chooses between them and their NumPy twins.";
  m.def("partition_hash", &py_partition_hash, nb::arg("keys").noconvert());
  m.def("dedup", &py_dedup, nb::arg("keys").noconvert());
}
