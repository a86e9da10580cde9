// Repeated launches of fetches. Addresses and handles are numbers.
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <vector>

#include "bindings_table.hpp"
#include "hps/fetch_launch.hpp"
#include "hps/key_copy.hpp"

namespace {

using Address = std::uint64_t;
using Report = hps::FetchLaunch::Report;

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
  std::uint32_t blocks = 0, keys_a_block = 1;
  Report report = Report::kByFetch;
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

void py_prepare_block(PyLaunch& self, Address function, std::uint32_t blocks,
                      std::uint32_t keys_a_block, bool behind, const std::vector<Address>& offsets,
                      const std::vector<std::uint32_t>& keyed) {
  const std::size_t parts = self.launch.now.size();
  if (offsets.size() != parts) throw std::invalid_argument("offsets must have one per part");
  for (const std::uint32_t part : keyed)
    if (part >= parts) throw std::invalid_argument("keyed must have numbers of parts");
  self.function = pointer<void>(function), self.blocks = blocks;
  self.keys_a_block = keys_a_block;
  self.report = behind ? Report::kBehind : Report::kByFetch;
  self.offsets = offsets, self.keyed = keyed;
}

void set_block(PyLaunch& self, Address block) {
  hps::FetchPart* parts = self.launch.arguments->part;
  for (std::size_t i = 0; i < self.offsets.size(); ++i) parts[i].out = block + self.offsets[i];
}

void py_run_block(PyLaunch& self, Address block, const nb::list& keys, Address stream,
                  Address end) {
  if (nb::len(keys) != self.keyed.size())
    throw std::invalid_argument("keys must have an address per table");
  for (std::size_t i = 0; i < self.keyed.size(); ++i)
    self.launch.arguments->part[self.keyed[i]].keys = number<Address>(keys, i);
  set_block(self, block);
  self.launch.launch(self.function, self.blocks, pointer<void>(stream), pointer<void>(end),
                     self.report);
}

hps::FetchLaunch::Part part_of(const nb::handle& fields) {
  if (!PyTuple_Check(fields.ptr()) || PyTuple_Size(fields.ptr()) != 7)
    throw std::invalid_argument("each part must be a tuple of 7 numbers");
  return {number<Address>(fields, 0),      number<Address>(fields, 1), number<Address>(fields, 2),
          number<Address>(fields, 3),      number<Address>(fields, 4), number<Address>(fields, 5),
          number<std::uint32_t>(fields, 6)};
}

// Sets the parts, and returns the blocks to launch.
std::uint32_t set_parts(PyLaunch& self, std::uint32_t keys_a_block, const nb::list& parts,
                        Address misses) {
  const std::size_t n = nb::len(parts);
  if (n != self.launch.now.size()) throw std::invalid_argument("parts must have one per table");
  std::array<hps::FetchLaunch::Part, hps::FetchArgs::kParts> values;
  for (std::size_t i = 0; i < n; ++i)
    values[i] = part_of(nb::handle(PyList_GetItem(parts.ptr(), static_cast<Py_ssize_t>(i))));
  self.launch.arguments->misses = misses;
  return self.launch.set(values.data(), n, keys_a_block);
}

void py_run_parts(PyLaunch& self, Address function, std::uint32_t keys_a_block,
                  const nb::list& parts, Address misses, Address stream, Address end, bool behind) {
  const std::uint32_t blocks = set_parts(self, keys_a_block, parts, misses);
  self.launch.launch(pointer<void>(function), blocks, pointer<void>(stream), pointer<void>(end),
                     behind ? Report::kBehind : Report::kByFetch);
}

// Copies `arrays`, the keys of each part, to the parts' addresses, and launches each chunk of keys
// as soon as it is there.
void launch_copied(PyLaunch& self, void* function, std::uint32_t keys_a_block,
                   const nb::list& arrays, std::size_t chunk_keys, Address stream, Address end,
                   hps::WorkerPool* pool) {
  const std::size_t parts = self.launch.now.size();
  if (nb::len(arrays) != parts || chunk_keys == 0)
    throw std::invalid_argument("arrays must have one per table, and chunks keys");
  const std::unique_ptr<std::optional<Buffer>[]> held(new std::optional<Buffer>[parts]);
  hps::ChunkedCopy copies;
  std::size_t total = 0, left = chunk_keys;  // of the current chunk
  for (std::size_t i = 0; i < parts; ++i) {
    const hps::FetchPart& part = self.launch.arguments->part[i];
    const Buffer& keys =
        held[i].emplace(PyList_GetItem(arrays.ptr(), static_cast<Py_ssize_t>(i)), false);
    if (!keys.has(1, RowTable::kInt64) || keys.size(0) != part.n)
      throw std::invalid_argument("keys must be int64 (n,)");
    if (part.positions != 0 || part.base != total)
      throw std::invalid_argument("the parts must be of all keys");
    for (std::size_t start = 0; start < part.n;) {
      const std::size_t n = std::min(left, part.n - start);
      copies.add(keys.bytes() + 8 * start, pointer<std::uint8_t>(part.keys) + 8 * start, 8 * n);
      start += n, left -= n;
      if (left == 0) copies.end_chunk(), left = chunk_keys;
    }
    total += part.n;
  }
  if (left != chunk_keys) copies.end_chunk();
  const WithoutGil released;
  copies.run(pool, [&](std::size_t chunk) {
    const std::size_t first = chunk * chunk_keys, last = std::min(total, first + chunk_keys);
    self.launch.launch_keys(function, keys_a_block, first, last, pointer<void>(stream),
                            pointer<void>(end), last == total ? Report::kBehind : Report::kNone);
  });
}

void py_run_parts_copied(PyLaunch& self, Address function, std::uint32_t keys_a_block,
                         const nb::list& parts, Address misses, const nb::list& arrays,
                         std::size_t chunk_keys, Address stream, Address end,
                         hps::WorkerPool* pool) {
  set_parts(self, keys_a_block, parts, misses);
  launch_copied(self, pointer<void>(function), keys_a_block, arrays, chunk_keys, stream, end, pool);
}

void py_run_block_copied(PyLaunch& self, Address block, const nb::list& arrays,
                         std::size_t chunk_keys, Address stream, Address end,
                         hps::WorkerPool* pool) {
  set_block(self, block);
  launch_copied(self, self.function, self.keys_a_block, arrays, chunk_keys, stream, end, pool);
}

std::uint32_t py_wait(const PyLaunch& self) {
  const WithoutGil released;
  return self.launch.wait();
}

}  // namespace

