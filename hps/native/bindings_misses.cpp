// Rows in host memory for the misses of a GPU cache, and keys for it in staging memory.
#include <algorithm>
#include <optional>

#include "bindings_table.hpp"
#include "hps/fetch_launch.hpp"
#include "hps/miss_gather.hpp"

namespace {

constexpr std::size_t kCopyBytes = 1 << 17;  // a piece of a copy for one thread: some 10 us

using Positions = Array<const std::uint32_t>;
using Bytes2 = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

// The parts of `tables`, of RowTables or None, whose first positions are `bases`. `held` keeps
// the tables until the gather has ended.
void read_parts(const nb::list& tables, const Positions& bases, std::size_t stride,
                const std::int64_t* keys, hps::MissPart* parts, nb::object* held) {
  const std::size_t count = nb::len(tables);
  check(bases.shape(0) == count && count > 0 && bases.data()[0] == 0,
        "bases must have an entry per table, the first 0");
  for (std::size_t i = 0; i < count; ++i) {
    held[i] = nb::borrow(PyList_GetItem(tables.ptr(), static_cast<Py_ssize_t>(i)));
    const RowTable* table = nullptr;
    check(held[i].is_none() || nb::try_cast(held[i], table),
          "tables must be CacheTables, MappedTables or None");
    check(table == nullptr || table->reader().row_bytes() <= stride,
          "rows must be at least as long as the tables' rows");
    const std::uint32_t base = bases.data()[i];
    check(i == 0 || bases.data()[i - 1] <= base, "bases must ascend");
    parts[i] = {table == nullptr ? nullptr : &table->reader(), keys == nullptr ? keys : keys + base,
                base};
  }
}

std::size_t gather_checked(const hps::MissList& list, std::size_t total, hps::WorkerPool* pool,
                           const hps::PlaceLaunch* placing, void* stream) {
  std::size_t unanswered = 0;
  bool fit = true;
  without_gil(list.n, [&] {
    for (std::size_t i = 0; i < list.n; ++i) fit &= list.positions[i] < total;
    if (!fit) return;
    if (placing != nullptr) {
      unanswered = hps::gather_misses(list, pool, [&](std::size_t first, std::size_t n) {
        placing->launch(list.positions + first, list.rows + first * list.stride,
                        list.sources + first, n, stream);
      });
    } else {
      unanswered = pool == nullptr ? hps::gather_misses(list) : hps::gather_misses(list, *pool);
    }
  });
  check(fit, "positions must be those of keys");
  return unanswered;
}

std::size_t py_gather_misses(const nb::list& tables, const Positions& bases, const Keys& keys,
                             const Positions& positions, const Bytes2& rows,
                             const Array<std::uint8_t>& sources, std::uint8_t code,
                             const Counts& counts, bool listed, hps::WorkerPool* pool,
                             const hps::PlaceLaunch* placing, std::uint64_t stream) {
  const std::size_t count = nb::len(tables), n = positions.shape(0);
  check(rows.shape(0) == n && sources.shape(0) == n && (!listed || keys.shape(0) == n),
        "rows, sources and listed keys must have one entry per position");
  check(counts.shape(0) == count && counts.shape(1) == 2, "counts must be (tables, 2)");
  std::unique_ptr<hps::MissPart[]> parts(new hps::MissPart[count]);
  std::unique_ptr<nb::object[]> held(new nb::object[count]);
  const std::int64_t* listed_keys = listed ? keys.data() : nullptr;
  read_parts(tables, bases, rows.shape(1), listed ? nullptr : keys.data(), parts.get(), held.get());
  return gather_checked({parts.get(), count, positions.data(), listed_keys, n, rows.data(),
                         rows.shape(1), sources.data(), code, counts.data()},
                        listed ? UINT32_MAX : keys.shape(0), pool, placing,
                        reinterpret_cast<void*>(stream));
}

// Copies arrays of keys to `out`, one after the other; returns their number.
std::size_t py_copy_keys(const nb::list& arrays, const Array<std::int64_t>& out,
                         hps::WorkerPool* pool) {
  struct Piece {
    const std::uint8_t* from;
    std::uint8_t* to;
    std::size_t bytes;
  };
  const std::size_t count = nb::len(arrays);
  std::unique_ptr<std::optional<Buffer>[]> held(new std::optional<Buffer>[count]);
  std::vector<Piece> pieces;
  pieces.reserve(count + out.shape(0) * 8 / kCopyBytes);
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Buffer& keys =
        held[i].emplace(PyList_GetItem(arrays.ptr(), static_cast<Py_ssize_t>(i)), false);
    check(keys.has(1, RowTable::kInt64), "keys must be int64 (n,)");
    const std::size_t bytes = keys.size(0) * 8;
    check(total + keys.size(0) <= out.shape(0), "out must hold all keys");
    auto* to = reinterpret_cast<std::uint8_t*>(out.data() + total);
    for (std::size_t at = 0; at < bytes; at += kCopyBytes)
      pieces.push_back({keys.bytes() + at, to + at, std::min(kCopyBytes, bytes - at)});
    total += keys.size(0);
  }
  const auto copy = [&](std::size_t i) {
    std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
  };
  without_gil(total / 8, [&] {
    if (pool != nullptr && total * 8 >= 4 * kCopyBytes) {
      pool->run(pieces.size(), copy);
    } else {
      for (std::size_t i = 0; i < pieces.size(); ++i) copy(i);
    }
  });
  return total;
}

}  // namespace

void bind_misses(nb::module_& m) {
  nb::class_<hps::WorkerPool>(m, "WorkerPool")
      .def(nb::init<std::size_t>(), nb::arg("threads"))
      .def_prop_ro("threads", &hps::WorkerPool::threads);
  m.def("gather_misses", &py_gather_misses, nb::arg("tables"), nb::arg("bases").noconvert(),
        nb::arg("keys").noconvert(), nb::arg("positions").noconvert(), nb::arg("rows").noconvert(),
        nb::arg("sources").noconvert(), nb::arg("code"), nb::arg("counts").noconvert(),
        nb::arg("listed") = false, nb::arg("pool").none() = nb::none(),
        nb::arg("placing").none() = nb::none(), nb::arg("stream") = 0);
  m.def("copy_keys", &py_copy_keys, nb::arg("arrays"), nb::arg("out").noconvert(),
        nb::arg("pool").none() = nb::none());
}
