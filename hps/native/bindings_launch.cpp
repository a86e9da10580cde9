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
  std::uint32_t blocks = 0;
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

void py_prepare_block(PyLaunch& self, Address function, std::uint32_t blocks, bool behind,
                      const std::vector<Address>& offsets,
                      const std::vector<std::uint32_t>& keyed) {
  const std::size_t parts = self.launch.now.size();
  if (offsets.size() != parts) throw std::invalid_argument("offsets must have one per part");
  for (const std::uint32_t part : keyed)
    if (part >= parts) throw std::invalid_argument("keyed must have numbers of parts");
  self.function = pointer<void>(function), self.blocks = blocks,
  self.report = behind ? Report::kBehind : Report::kByFetch;
  self.offsets = offsets, self.keyed = keyed;
}

void launch_block(PyLaunch& self, Address block, Address stream, Address end) {
  hps::FetchPart* parts = self.launch.arguments->part;
  for (std::size_t i = 0; i < self.offsets.size(); ++i) parts[i].out = block + self.offsets[i];
  self.launch.launch(self.function, self.blocks, pointer<void>(stream), pointer<void>(end),
                     self.report);
}

void py_run_block(PyLaunch& self, Address block, const nb::list& keys, Address stream,
                  Address end) {
  if (nb::len(keys) != self.keyed.size())
    throw std::invalid_argument("keys must have an address per table");
  for (std::size_t i = 0; i < self.keyed.size(); ++i)
    self.launch.arguments->part[self.keyed[i]].keys = number<Address>(keys, i);
  launch_block(self, block, stream, end);
}

hps::FetchLaunch::Part part_of(const nb::handle& fields) {
  if (!PyTuple_Check(fields.ptr()) || PyTuple_Size(fields.ptr()) != 7)
    throw std::invalid_argument("each part must be a tuple of 7 numbers");
  return {number<Address>(fields, 0),      number<Address>(fields, 1), number<Address>(fields, 2),
          number<Address>(fields, 3),      number<Address>(fields, 4), number<Address>(fields, 5),
          number<std::uint32_t>(fields, 6)};
}

void py_run_parts(PyLaunch& self, Address function, std::uint32_t keys_a_block,
                  const nb::list& parts, Address misses, Address stream, Address end, bool behind) {
  const std::size_t n = nb::len(parts);
  if (n != self.launch.now.size()) throw std::invalid_argument("parts must have one per table");
  std::array<hps::FetchLaunch::Part, hps::FetchArgs::kParts> values;
  for (std::size_t i = 0; i < n; ++i)
    values[i] = part_of(nb::handle(PyList_GetItem(parts.ptr(), static_cast<Py_ssize_t>(i))));
  self.launch.arguments->misses = misses;
  const std::uint32_t blocks = self.launch.set(values.data(), n, keys_a_block);
  self.launch.launch(pointer<void>(function), blocks, pointer<void>(stream), pointer<void>(end),
                     behind ? Report::kBehind : Report::kByFetch);
}

