// Python binding of the decoder of Redis replies.
#include "bindings_resp.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "bindings_gil.hpp"
#include "hps/resp.hpp"

namespace nb = nanobind;

namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Below this many bytes releasing the GIL costs more than the work itself.
constexpr std::size_t kReleaseGilFrom = 32768;

// Keeps references to the arrays it writes to; they must not be resized.
class PyRowReplies {
 public:
  PyRowReplies(Vector<const std::int64_t> counts, Vector<const std::int64_t> positions, Rows out,
               Vector<std::uint64_t> versions, Vector<std::uint8_t> source, std::uint8_t code,
               bool versioned, std::uint64_t oldest_row, std::uint64_t oldest_tombstone)
      : counts_(counts),
        positions_(positions),
        out_(out),
        versions_(versions),
        source_(source),
        replies_({static_cast<std::uint8_t*>(out.data()), out.shape(1) * out.itemsize(),
                  versions.data(), source.data(), code, versioned, oldest_row, oldest_tombstone},
                 counts.data(), counts.shape(0), positions.data()) {
    const std::size_t n = out.shape(0);
    if (versions.shape(0) != n || source.shape(0) != n)
      throw std::invalid_argument("versions and source must have one entry per row of out");
    std::size_t elements = 0;
    for (std::size_t i = 0; i < counts.shape(0); ++i)
      elements += static_cast<std::size_t>(std::max<std::int64_t>(counts.data()[i], 0));
    if (elements != positions.shape(0))
      throw std::invalid_argument("positions must have one entry per element of the replies");
    for (std::size_t i = 0; i < elements; ++i)
      if (static_cast<std::uint64_t>(positions.data()[i]) >= n)
        throw std::invalid_argument("positions must be rows of out");
  }

  std::size_t feed(Vector<const std::uint8_t> buffer, std::size_t begin, std::size_t end) {
    if (begin > end || end > buffer.shape(0))
      throw std::invalid_argument("begin and end must lie in the buffer");
    const char* data = reinterpret_cast<const char*>(buffer.data()) + begin;
    if (end - begin < kReleaseGilFrom) return begin + replies_.feed(data, end - begin);
    const WithoutGil released;
    return begin + replies_.feed(data, end - begin);
  }

  bool done() const { return replies_.done(); }
  auto left() const {
    const std::vector<std::int64_t>& left = replies_.left();
    auto* data = new std::int64_t[left.size()];
    std::copy(left.begin(), left.end(), data);
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::int64_t*>(p); });
    return nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(data, {left.size()}, owner);
  }
  auto errors() const { return replies_.errors(); }
  std::size_t wrong_length() const { return replies_.wrong_length(); }

 private:
  Vector<const std::int64_t> counts_, positions_;
  Rows out_;
  Vector<std::uint64_t> versions_;
  Vector<std::uint8_t> source_;
  hps::RowReplies replies_;
};

}  // namespace

void bind_resp(nb::module_& m) {
  nb::exception<hps::ProtocolError>(m, "ProtocolError", PyExc_ValueError);
  nb::class_<PyRowReplies>(m, "RowReplies")
      .def(nb::init<Vector<const std::int64_t>, Vector<const std::int64_t>, Rows,
                    Vector<std::uint64_t>, Vector<std::uint8_t>, std::uint8_t, bool, std::uint64_t,
                    std::uint64_t>(),
           nb::arg("counts").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("out").noconvert(), nb::arg("versions").noconvert(),
           nb::arg("source").noconvert(), nb::arg("code"), nb::arg("versioned"),
           nb::arg("oldest_row"), nb::arg("oldest_tombstone"))
      .def("feed", &PyRowReplies::feed, nb::arg("buffer").noconvert(), nb::arg("begin"),
           nb::arg("end"))
      .def_prop_ro("done", &PyRowReplies::done)
      .def_prop_ro("left", &PyRowReplies::left, nb::rv_policy::move)
      .def_prop_ro("errors", &PyRowReplies::errors)
      .def_prop_ro("wrong_length", &PyRowReplies::wrong_length);
}
