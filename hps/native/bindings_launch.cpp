// Repeated launches of fetches. Addresses and handles are numbers.
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "hps/fetch_launch.hpp"

namespace {

using Address = std::uint64_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Reads the number at `index` of a list or tuple that has it.
template <typename T>
T number(const nb::handle& sequence, std::size_t index) {
  const auto at = static_cast<Py_ssize_t>(index);
  return nb::cast<T>(nb::handle(PyTuple_Check(sequence.ptr())
                                    ? PyTuple_GetItem(sequence.ptr(), at)
                                    : PyList_GetItem(sequence.ptr(), at)));
}

// A launch of prepared parts, with the fields that change with each run.
struct PyLaunch {
  hps::FetchLaunch launch;
  // Of `run_block`:
  void* function = nullptr;
  std::uint32_t blocks = 0;
  bool behind = false;
  std::vector<Address> offsets;      // of each part's rows in the block
  std::vector<std::uint32_t> keyed;  // parts whose keys change
};

PyLaunch make_launch(Address arguments, Address count, Address count_arguments,
                     const std::vector<Address>& now) {
  if (now.size() > hps::FetchArgs::kParts) throw std::invalid_argument("too many parts");
  PyLaunch made{{pointer<hps::FetchArgs>(arguments),
                 {},
                 pointer<void>(count),
                 pointer<hps::CountArgs>(count_arguments)}};
  for (const Address cell : now) made.launch.now.push_back(pointer<const std::uint32_t>(cell));
  return made;
}

void py_prepare_block(PyLaunch& self, Address function, std::uint32_t blocks, bool behind,
                      const std::vector<Address>& offsets,
                      const std::vector<std::uint32_t>& keyed) {
  const std::size_t parts = self.launch.now.size();
  if (offsets.size() != parts) throw std::invalid_argument("offsets must have one per part");
  for (const std::uint32_t part : keyed)
    if (part >= parts) throw std::invalid_argument("keyed must have numbers of parts");
  self.function = pointer<void>(function), self.blocks = blocks, self.behind = behind;
  self.offsets = offsets, self.keyed = keyed;
}

// The GIL is held: so launch and record are one step for a writer that reads the readers' events.
void py_run_block(PyLaunch& self, Address block, const nb::list& keys, Address stream,
                  Address end) {
  if (nb::len(keys) != self.keyed.size())
    throw std::invalid_argument("keys must have an address per table");
  hps::FetchPart* parts = self.launch.arguments->part;
  for (std::size_t i = 0; i < self.offsets.size(); ++i) parts[i].out = block + self.offsets[i];
  for (std::size_t i = 0; i < self.keyed.size(); ++i)
    parts[self.keyed[i]].keys = number<Address>(keys, i);
  self.launch.launch(self.function, self.blocks, pointer<void>(stream), pointer<void>(end),
                     self.behind);
}

// The GIL is held, as by py_run_block.
void py_run_parts(PyLaunch& self, Address function, std::uint32_t keys_a_block,
                  const nb::list& parts, Address misses, Address stream, Address end, bool behind) {
  const std::size_t n = nb::len(parts);
  if (n != self.launch.now.size()) throw std::invalid_argument("parts must have one per table");
  std::array<hps::FetchLaunch::Part, hps::FetchArgs::kParts> values;
  for (std::size_t i = 0; i < n; ++i) {
    const nb::handle fields(PyList_GetItem(parts.ptr(), static_cast<Py_ssize_t>(i)));
    if (!PyTuple_Check(fields.ptr()) || PyTuple_Size(fields.ptr()) != 7)
      throw std::invalid_argument("each part must be a tuple of 7 numbers");
    values[i] = {number<Address>(fields, 0),      number<Address>(fields, 1),
                 number<Address>(fields, 2),      number<Address>(fields, 3),
                 number<Address>(fields, 4),      number<Address>(fields, 5),
                 number<std::uint32_t>(fields, 6)};
  }
  self.launch.arguments->misses = misses;
  const std::uint32_t blocks = self.launch.set(values.data(), n, keys_a_block);
  self.launch.launch(pointer<void>(function), blocks, pointer<void>(stream), pointer<void>(end),
                     behind);
}

std::uint32_t py_wait(const PyLaunch& self) {
  const WithoutGil released;
  return self.launch.wait();
}

}  // namespace

void bind_launch(nb::module_& m) {
  nb::class_<PyLaunch>(m, "FetchLaunch")
      .def_static("make", &make_launch, nb::arg("arguments"), nb::arg("count"),
                  nb::arg("count_arguments"), nb::arg("now"))
      .def("prepare_block", &py_prepare_block, nb::arg("function"), nb::arg("blocks"),
           nb::arg("behind"), nb::arg("offsets"), nb::arg("keyed"))
      .def("run_block", &py_run_block, nb::arg("block"), nb::arg("keys"), nb::arg("stream"),
           nb::arg("end"))
      .def("run_parts", &py_run_parts, nb::arg("function"), nb::arg("keys_a_block"),
           nb::arg("parts"), nb::arg("misses"), nb::arg("stream"), nb::arg("end"),
           nb::arg("behind"))
      .def("wait", &py_wait);
  m.def("waited_ns", &hps::waited_ns);
  m.def(
      "order_after",
      [](Address stream, Address other, Address event) {
        hps::order_after(pointer<void>(stream), pointer<void>(other), pointer<void>(event));
      },
      nb::arg("stream"), nb::arg("other"), nb::arg("event"));
}
