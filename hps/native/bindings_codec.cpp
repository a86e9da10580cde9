// Python binding of the codec. Messages are bytes objects, which are immutable; references to them
// are held while the GIL is released.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "hps/codec.hpp"
#include "hps/crc32.hpp"

namespace {

// The payloads of a tuple of bytes objects and Nones; the tuple must outlive them.
struct Payloads {
  std::vector<hps::Payload> all;
  std::size_t bytes = 0;

  explicit Payloads(const nb::tuple& messages) {
    all.reserve(messages.size());
    for (const nb::handle each : messages) {
      if (each.is_none()) {
        all.push_back({nullptr, 0});
      } else if (nb::isinstance<nb::bytes>(each)) {
        const nb::bytes message = nb::borrow<nb::bytes>(each);
        all.push_back({static_cast<const std::uint8_t*>(message.data()), message.size()});
        bytes += message.size();
      } else {
        throw nb::type_error("messages must be bytes or None");
      }
    }
  }
};

hps::HpsFormat hps_format(std::size_t key_bytes, std::size_t row_bytes, std::size_t max_bytes) {
  if (key_bytes != 4 && key_bytes != 8) throw std::invalid_argument("key_bytes must be 4 or 8");
  if (row_bytes == 0 || row_bytes > UINT32_MAX)
    throw std::invalid_argument("row_bytes must be at least 1 and below 2^32");
  if (max_bytes > UINT32_MAX) throw std::invalid_argument("max_bytes must be below 2^32");
  return {key_bytes, row_bytes, max_bytes};
}

auto as_bytes(std::unique_ptr<hps::Message[]> messages, std::size_t n) {
  hps::Message* raw = messages.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<hps::Message*>(p); });
  return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(reinterpret_cast<std::uint8_t*>(raw),
                                                           {n * sizeof(hps::Message)}, owner);
}

auto py_decode_hps(nb::sequence sequence, Bytes keyed, Array<const std::uint64_t> stamps,
                   std::size_t key_bytes, std::size_t row_bytes, std::size_t max_bytes) {
  const hps::HpsFormat format = hps_format(key_bytes, row_bytes, max_bytes);
  const nb::tuple held(sequence);
  const Payloads payloads(held);
  const std::size_t m = payloads.all.size();
  if (keyed.shape(0) != m || stamps.shape(0) != m)
    throw std::invalid_argument("keyed and stamps must have one entry per message");
  std::unique_ptr<hps::Message[]> messages(new hps::Message[m]);
  std::unique_ptr<std::int64_t[]> keys;
  std::unique_ptr<std::uint64_t[]> versions;
  std::unique_ptr<std::uint8_t[]> vectors;
  std::size_t n = 0;
  without_gil_for_bytes(payloads.bytes, [&] {
    for (std::size_t i = 0; i < m; ++i) {
      std::size_t rows = 0;
      const hps::Verdict verdict = keyed.data()[i] != 0
                                       ? hps::Verdict{hps::Reason::kKeyed, 0}
                                       : hps::check_hps(payloads.all[i], format, &rows);
      messages[i].reason = verdict.reason;
      messages[i].at = static_cast<std::uint32_t>(verdict.at);
      messages[i].upserts = static_cast<std::uint32_t>(rows);
      if (verdict.reason == hps::Reason::kOk) messages[i].group = 0;
      n += rows;
    }
    keys.reset(new std::int64_t[n]);
    versions.reset(new std::uint64_t[n]);
    vectors.reset(new std::uint8_t[n * row_bytes]);
    std::size_t at = 0;
    for (std::size_t i = 0; i < m; ++i) {
      const std::size_t rows = messages[i].upserts;
      if (rows == 0) continue;
      hps::read_hps(payloads.all[i], format, rows, &keys[at], &vectors[at * row_bytes]);
      std::fill_n(&versions[at], rows, stamps.data()[i]);
      at += rows;
    }
  });
  return nb::make_tuple(as_bytes(std::move(messages), m), as_numpy(std::move(keys), n),
                        as_numpy(std::move(versions), n),
                        as_numpy(std::move(vectors), n * row_bytes));
}

auto py_decode_native(nb::sequence sequence, std::size_t max_bytes) {
  if (max_bytes > UINT32_MAX) throw std::invalid_argument("max_bytes must be below 2^32");
  const nb::tuple held(sequence);
  const Payloads payloads(held);
  const std::size_t m = payloads.all.size();
  std::unique_ptr<hps::Message[]> messages(new hps::Message[m]);
  std::vector<hps::Group> groups;
  without_gil_for_bytes(payloads.bytes, [&] {
    groups = hps::decode_native(payloads.all.data(), m, max_bytes, messages.get());
  });
  nb::list decoded;
  for (hps::Group& group : groups)
    decoded.append(nb::make_tuple(
        group.table, group.dtype, group.dim, as_numpy(std::move(group.keys), group.upserts),
        as_numpy(std::move(group.versions), group.upserts),
        as_numpy(std::move(group.vectors), group.upserts * group.row_bytes),
        as_numpy(std::move(group.deleted), group.deletes),
        as_numpy(std::move(group.deleted_versions), group.deletes)));
  return nb::make_tuple(as_bytes(std::move(messages), m), decoded);
}

nb::list py_encode_hps(Keys keys, Bytes vectors, std::size_t key_bytes, std::size_t row_bytes,
                       std::size_t rows_per_message) {
  const hps::HpsFormat format = hps_format(key_bytes, row_bytes, 0);
  const std::size_t n = keys.shape(0);
  if (vectors.shape(0) != n * row_bytes)
    throw std::invalid_argument("vectors must have row_bytes bytes per key");
  if (rows_per_message == 0) throw std::invalid_argument("rows_per_message must be at least 1");
  nb::list messages;
  std::vector<std::uint8_t*> outs;
  for (std::size_t at = 0; at < n; at += rows_per_message) {
    const std::size_t size = hps::hps_bytes(format, std::min(rows_per_message, n - at));
    PyObject* message = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (message == nullptr) throw nb::python_error();
    messages.append(nb::steal<nb::bytes>(message));
    outs.push_back(reinterpret_cast<std::uint8_t*>(PyBytes_AsString(message)));
  }
  without_gil_for_bytes(n * row_bytes, [&] {
    for (std::size_t i = 0, at = 0; i < outs.size(); ++i, at += rows_per_message)
      hps::write_hps(format, std::min(rows_per_message, n - at), keys.data() + at,
                     vectors.data() + at * row_bytes, outs[i]);
  });
  return messages;
}

std::uint32_t py_crc32(Bytes data, std::uint32_t crc) {
  std::uint32_t sum = 0;
  without_gil_for_bytes(data.shape(0), [&] { sum = hps::crc32(data.data(), data.shape(0), crc); });
  return sum;
}

}  // namespace

void bind_codec(nb::module_& m) {
  m.def("decode_hps", &py_decode_hps, nb::arg("messages"), nb::arg("keyed").noconvert(),
        nb::arg("stamps").noconvert(), nb::arg("key_bytes"), nb::arg("row_bytes"),
        nb::arg("max_bytes"));
  m.def("decode_native", &py_decode_native, nb::arg("messages"), nb::arg("max_bytes"));
  m.def("encode_hps", &py_encode_hps, nb::arg("keys").noconvert(), nb::arg("vectors").noconvert(),
        nb::arg("key_bytes"), nb::arg("row_bytes"), nb::arg("rows_per_message"));
  m.def("crc32", &py_crc32, nb::arg("data").noconvert(), nb::arg("crc") = 0);
}