// Launches a part's fetch in chunks, as its keys reach `copied`, memory for kernels.
void py_run_copied(PyLaunch& self, Address function, std::uint32_t keys_a_block,
                   const nb::tuple& part, nb::handle keys, std::uint32_t chunk_keys, Address misses,
                   Address stream, Address end, hps::WorkerPool* pool) {
  hps::FetchLaunch::Part whole = part_of(part);
  const Buffer from(keys.ptr(), false);
  if (self.launch.now.size() != 1 || whole.positions != 0 || chunk_keys == 0)
    throw std::invalid_argument("the launch must be of one table, without positions");
  if (!from.has(1, CacheTable::kInt64) || from.size(0) != whole.n)
    throw std::invalid_argument("keys must be int64 (n,)");
  const std::uint32_t n = whole.n;
  hps::ChunkedCopy copies;
  for (std::uint32_t start = 0; start < n; start += chunk_keys) {
    const std::size_t bytes = 8 * static_cast<std::size_t>(std::min(chunk_keys, n - start));
    const std::size_t at = 8 * static_cast<std::size_t>(start);
    copies.add(from.bytes() + at, pointer<std::uint8_t>(whole.keys) + at, bytes);
    copies.end_chunk();
  }
  self.launch.arguments->misses = misses;
  const std::uint64_t row_bytes = self.launch.arguments->part[0].row_bytes;
  const auto ready = [&](std::size_t chunk) {
    const std::uint64_t start = chunk * std::uint64_t{chunk_keys};
    hps::FetchLaunch::Part own = whole;
    own.keys += 8 * start, own.out += row_bytes * start;
    if (own.versions != 0) own.versions += 8 * start;
    if (own.source != 0) own.source += start;
    own.n = static_cast<std::uint32_t>(std::min<std::uint64_t>(chunk_keys, n - start));
    const std::uint32_t blocks = self.launch.set(&own, 1, keys_a_block);
    self.launch.arguments->part[0].base = static_cast<std::uint32_t>(start);
    self.launch.launch(pointer<void>(function), blocks, pointer<void>(stream), pointer<void>(end),
                       start + own.n == n ? Report::kBehind : Report::kNone);
  };
  const WithoutGil released;
  copies.run(pool, ready);
}

// Launches into one block, each as soon as its keys, `sizes` of them, are in `copied`.
void py_run_chunks(const nb::list& launches, const std::vector<std::size_t>& sizes,
                   const nb::list& arrays, const Array<std::int64_t>& copied, Address block,
                   Address stream, Address end, hps::WorkerPool* pool) {
  std::vector<PyLaunch*> chunks;
  for (const nb::handle each : launches) chunks.push_back(nb::cast<PyLaunch*>(each));
  if (chunks.size() != sizes.size()) throw std::invalid_argument("sizes must have one per launch");
  const std::size_t count = nb::len(arrays);
  const std::unique_ptr<std::optional<Buffer>[]> held(new std::optional<Buffer>[count]);
  std::size_t array = 0, used = 0, total = 0;  // of the current array's keys; of all
  hps::ChunkedCopy copies;
  for (std::size_t left : sizes) {
    while (left != 0) {
      if (array == count) throw std::invalid_argument("arrays must have the launches' keys");
      if (!held[array]) {
        const Buffer& keys = held[array].emplace(
            PyList_GetItem(arrays.ptr(), static_cast<Py_ssize_t>(array)), false);
        if (!keys.has(1, CacheTable::kInt64))
          throw std::invalid_argument("keys must be int64 (n,)");
      }
      const std::size_t n = std::min(left, held[array]->size(0) - used);
      if (total + n > copied.shape(0)) throw std::invalid_argument("copied must hold all keys");
      copies.add(held[array]->bytes() + 8 * used, copied.data() + total, 8 * n);
      left -= n, used += n, total += n;
      if (used == held[array]->size(0)) ++array, used = 0;
    }
    copies.end_chunk();
  }
  const WithoutGil released;
  copies.run(pool, [&](std::size_t chunk) { launch_block(*chunks[chunk], block, stream, end); });
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
           nb::arg("behind"), nb::arg("offsets"), nb::arg("keyed"))
      .def("run_block", &py_run_block, nb::arg("block"), nb::arg("keys"), nb::arg("stream"),
           nb::arg("end"))
      .def("run_parts", &py_run_parts, nb::arg("function"), nb::arg("keys_a_block"),
           nb::arg("parts"), nb::arg("misses"), nb::arg("stream"), nb::arg("end"),
           nb::arg("behind"))
      .def("run_copied", &py_run_copied, nb::arg("function"), nb::arg("keys_a_block"),
           nb::arg("part"), nb::arg("keys"), nb::arg("chunk_keys"), nb::arg("misses"),
           nb::arg("stream"), nb::arg("end"), nb::arg("pool").none() = nb::none())
      .def("wait", &py_wait);
  m.def("run_chunks", &py_run_chunks, nb::arg("launches"), nb::arg("sizes"), nb::arg("arrays"),
        nb::arg("copied").noconvert(), nb::arg("block"), nb::arg("stream"), nb::arg("end"),
        nb::arg("pool").none() = nb::none());
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
