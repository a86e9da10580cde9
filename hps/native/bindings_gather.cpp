// Lookups without a result per key: gathers from several tables in one call, and pooling.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <optional>

#include "bindings_table.hpp"

namespace {

struct Gather {
  const hps::RowReader* table;
  const std::int64_t* keys;
  std::uint8_t* out;
  std::size_t n;
};

// Splits gathers into pieces of about equal size, to balance the load of several threads.
std::vector<Gather> split_into_pieces(const std::vector<Gather>& gathers) {
  std::vector<Gather> pieces;
  for (const Gather& whole : gathers) {
    const std::size_t row_bytes = whole.table->row_bytes();
    for (std::size_t at = 0; at < whole.n; at += kPieceKeys)
      pieces.push_back({whole.table, whole.keys + at, whole.out + at * row_bytes,
                        std::min(kPieceKeys, whole.n - at)});
  }
  return pieces;
}

bool gather_serial(const std::vector<Gather>& gathers) {
  for (const Gather& each : gathers)
    if (!each.table->gather(each.keys, each.n, each.out)) return false;
  return true;
}

bool gather_parallel(const std::vector<Gather>& gathers, std::size_t threads) {
  const std::vector<Gather> pieces = split_into_pieces(gathers);
  std::atomic<bool> all{true};
  hps::parallel_for(pieces.size(), threads, [&](std::size_t i) {
    const Gather& each = pieces[i];
    if (all.load(std::memory_order_relaxed) && !each.table->gather(each.keys, each.n, each.out))
      all.store(false, std::memory_order_relaxed);
  });
  return all;
}

// References to the objects of one request until its rows are written, so that a table that is
// dropped meanwhile stays allocated.
struct HeldRequest {
  nb::object table;
  std::optional<Buffer> keys, out;
};

// Finds each request's table in `tables`; returns false if one is absent, or a key has no row.
bool py_gather_all(const nb::dict& tables, const nb::list& requests, std::size_t threads) {
  const std::size_t count = nb::len(requests);
  std::vector<Gather> gathers(count);
  std::unique_ptr<HeldRequest[]> held(new HeldRequest[count]);
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const nb::object request =
        nb::borrow(PyList_GetItem(requests.ptr(), static_cast<Py_ssize_t>(i)));
    if (!PyTuple_Check(request.ptr()) || PyTuple_Size(request.ptr()) != 3)
      throw std::invalid_argument("a request is a table, keys and an out");
    held[i].table =
        nb::borrow(PyDict_GetItemWithError(tables.ptr(), PyTuple_GetItem(request.ptr(), 0)));
    if (!held[i].table.is_valid()) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return false;
    }
    const RowTable* table = nullptr;
    if (!nb::try_cast(held[i].table, table) || table == nullptr)
      throw std::invalid_argument("tables must be CacheTables or MappedTables");
    const Buffer& keys = held[i].keys.emplace(PyTuple_GetItem(request.ptr(), 1), false);
    const Buffer& out = held[i].out.emplace(PyTuple_GetItem(request.ptr(), 2), true);
    table->check_gather(keys, out);
    gathers[i] = {&table->reader(), reinterpret_cast<const std::int64_t*>(keys.bytes()),
                  out.bytes(), keys.size(0)};
    total += keys.size(0);
  }
  bool all = false;
  const bool several = threads > 1 && total >= 2 * kPieceKeys;
  without_gil(total,
              [&] { all = several ? gather_parallel(gathers, threads) : gather_serial(gathers); });
  return all;
}

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

std::int64_t begin_of(const hps::PoolRequest& request, std::size_t bag) {
  return request.offsets != nullptr ? request.offsets[bag]
                                    : static_cast<std::int64_t>(bag) * request.hotness;
}

// Throws unless offsets rise from 0 to n: an offset out of bounds must never be used.
void check_offsets(const hps::PoolRequest& request, std::size_t bags, std::size_t n) {
  if (request.offsets == nullptr) {
    check(static_cast<std::size_t>(request.hotness) * bags == n, "keys must be batch * hotness");
    return;
  }
  bool fits = request.offsets[0] == 0 && request.offsets[bags] == static_cast<std::int64_t>(n);
  for (std::size_t i = 0; i < bags; ++i) fits &= request.offsets[i] <= request.offsets[i + 1];
  check(fits, "offsets must rise from 0 to the number of keys");
}

void check_supplied(const hps::PoolRequest& request, std::size_t n) {
  std::int64_t after = 0;
  bool fits = true;
  for (std::size_t i = 0; i < request.n_supplied; ++i) {
    fits &= after <= request.supplied[i] && request.supplied[i] < static_cast<std::int64_t>(n);
    after = request.supplied[i] + 1;
  }
  check(fits, "supplied must be ascending positions of keys");
}

std::size_t pool_by_pieces(const RowTable& table, const hps::PoolRequest& request, std::size_t bags,
                           std::size_t n, std::int64_t* left) {
  const std::size_t pieces = table.threads() == 1 ? 1 : std::min(bags, n / kPieceKeys);
  hps::PoolRequest all = request;
  all.last = bags;
  if (pieces <= 1) return table.reader().pool(all, left);
  const auto first_bag = [&](std::size_t piece) { return piece * bags / pieces; };
  const auto first_key = [&](std::size_t piece) {
    return static_cast<std::size_t>(begin_of(request, first_bag(piece)));
  };
  std::vector<std::size_t> counts(pieces);
  hps::parallel_for(pieces, table.threads(), [&](std::size_t piece) {
    hps::PoolRequest part = request;
    part.first = first_bag(piece);
    part.last = first_bag(piece + 1);
    counts[piece] = table.reader().pool(part, left + first_key(piece));
  });
  std::size_t total = 0;
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    std::memmove(left + total, left + first_key(piece), counts[piece] * sizeof *left);
    total += counts[piece];
  }
  return total;
}

