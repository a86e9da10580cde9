// The only file that knows Python. Array contracts stand in the signatures; the GIL is released
// around every loop over keys that is long enough to be worth it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>

#include "bindings_resp.hpp"
#include "hps/bucket_table.hpp"
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

template <typename T>
using PerSlot = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using PerBucket = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

using Rows = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ReadOnlyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::object py_cache_buckets(Keys keys, std::size_t buckets) {
  if (buckets == 0 || buckets >= UINT32_MAX)
    throw std::invalid_argument("a cache has 1 to 2^32 - 2 buckets");
  const std::size_t n = keys.shape(0);
  std::unique_ptr<std::int64_t[]> both(new std::int64_t[2 * n]);
  without_gil(n, [&] {
    for (std::size_t i = 0; i < n; ++i) {
      const hps::TwoBuckets at = hps::buckets_of(keys.data()[i], buckets);
      both[2 * i] = static_cast<std::int64_t>(at.first);
      both[2 * i + 1] = static_cast<std::int64_t>(at.second);
    }
  });
  return nb::cast(own(std::move(both), 2 * n)).attr("reshape")(n, 2);
}

// The arrays of a cache, looked at once; a call then passes only the request's own arrays. Keeps
// references to the arrays, which must not be resized.
class CacheProbe {
 public:
  CacheProbe(PerBucket<std::int64_t> keys, PerBucket<std::uint8_t> states,
             PerSlot<std::uint32_t> stamps, PerSlot<std::uint64_t> versions, Rows rows,
             std::uint8_t code)
      : keys_(keys),
        states_(states),
        stamps_(stamps),
        versions_(versions),
        rows_(rows),
        code_(code) {
    const std::size_t slots = keys.shape(0) * keys.shape(1);
    if (slots == 0 || keys.shape(0) >= UINT32_MAX)
      throw std::invalid_argument("a cache has 1 to 2^32 - 2 buckets and at least one way");
    if (keys.shape(0) != states.shape(0) || keys.shape(1) != states.shape(1))
      throw std::invalid_argument("keys and states must have one shape (buckets, ways)");
    if (stamps.shape(0) != slots || versions.shape(0) != slots || rows.shape(0) != slots)
      throw std::invalid_argument("stamps, versions and rows must have one entry per slot");
    table_ = {keys.data(),
              states.data(),
              stamps.data(),
              versions.data(),
              static_cast<std::uint8_t*>(rows.data()),
              rows.shape(1) * rows.itemsize(),
              keys.shape(0),
              keys.shape(1)};
  }

  auto find(Keys keys) const {
    const std::size_t n = keys.shape(0);
    std::unique_ptr<std::int64_t[]> slots(new std::int64_t[n]);
    without_gil(n, [&] { hps::cache_find(table_, keys.data(), n, slots.get()); });
    return own(std::move(slots), n);
  }

  nb::object fetch(Keys keys, Keys missing, std::uint32_t clock, std::uint64_t oldest_tombstone,
                   Rows out, PerSlot<std::uint64_t> versions, PerSlot<std::uint8_t> source) const {
    const std::size_t n = keys.shape(0), m = missing.shape(0);
    check_rows(out, n);
    if (versions.shape(0) != n || source.shape(0) != n)
      throw std::invalid_argument("versions and source must have one entry per key");
    for (std::size_t i = 0; i < m; ++i)
      if (static_cast<std::uint64_t>(missing.data()[i]) >= n)
        throw std::invalid_argument("missing must hold positions of keys");

    const hps::CacheAnswer answer{static_cast<std::uint8_t*>(out.data()), versions.data(),
                                  source.data(), code_};
    std::unique_ptr<std::int64_t[]> left(new std::int64_t[m]);
    std::size_t unanswered = 0;
    without_gil(m, [&] {
      unanswered = hps::cache_fetch(table_, keys.data(), missing.data(), m, clock, oldest_tombstone,
                                    answer, left.get());
    });
    if (unanswered == 0) return nb::none();
    return nb::cast(own(std::move(left), unanswered));
  }

  bool gather(Keys keys, std::uint32_t clock, Rows out) const {
    const std::size_t n = keys.shape(0);
    check_rows(out, n);
    bool all = false;
    without_gil(n, [&] {
      all =
          hps::cache_gather(table_, keys.data(), n, clock, static_cast<std::uint8_t*>(out.data()));
    });
    return all;
  }

  auto admit(Keys keys, PerSlot<const std::uint64_t> versions, std::optional<ReadOnlyRows> rows,
             std::uint32_t stamp) const {
    const std::size_t n = keys.shape(0);
    if (versions.shape(0) != n) throw std::invalid_argument("versions must have one entry per key");
    if (rows) check_rows(*rows, n);
    const std::uint8_t* from = rows ? static_cast<const std::uint8_t*>(rows->data()) : nullptr;
    hps::Displaced displaced;
    without_gil(n, [&] {
      displaced = hps::cache_admit(table_, keys.data(), versions.data(), from, n, stamp);
    });
    return nb::make_tuple(displaced.rows, displaced.tombstones);
  }

 private:
  template <typename Array>
  void check_rows(const Array& rows, std::size_t n) const {
    if (rows.dtype() != rows_.dtype() || rows.shape(1) != rows_.shape(1))
      throw std::invalid_argument("rows must have the cache's dtype and dim");
    if (rows.shape(0) != n) throw std::invalid_argument("rows must have one entry per key");
  }

  PerBucket<std::int64_t> keys_;
  PerBucket<std::uint8_t> states_;
  PerSlot<std::uint32_t> stamps_;
  PerSlot<std::uint64_t> versions_;
  Rows rows_;
  std::uint8_t code_;
  hps::BucketTable table_;
};

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Compiled kernels of hps; hps.native chooses between them and their NumPy twins.";
  // A cache that a daemon thread still holds when the interpreter ends is no leak to shout about.
  nb::set_leak_warnings(false);
  bind_resp(m);
  m.def("partition_hash", &py_partition_hash, nb::arg("keys").noconvert());
  m.def("dedup", &py_dedup, nb::arg("keys").noconvert());
  m.def("cache_buckets", &py_cache_buckets, nb::arg("keys").noconvert(), nb::arg("buckets"));
  nb::class_<CacheProbe>(m, "CacheProbe")
      .def(nb::init<PerBucket<std::int64_t>, PerBucket<std::uint8_t>, PerSlot<std::uint32_t>,
                    PerSlot<std::uint64_t>, Rows, std::uint8_t>(),
           nb::arg("keys").noconvert(), nb::arg("states").noconvert(),
           nb::arg("stamps").noconvert(), nb::arg("versions").noconvert(),
           nb::arg("rows").noconvert(), nb::arg("code"))
      .def("find", &CacheProbe::find, nb::arg("keys").noconvert())
      .def("fetch", &CacheProbe::fetch, nb::arg("keys").noconvert(), nb::arg("missing").noconvert(),
           nb::arg("clock"), nb::arg("oldest_tombstone"), nb::arg("out").noconvert(),
           nb::arg("versions").noconvert(), nb::arg("source").noconvert())
      .def("gather", &CacheProbe::gather, nb::arg("keys").noconvert(), nb::arg("clock"),
           nb::arg("out").noconvert())
      .def("admit", &CacheProbe::admit, nb::arg("keys").noconvert(),
           nb::arg("versions").noconvert(), nb::arg("rows").noconvert().none(), nb::arg("stamp"));
}
