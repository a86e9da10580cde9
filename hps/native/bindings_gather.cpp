// Lookups that skip the reports per key: all tables of a request in one call, and pooled.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <optional>

#include "bindings_table.hpp"

namespace {

struct Gather {
  const hps::CacheTable* table;
  const std::int64_t* keys;
  std::uint8_t* out;
  std::size_t n;
};

// Pieces of about equal size, so that several threads get about as much to do.
std::vector<Gather> in_pieces(const std::vector<Gather>& gathers) {
  std::vector<Gather> pieces;
  for (const Gather& whole : gathers) {
    const std::size_t row_bytes = whole.table->header().row_bytes;
    for (std::size_t at = 0; at < whole.n; at += kPieceKeys)
      pieces.push_back({whole.table, whole.keys + at, whole.out + at * row_bytes,
                        std::min(kPieceKeys, whole.n - at)});
  }
  return pieces;
}

bool gather_whole(const std::vector<Gather>& gathers) {
  for (const Gather& each : gathers)
    if (!each.table->gather(each.keys, each.n, each.out)) return false;
  return true;
}

bool gather_parallel(const std::vector<Gather>& gathers, std::size_t threads) {
  const std::vector<Gather> pieces = in_pieces(gathers);
  std::atomic<bool> all{true};
  hps::parallel(pieces.size(), threads, [&](std::size_t i) {
    const Gather& each = pieces[i];
    if (all.load(std::memory_order_relaxed) && !each.table->gather(each.keys, each.n, each.out))
      all.store(false, std::memory_order_relaxed);
  });
  return all;
}

// One ask, held until its rows are written: whoever drops the table meanwhile frees its memory
// later.
struct HeldAsk {
  nb::object table;
  std::optional<Buffer> keys, out;
};

// Takes each ask's table from `tables`; false too when one is not there.
bool py_gather_all(const nb::dict& tables, const nb::list& asks, std::size_t threads) {
  const std::size_t count = nb::len(asks);
  std::vector<Gather> gathers(count);
  std::unique_ptr<HeldAsk[]> held(new HeldAsk[count]);
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const nb::object ask = nb::borrow(PyList_GetItem(asks.ptr(), static_cast<Py_ssize_t>(i)));
    if (!PyTuple_Check(ask.ptr()) || PyTuple_Size(ask.ptr()) != 3)
      throw std::invalid_argument("an ask is a table, keys and an out");
    held[i].table =
        nb::borrow(PyDict_GetItemWithError(tables.ptr(), PyTuple_GetItem(ask.ptr(), 0)));
    if (!held[i].table.is_valid()) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return false;
    }
    const CacheTable* table = nullptr;
    if (!nb::try_cast(held[i].table, table) || table == nullptr)
      throw std::invalid_argument("tables must be CacheTables");
    const Buffer& keys = held[i].keys.emplace(PyTuple_GetItem(ask.ptr(), 1), false);
    const Buffer& out = held[i].out.emplace(PyTuple_GetItem(ask.ptr(), 2), true);
    table->check_gather(keys, out);
    gathers[i] = {&table->table(), reinterpret_cast<const std::int64_t*>(keys.bytes()), out.bytes(),
                  keys.size(0)};
    total += keys.size(0);
  }
  bool all = false;
  const bool several = threads > 1 && total >= 2 * kPieceKeys;
  without_gil(total,
              [&] { all = several ? gather_parallel(gathers, threads) : gather_whole(gathers); });
  return all;
}

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

std::int64_t begin_of(const hps::PoolAsk& ask, std::size_t bag) {
  return ask.offsets != nullptr ? ask.offsets[bag] : static_cast<std::int64_t>(bag) * ask.hotness;
}

// A negative or falling offset, or one past the keys, must never be followed.
void check_offsets(const hps::PoolAsk& ask, std::size_t bags, std::size_t n) {
  if (ask.offsets == nullptr) {
    check(static_cast<std::size_t>(ask.hotness) * bags == n, "keys must be batch * hotness");
    return;
  }
  bool fits = ask.offsets[0] == 0 && ask.offsets[bags] == static_cast<std::int64_t>(n);
  for (std::size_t i = 0; i < bags; ++i) fits &= ask.offsets[i] <= ask.offsets[i + 1];
  check(fits, "offsets must rise from 0 to the number of keys");
}

void check_given(const hps::PoolAsk& ask, std::size_t n) {
  std::int64_t after = 0;
  bool fits = true;
  for (std::size_t i = 0; i < ask.n_given; ++i) {
    fits &= after <= ask.given[i] && ask.given[i] < static_cast<std::int64_t>(n);
    after = ask.given[i] + 1;
  }
  check(fits, "given must be ascending positions of keys");
}

std::size_t pool_by_pieces(const CacheTable& table, const hps::PoolAsk& ask, std::size_t bags,
                           std::size_t n, std::int64_t* left) {
  const std::size_t pieces = table.threads() == 1 ? 1 : std::min(bags, n / kPieceKeys);
  hps::PoolAsk all = ask;
  all.last = bags;
  if (pieces <= 1) return table.table().pool(all, left);
  const auto first_bag = [&](std::size_t piece) { return piece * bags / pieces; };
  const auto first_key = [&](std::size_t piece) {
    return static_cast<std::size_t>(begin_of(ask, first_bag(piece)));
  };
  std::vector<std::size_t> counts(pieces);
  hps::parallel(pieces, table.threads(), [&](std::size_t piece) {
    hps::PoolAsk mine = ask;
    mine.first = first_bag(piece);
    mine.last = first_bag(piece + 1);
    counts[piece] = table.table().pool(mine, left + first_key(piece));
  });
  std::size_t total = 0;
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    std::memmove(left + total, left + first_key(piece), counts[piece] * sizeof *left);
    total += counts[piece];
  }
  return total;
}