void bind_launch(nb::module_& m) {
  nb::class_<hps::PlaceLaunch>(m, "PlaceLaunch")
      .def_static(
          "make",
          [](Address function, std::uint32_t rows_a_block, Address arguments) {
            return hps::PlaceLaunch{pointer<void>(function), rows_a_block,
                                    pointer<hps::PlaceArgs>(arguments)};
          },
          nb::arg("function"), nb::arg("rows_a_block"), nb::arg("arguments"));
  nb::class_<PyLaunch>(m, "FetchLaunch")
      .def_static("make", &make_launch, nb::arg("arguments"), nb::arg("count"),
                  nb::arg("count_arguments"), nb::arg("now"))
      .def("prepare_block", &py_prepare_block, nb::arg("function"), nb::arg("blocks"),
           nb::arg("keys_a_block"), nb::arg("behind"), nb::arg("offsets"), nb::arg("keyed"))
      .def("run_block", &py_run_block, nb::arg("block"), nb::arg("keys"), nb::arg("stream"),
           nb::arg("end"))
      .def("run_parts", &py_run_parts, nb::arg("function"), nb::arg("keys_a_block"),
           nb::arg("parts"), nb::arg("misses"), nb::arg("stream"), nb::arg("end"),
           nb::arg("behind"))
      .def("run_parts_copied", &py_run_parts_copied, nb::arg("function"), nb::arg("keys_a_block"),
           nb::arg("parts"), nb::arg("misses"), nb::arg("arrays"), nb::arg("chunk_keys"),
           nb::arg("stream"), nb::arg("end"), nb::arg("pool").none() = nb::none())
      .def("run_block_copied", &py_run_block_copied, nb::arg("block"), nb::arg("arrays"),
           nb::arg("chunk_keys"), nb::arg("stream"), nb::arg("end"),
           nb::arg("pool").none() = nb::none())
      .def("wait", &py_wait);
  m.def(
      "hold_back",
      [](Address stream, const std::vector<Address>& events) {
        std::vector<void*> handles;
        for (const Address event : events) handles.push_back(pointer<void>(event));
        hps::hold_back(pointer<void>(stream), handles);
      },
      nb::arg("stream"), nb::arg("events"));
  m.def("waited_ns", &hps::waited_ns);
  m.def(
      "order_after",
      [](Address stream, Address other, Address event) {
        hps::order_after(pointer<void>(stream), pointer<void>(other), pointer<void>(event));
      },
      nb::arg("stream"), nb::arg("other"), nb::arg("event"));
}
