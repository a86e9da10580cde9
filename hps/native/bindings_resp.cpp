// Python binding of the decoder of Redis replies.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "hps/resp.hpp"

namespace {

// Of n rows: vectors (n, dim), versions (n,) and source codes (n,).
using RowArrays = std::tuple<Rows, Array<std::uint64_t>, Array<std::uint8_t>>;

hps::RowTarget row_target(const RowArrays& arrays, std::uint8_t code, bool versioned,
                          std::pair<std::uint64_t, std::uint64_t> oldest) {
  const auto& [out, versions, source] = arrays;
  return {static_cast<std::uint8_t*>(out.data()),
          out.shape(1) * out.itemsize(),
          versions.data(),
          source.data(),
          code,
          versioned,
          oldest.first,
          oldest.second};
}

// Keeps references to the arrays it writes to; they must not be resized.
class PyRowReplies {
 public:
  PyRowReplies(Keys counts, Keys positions, RowArrays arrays, std::uint8_t code, bool versioned,
               std::pair<std::uint64_t, std::uint64_t> oldest)
      : counts_(counts),
        positions_(positions),
        arrays_(arrays),
        replies_(row_target(arrays, code, versioned, oldest), counts.data(), counts.shape(0),
                 positions.data()) {
    const auto& [out, versions, source] = arrays;
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

  std::size_t feed(Bytes buffer, std::size_t begin, std::size_t end) {
    if (begin > end || end > buffer.shape(0))
      throw std::invalid_argument("begin and end must lie in the buffer");
    const char* data = reinterpret_cast<const char*>(buffer.data()) + begin;
    std::size_t used = 0;
    without_gil_for_bytes(end - begin, [&] { used = replies_.feed(data, end - begin); });
    return begin + used;
  }

  bool done() const { return replies_.done(); }
  auto left() const {
    const std::vector<std::int64_t>& left = replies_.left();
    std::unique_ptr<std::int64_t[]> copied(new std::int64_t[left.size()]);
    std::copy(left.begin(), left.end(), copied.get());
    return as_numpy(std::move(copied), left.size());
  }
  auto errors() const { return replies_.errors(); }
  std::size_t wrong_length() const { return replies_.wrong_length(); }

 private:
  Keys counts_, positions_;
  RowArrays arrays_;
  hps::RowReplies replies_;
};

}  // namespace

void bind_resp(nb::module_& m) {
  nb::exception<hps::ProtocolError>(m, "ProtocolError", PyExc_ValueError);
  nb::class_<PyRowReplies>(m, "RowReplies")
      .def(nb::init<Keys, Keys, RowArrays, std::uint8_t, bool,
                    std::pair<std::uint64_t, std::uint64_t>>(),
           nb::arg("counts").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("arrays").noconvert(), nb::arg("code"), nb::arg("versioned"), nb::arg("oldest"))
      .def("feed", &PyRowReplies::feed, nb::arg("buffer").noconvert(), nb::arg("begin"),
           nb::arg("end"))
      .def_prop_ro("done", &PyRowReplies::done)
      .def_prop_ro("left", &PyRowReplies::left, nb::rv_policy::move)
      .def_prop_ro("errors", &PyRowReplies::errors)
      .def_prop_ro("wrong_length", &PyRowReplies::wrong_length);
}