// Pools only the bags that have a supplied row, one by one.
std::size_t pool_supplied(const RowTable& table, const hps::PoolRequest& request, std::size_t bags,
                          std::int64_t* left) {
  const std::size_t row_bytes = table.reader().row_bytes();
  std::size_t unanswered = 0, bag = 0;
  for (std::size_t at = 0; at < request.n_supplied;) {
    while (bag < bags && begin_of(request, bag + 1) <= request.supplied[at]) ++bag;
    hps::PoolRequest part = request;
    part.first = bag;
    part.last = bag + 1;
    part.supplied = request.supplied + at;
    part.rows = request.rows + at * row_bytes;
    while (at < request.n_supplied && request.supplied[at] < begin_of(request, bag + 1)) ++at;
    part.n_supplied = static_cast<std::size_t>(request.supplied + at - part.supplied);
    unanswered += table.reader().pool(part, left + unanswered);
  }
  return unanswered;
}

// A checked request without keys and rows.
hps::PoolRequest make_pool_request(std::size_t n, const std::optional<Keys>& offsets,
                                   const std::optional<Floats>& weights,
                                   const std::optional<Floats>& divisors, const Rows& out) {
  const std::size_t bags = out.shape(0);
  const char* format = format_of(out.dtype());
  hps::PoolRequest request{};
  request.halves = std::strcmp(format, "e") == 0;
  check(request.halves || std::strcmp(format, "f") == 0,
        "rows must be float32 or float16 to be pooled");
  check(!offsets || offsets->shape(0) == bags + 1, "offsets must be (bags + 1,)");
  check(!weights || weights->shape(0) == n, "weights must have one entry per key");
  check(!divisors || divisors->shape(0) == bags, "divisors must have one entry per bag");
  request.offsets = offsets ? offsets->data() : nullptr;
  request.hotness = bags != 0 ? static_cast<std::int64_t>(n / bags) : 0;
  check_offsets(request, bags, n);
  request.weights = weights ? weights->data() : nullptr;
  request.divisors = divisors ? divisors->data() : nullptr;
  request.out = static_cast<std::uint8_t*>(out.data());
  request.last = bags;
  return request;
}

void py_pool_rows(const ReadOnlyRows& rows, const std::optional<Keys>& numbers,
                  const std::optional<Keys>& offsets, const std::optional<Floats>& weights,
                  const std::optional<Floats>& divisors, Rows out,
                  const std::optional<std::string>& kernels) {
  const std::size_t n = numbers ? numbers->shape(0) : rows.shape(0);
  check(out.dtype() == rows.dtype() && out.shape(1) == rows.shape(1),
        "out must have the rows' dtype and dim");
  hps::PoolRequest request = make_pool_request(n, offsets, weights, divisors, out);
  request.rows = static_cast<const std::uint8_t*>(rows.data());
  if (numbers) {
    request.keys = numbers->data();
    bool fit = true;
    for (std::size_t i = 0; i < n; ++i)
      fit &= static_cast<std::uint64_t>(request.keys[i]) < rows.shape(0);
    check(fit, "numbers must be row numbers of rows");
  }
  const hps::ReadKernels& read = kernels_named(kernels);
  without_gil(n, [&] { read.pool_rows(request, rows.shape(1) * rows.itemsize()); });
}

}  // namespace

nb::object pool_bags(const RowTable& table, const Keys& keys, const std::optional<Keys>& offsets,
                     const std::optional<Floats>& weights, const std::optional<Floats>& divisors,
                     Rows out, const std::optional<SuppliedRows>& supplied) {
  const std::size_t n = keys.shape(0), bags = out.shape(0);
  table.check_rows(out, bags);
  hps::PoolRequest request = make_pool_request(n, offsets, weights, divisors, out);
  request.keys = keys.data();
  if (supplied) {
    const auto& [positions, rows] = *supplied;
    request.supplied = positions.data();
    request.n_supplied = positions.shape(0);
    table.check_rows(rows, request.n_supplied);
    request.rows = static_cast<const std::uint8_t*>(rows.data());
    check_supplied(request, n);
  }
  std::unique_ptr<std::int64_t[]> left(new std::int64_t[n]);
  std::size_t unanswered = 0;
  without_gil(n, [&] {
    unanswered = supplied ? pool_supplied(table, request, bags, left.get())
                          : pool_by_pieces(table, request, bags, n, left.get());
  });
  if (unanswered == 0) return nb::none();
  return nb::cast(as_numpy(std::move(left), unanswered));
}

void bind_gather(nb::module_& m) {
  m.def("gather_all", &py_gather_all, nb::arg("tables"), nb::arg("requests"),
        nb::arg("threads") = 1);
  m.def("pool_rows", &py_pool_rows, nb::arg("rows").noconvert(),
        nb::arg("numbers").noconvert().none(), nb::arg("offsets").noconvert().none(),
        nb::arg("weights").noconvert().none(), nb::arg("divisors").noconvert().none(),
        nb::arg("out").noconvert(), nb::arg("kernels") = nb::none());
}
