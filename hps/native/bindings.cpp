// Python bindings. Only this file and bindings_*.cpp depend on Python. Signatures state the arrays'
// contracts; the GIL is released around every loop over enough keys to pay for it.
#include "bindings.hpp"

#include <stdexcept>

#include "hps/buckets.hpp"
#include "hps/dedup.hpp"
#include "hps/partition_hash.hpp"
#include "hps/stack_distances.hpp"

namespace {

auto py_partition_hash(Keys keys) {
  const std::size_t n = keys.shape(0);
  std::unique_ptr<std::uint64_t[]> out(new std::uint64_t[n]);
  without_gil(n, [&] {
    for (std::size_t i = 0; i < n; ++i)
      out[i] = hps::partition_hash(static_cast<std::uint64_t>(keys.data()[i]));
  });
  return as_numpy(std::move(out), n);
}

auto py_dedup(Keys keys) {
  const std::size_t n = keys.shape(0);
  if (n >= UINT32_MAX) throw std::invalid_argument("dedup takes fewer than 2^32 - 1 keys per call");
  std::unique_ptr<std::int64_t[]> unique(new std::int64_t[n]);
  std::unique_ptr<std::int64_t[]> inverse(new std::int64_t[n]);
  std::size_t count = 0;
  without_gil(n, [&] { count = hps::dedup(keys.data(), n, unique.get(), inverse.get()); });
  return nb::make_tuple(as_numpy(std::move(unique), count), as_numpy(std::move(inverse), n));
}

auto py_stack_distances(Array<const std::int64_t> ids, std::size_t distinct) {
  const std::size_t n = ids.shape(0);
  if (n >= UINT32_MAX || distinct > n)
    throw std::invalid_argument("stack_distances takes fewer than 2^32 - 1 ids, distinct of them");
  std::unique_ptr<std::int64_t[]> distances(new std::int64_t[n]);
  without_gil(n, [&] { hps::stack_distances(ids.data(), n, distinct, distances.get()); });
  return as_numpy(std::move(distances), n);
}

// With the GIL, so that the counts change as a whole; callers pass parts of a large array.
template <typename T>
void py_count_in_buckets(Array<const T> values, Array<const double> bounds,
                         Array<std::int64_t> counts, Array<double> sums) {
  if (counts.shape(0) != bounds.shape(0) + 1 || sums.shape(0) != 2)
    throw std::invalid_argument("counts must be one more than bounds, sums two");
  hps::count_in_buckets(values.data(), values.shape(0), bounds.data(), bounds.shape(0),
                        counts.data(), sums.data());
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Compiled kernels of hps; hps.native chooses between them and their NumPy twins.";
  // A cache that a daemon thread still holds at the interpreter's end is not worth a warning.
  nb::set_leak_warnings(false);
  m.attr("SOURCES") = HPS_SOURCES;  // the digest of the sources, see source.py
  m.def("partition_hash", &py_partition_hash, nb::arg("keys").noconvert());
  m.def("dedup", &py_dedup, nb::arg("keys").noconvert());
  m.def("stack_distances", &py_stack_distances, nb::arg("ids").noconvert(), nb::arg("distinct"));
  m.def("count_in_buckets", &py_count_in_buckets<float>, nb::arg("values").noconvert(),
        nb::arg("bounds").noconvert(), nb::arg("counts").noconvert(), nb::arg("sums").noconvert());
  m.def("count_in_buckets", &py_count_in_buckets<double>, nb::arg("values").noconvert(),
        nb::arg("bounds").noconvert(), nb::arg("counts").noconvert(), nb::arg("sums").noconvert());
  bind_cache(m);
  bind_codec(m);
  bind_gather(m);
  bind_in_flight(m);
  bind_launch(m);
  bind_mapped(m);
  bind_misses(m);
  bind_onnx(m);
  bind_resp(m);
  bind_scheduler(m);
  bind_scored(m);
}
