// Python binding of the table of single flight.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "hps/in_flight.hpp"

namespace {

auto as_array(std::vector<std::int64_t> values) {
  auto* held = new std::vector<std::int64_t>(std::move(values));
  nb::capsule owner(held,
                    [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
  return nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(held->data(), {held->size()}, owner);
}

nb::list as_arrays(std::vector<std::vector<std::int64_t>> all) {
  nb::list arrays;
  for (std::vector<std::int64_t>& each : all) arrays.append(as_array(std::move(each)));
  return arrays;
}

// Runs `work` under the table's lock. The lock's owner never waits for the GIL while it holds the
// lock, and no thread waits for the lock while it holds the GIL.
template <typename Work>
void locked(hps::InFlight& table, std::size_t n, Work work) {
  if (n < kReleaseGilFrom) {
    const std::unique_lock<std::mutex> held(table.lock, std::try_to_lock);
    if (held) return work();
  }
  const WithoutGil released;
  const std::lock_guard<std::mutex> held(table.lock);
  work();
}

std::pair<nb::list, nb::list> py_claim(hps::InFlight& table, std::uint64_t number,
                                       const std::vector<std::uint64_t>& tables,
                                       const std::vector<Keys>& keys,
                                       const std::vector<Keys>& missing, double now) {
  if (keys.size() != tables.size() || missing.size() != tables.size())
    throw std::invalid_argument("keys and missing must have one array per table");
  std::vector<hps::FlightRequest> requests;
  std::size_t size = 0;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const std::size_t n = missing[i].shape(0);
    const std::uint64_t end = std::min<std::uint64_t>(keys[i].shape(0), UINT32_MAX);
    bool fit = true;
    for (std::size_t k = 0; k < n; ++k)
      fit &= static_cast<std::uint64_t>(missing[i].data()[k]) < end;
    if (!fit) throw std::invalid_argument("missing must be positions of keys, below 2^32 - 1");
    requests.push_back({tables[i], keys[i].data(), missing[i].data(), n});
    size += n;
  }
  hps::FlightClaim claim;
  locked(table, size, [&] { claim = table.claim(number, requests, now); });
  nb::list shares;
  for (hps::FlightShare& each : claim.shares)
    shares.append(nb::make_tuple(each.flight, each.request, each.source_request,
                                 as_array(std::move(each.positions)),
                                 as_array(std::move(each.places))));
  return {as_arrays(std::move(claim.own)), shares};
}

nb::list py_land(hps::InFlight& table, std::uint64_t number, double until) {
  std::vector<std::vector<std::int64_t>> wanted;
  locked(table, 0, [&] { wanted = table.land(number, until); });
  return as_arrays(std::move(wanted));
}

bool py_leave(hps::InFlight& table, std::uint64_t number) {
  bool last = false;
  locked(table, 0, [&] { last = table.leave(number); });
  return last;
}

std::size_t py_size(hps::InFlight& table) {
  std::size_t size = 0;
  locked(table, 0, [&] { size = table.size(); });
  return size;
}

}  // namespace

void bind_in_flight(nb::module_& m) {
  nb::class_<hps::InFlight>(m, "InFlight")
      .def(nb::init<>())
      .def("claim", &py_claim, nb::arg("number"), nb::arg("tables"), nb::arg("keys").noconvert(),
           nb::arg("missing").noconvert(), nb::arg("now"))
      .def("land", &py_land, nb::arg("number"), nb::arg("until"))
      .def("leave", &py_leave, nb::arg("number"))
      .def("__len__", &py_size);
}
