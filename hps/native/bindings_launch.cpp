// Repeated kernel launches. Addresses and handles are numbers.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "hps/kernel_launch.hpp"

namespace {

using Address = std::uint64_t;
using Pairs = std::vector<std::pair<Address, Address>>;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

hps::KernelLaunch make_launch(Address function, std::uint32_t blocks, std::uint32_t threads,
                              Address arguments, const Pairs& outs,
                              const std::vector<Address>& keys, const Pairs& fresh) {
  hps::KernelLaunch made{
      pointer<void>(function), blocks, threads, pointer<void>(arguments), {}, {}, {}};
  for (const auto& [field, offset] : outs) made.outs.emplace_back(pointer<Address>(field), offset);
  for (const Address field : keys) made.keys.push_back(pointer<Address>(field));
  for (const auto& [field, cell] : fresh)
    made.fresh.emplace_back(pointer<std::uint32_t>(field), pointer<const std::uint32_t>(cell));
  return made;
}

// The GIL is held: so launch and record are one step for a writer that reads the readers' events.
void py_run(const hps::KernelLaunch& launch, Address stream, Address end, Address block,
            const nb::list& keys) {
  Address few[64];
  std::vector<Address> many;
  const std::size_t n = launch.keys.size();
  if (nb::len(keys) != n) throw std::invalid_argument("keys must have an address per table");
  Address* addresses = few;
  if (n > 64) {
    many.resize(n);
    addresses = many.data();
  }
  for (std::size_t i = 0; i < n; ++i)
    addresses[i] =
        nb::cast<Address>(nb::handle(PyList_GetItem(keys.ptr(), static_cast<Py_ssize_t>(i))));
  launch.run(pointer<void>(stream), pointer<void>(end), block, addresses);
}

// The GIL is held, as by py_run.
void py_launch(Address function, std::uint32_t blocks, std::uint32_t threads, Address arguments,
               Address stream, Address end) {
  hps::KernelLaunch{pointer<void>(function), blocks, threads, pointer<void>(arguments), {}, {}, {}}
      .run(pointer<void>(stream), pointer<void>(end), 0, nullptr);
}

void py_wait(Address event) {
  const WithoutGil released;
  hps::wait_for_event(pointer<void>(event));
}

}  // namespace

void bind_launch(nb::module_& m) {
  nb::class_<hps::KernelLaunch>(m, "KernelLaunch")
      .def_static("make", &make_launch, nb::arg("function"), nb::arg("blocks"), nb::arg("threads"),
                  nb::arg("arguments"), nb::arg("outs"), nb::arg("keys"), nb::arg("fresh"))
      .def("run", &py_run, nb::arg("stream"), nb::arg("end"), nb::arg("block"), nb::arg("keys"));
  m.def(
      "order_after",
      [](Address stream, Address other, Address event) {
        hps::order_after(pointer<void>(stream), pointer<void>(other), pointer<void>(event));
      },
      nb::arg("stream"), nb::arg("other"), nb::arg("event"));
  m.def("launch", &py_launch, nb::arg("function"), nb::arg("blocks"), nb::arg("threads"),
        nb::arg("arguments"), nb::arg("stream"), nb::arg("end"));
  m.def("wait_for_event", &py_wait, nb::arg("event"));
}
