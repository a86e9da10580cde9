// Rows in host memory for the misses of a GPU cache.
#include <algorithm>
#include <optional>

#include "bindings_table.hpp"
#include "hps/miss_gather.hpp"

namespace {

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

// References to one part's table and keys until the gather has ended.
struct HeldPart {
  nb::object table;
  std::optional<Buffer> keys;
};

// Reads the parts from `tables`, of CacheTables or None, and `keys`; returns the number of keys of
// the batch.
std::size_t read_parts(const nb::list& tables, const nb::list& keys, std::size_t stride,
                       hps::MissPart* parts, HeldPart* held) {
  const std::size_t count = nb::len(tables);
  check(nb::len(keys) == count && count > 0, "tables and keys must have an entry per part");
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    held[i].table = nb::borrow(PyList_GetItem(tables.ptr(), static_cast<Py_ssize_t>(i)));
    const CacheTable* table = nullptr;
    check(held[i].table.is_none() || nb::try_cast(held[i].table, table),
          "tables must be CacheTables or None");
    const Buffer& own =
        held[i].keys.emplace(PyList_GetItem(keys.ptr(), static_cast<Py_ssize_t>(i)), false);
    check(own.has(1, CacheTable::kInt64), "keys must be int64 (n,)");
    check(table == nullptr || table->table().header().row_bytes <= stride,
          "rows must be at least as long as the tables' rows");
    parts[i] = {table == nullptr ? nullptr : &table->table(),
                reinterpret_cast<const std::int64_t*>(own.bytes()),
                static_cast<std::uint32_t>(total)};
    total += own.size(0);
    check(total < UINT32_MAX, "a batch has fewer than 2^32 - 1 keys");
  }
  return total;
}

std::size_t gather_checked(const hps::MissList& list, std::size_t total, hps::WorkerPool* pool) {
  std::size_t unanswered = 0;
  bool fit = true;
  without_gil(list.n, [&] {
    for (std::size_t i = 0; i < list.n; ++i) fit &= list.positions[i] < total;
    if (fit)
      unanswered = pool == nullptr ? hps::gather_misses(list) : hps::gather_misses(list, *pool);
  });
  check(fit, "positions must be those of keys");
  return unanswered;
}

std::size_t py_gather_misses(
    const nb::list& tables, const nb::list& keys, const Array<const std::uint32_t>& positions,
    const nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows,
    const Array<std::uint8_t>& sources, std::uint8_t code, hps::WorkerPool* pool) {
  const std::size_t count = nb::len(tables), n = positions.shape(0);
  check(rows.shape(0) == n && sources.shape(0) == n,
        "rows and sources must have one entry per position");
  std::unique_ptr<hps::MissPart[]> parts(new hps::MissPart[count]);
  std::unique_ptr<HeldPart[]> held(new HeldPart[count]);
  const std::size_t total = read_parts(tables, keys, rows.shape(1), parts.get(), held.get());
  return gather_checked({parts.get(), count, positions.data(), nullptr, n, rows.data(),
                         rows.shape(1), sources.data(), code},
                        total, pool);
}

}  // namespace

void bind_misses(nb::module_& m) {
  nb::class_<hps::WorkerPool>(m, "WorkerPool")
      .def(nb::init<std::size_t>(), nb::arg("threads"))
      .def_prop_ro("threads", &hps::WorkerPool::threads);
  m.def("gather_misses", &py_gather_misses, nb::arg("tables"), nb::arg("keys"),
        nb::arg("positions").noconvert(), nb::arg("rows").noconvert(),
        nb::arg("sources").noconvert(), nb::arg("code"), nb::arg("pool").none() = nb::none());
}