// Only the bags that have a given row, one by one.
std::size_t pool_given(const CacheTable& table, const hps::PoolAsk& ask, std::size_t bags,
                       std::int64_t* left) {
  const std::size_t row_bytes = table.table().header().row_bytes;
  std::size_t unanswered = 0, bag = 0;
  for (std::size_t at = 0; at < ask.n_given;) {
    while (bag < bags && begin_of(ask, bag + 1) <= ask.given[at]) ++bag;
    hps::PoolAsk mine = ask;
    mine.first = bag;
    mine.last = bag + 1;
    mine.given = ask.given + at;
    mine.rows = ask.rows + at * row_bytes;
    while (at < ask.n_given && ask.given[at] < begin_of(ask, bag + 1)) ++at;
    mine.n_given = static_cast<std::size_t>(ask.given + at - mine.given);
    unanswered += table.table().pool(mine, left + unanswered);
  }
  return unanswered;
}

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// All but whose rows are pooled.
hps::PoolAsk pool_ask(std::size_t n, const std::optional<Keys>& offsets,
                      const std::optional<Floats>& weights, const std::optional<Floats>& divisors,
                      const Rows& out) {
  const std::size_t bags = out.shape(0);
  const char* format = format_of(out.dtype());
  hps::PoolAsk ask{};
  ask.halves = std::strcmp(format, "e") == 0;
  check(ask.halves || std::strcmp(format, "f") == 0,
        "rows must be float32 or float16 to be pooled");
  check(!offsets || offsets->shape(0) == bags + 1, "offsets must be (bags + 1,)");
  check(!weights || weights->shape(0) == n, "weights must have one entry per key");
  check(!divisors || divisors->shape(0) == bags, "divisors must have one entry per bag");
  ask.offsets = offsets ? offsets->data() : nullptr;
  ask.hotness = bags != 0 ? static_cast<std::int64_t>(n / bags) : 0;
  check_offsets(ask, bags, n);
  ask.weights = weights ? weights->data() : nullptr;
  ask.divisors = divisors ? divisors->data() : nullptr;
  ask.out = static_cast<std::uint8_t*>(out.data());
  ask.last = bags;
  return ask;
}

nb::object py_pool(const CacheTable& table, const Keys& keys, const std::optional<Keys>& offsets,
                   const std::optional<Floats>& weights, const std::optional<Floats>& divisors,
                   Rows out, const std::optional<Keys>& given,
                   const std::optional<ReadOnlyRows>& rows) {
  const std::size_t n = keys.shape(0), bags = out.shape(0);
  table.check_rows(out, bags);
  hps::PoolAsk ask = pool_ask(n, offsets, weights, divisors, out);
  ask.keys = keys.data();
  check(given.has_value() == rows.has_value(), "given positions and their rows come together");
  if (given) {
    ask.given = given->data();
    ask.n_given = given->shape(0);
    table.check_rows(*rows, ask.n_given);
    ask.rows = static_cast<const std::uint8_t*>(rows->data());
    check_given(ask, n);
  }
  std::unique_ptr<std::int64_t[]> left(new std::int64_t[n]);
  std::size_t unanswered = 0;
  without_gil(n, [&] {
    unanswered = given ? pool_given(table, ask, bags, left.get())
                       : pool_by_pieces(table, ask, bags, n, left.get());
  });
  if (unanswered == 0) return nb::none();
  return nb::cast(own(std::move(left), unanswered));
}

void py_pool_rows(const ReadOnlyRows& rows, const std::optional<Keys>& numbers,
                  const std::optional<Keys>& offsets, const std::optional<Floats>& weights,
                  const std::optional<Floats>& divisors, Rows out,
                  const std::optional<std::string>& kernels) {
  const std::size_t n = numbers ? numbers->shape(0) : rows.shape(0);
  check(out.dtype() == rows.dtype() && out.shape(1) == rows.shape(1),
        "out must have the rows' dtype and dim");
  hps::PoolAsk ask = pool_ask(n, offsets, weights, divisors, out);
  ask.rows = static_cast<const std::uint8_t*>(rows.data());
  if (numbers) {
    ask.keys = numbers->data();
    bool fit = true;
    for (std::size_t i = 0; i < n; ++i)
      fit &= static_cast<std::uint64_t>(ask.keys[i]) < rows.shape(0);
    check(fit, "numbers must be those of rows");
  }
  const hps::ReadKernels& read = kernels_named(kernels);
  without_gil(n, [&] { read.pool_rows(ask, rows.shape(1) * rows.itemsize()); });
}

}  // namespace

void bind_gather(nb::module_& m) {
  m.def("gather_all", &py_gather_all, nb::arg("tables"), nb::arg("asks"), nb::arg("threads") = 1);
  m.def("pool_bags", &py_pool, nb::arg("table"), nb::arg("keys").noconvert(),
        nb::arg("offsets").noconvert().none(), nb::arg("weights").noconvert().none(),
        nb::arg("divisors").noconvert().none(), nb::arg("out").noconvert(),
        nb::arg("given").noconvert().none() = nb::none(),
        nb::arg("rows").noconvert().none() = nb::none());
  m.def("pool_rows", &py_pool_rows, nb::arg("rows").noconvert(),
        nb::arg("numbers").noconvert().none(), nb::arg("offsets").noconvert().none(),
        nb::arg("weights").noconvert().none(), nb::arg("divisors").noconvert().none(),
        nb::arg("out").noconvert(), nb::arg("kernels") = nb::none());
}
