// Lookups without a result per key: gathers from several tables in one call, and pooling.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <memory>
#include <optional>

#include "bindings_table.hpp"

namespace {

// Vectors to be gathered: rows as they are stored, or `decoded` from their format.
struct Gather {
  const hps::RowReader* table;
  const std::int64_t* keys;
  std::uint8_t* out;
  std::size_t n, vector_bytes;
  bool decoded;
  hps::DecodeRequest decoding;
};

// Splits gathers into pieces of about equal size, to balance the load of several threads.
std::vector<Gather> split_into_pieces(const std::vector<Gather>& gathers) {
  std::vector<Gather> pieces;
  for (const Gather& whole : gathers) {
    for (std::size_t at = 0; at < whole.n; at += kPieceKeys) {
      Gather piece = whole;
      piece.keys += at;
      piece.out += at * whole.vector_bytes;
      piece.n = std::min(kPieceKeys, whole.n - at);
      pieces.push_back(piece);
    }
  }
  return pieces;
}

// Rows are decoded from a buffer of so many, which stays in the second-level cache.
constexpr std::size_t kDecodedRows = 512;

bool gather(const Gather& each) {
  if (!each.decoded) return each.table->gather(each.keys, each.n, each.out);
  const std::size_t rows = std::min(kDecodedRows, each.n);
  std::unique_ptr<std::uint8_t[]> buffer(new std::uint8_t[rows * each.table->row_bytes()]);
  hps::DecodeRequest decoding = each.decoding;
  decoding.rows = buffer.get();
  for (std::size_t at = 0; at < each.n; at += rows) {
    decoding.n = std::min(rows, each.n - at);
    decoding.out = each.out + at * each.vector_bytes;
    if (!each.table->gather(each.keys + at, decoding.n, buffer.get())) return false;
    hps::runnable_kernels().front()->decode_rows(decoding);
  }
  return true;
}

bool gather_serial(const std::vector<Gather>& gathers) {
  for (const Gather& each : gathers)
    if (!gather(each)) return false;
  return true;
}

bool gather_parallel(const std::vector<Gather>& gathers, std::size_t threads) {
  const std::vector<Gather> pieces = split_into_pieces(gathers);
  std::atomic<bool> all{true};
  hps::parallel_for(pieces.size(), threads, [&](std::size_t i) {
    const Gather& each = pieces[i];
    if (all.load(std::memory_order_relaxed) && !gather(each))
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

// Throws std::invalid_argument unless keys and out fit the table.
Gather make_gather(const RowTable& table, const Buffer& keys, const Buffer& out) {
  Gather made{&table.reader(),
              reinterpret_cast<const std::int64_t*>(keys.bytes()),
              out.bytes(),
              keys.size(0),
              table.reader().row_bytes(),
              false,
              {}};
  if (table.is_stored(keys, out)) return made;
  const bool halves = are_halves(out.format());
  made.vector_bytes = out.size(1) * (halves ? 2 : 4);
  made.decoded = true;
  made.decoding = {table.row_format(), out.size(1), nullptr, nullptr, 0, halves, nullptr};
  return made;
}

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
    gathers[i] = make_gather(*table, keys, out);
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
    return static_cast<std::size_t>(request.begin_of(first_bag(piece)));
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

// Pools only the bags that have a supplied vector, one by one.
std::size_t pool_supplied(const RowTable& table, const hps::PoolRequest& request, std::size_t bags,
                          std::int64_t* left) {
  std::size_t unanswered = 0, bag = 0;
  for (std::size_t at = 0; at < request.n_supplied;) {
    while (bag < bags && request.begin_of(bag + 1) <= request.supplied[at]) ++bag;
    hps::PoolRequest part = request;
    part.first = bag;
    part.last = bag + 1;
    part.supplied = request.supplied + at;
    part.vectors = request.vectors + at * request.dim;
    while (at < request.n_supplied && request.supplied[at] < request.begin_of(bag + 1)) ++at;
    part.n_supplied = static_cast<std::size_t>(request.supplied + at - part.supplied);
    unanswered += table.reader().pool(part, left + unanswered);
  }
  return unanswered;
}

// A checked request without keys and rows.
hps::PoolRequest make_pool_request(std::size_t n, const std::optional<Keys>& offsets,
                                   const std::optional<Floats>& weights,
                                   const std::optional<Floats>& divisors, const Rows& out,
                                   hps::RowFormat format) {
  const std::size_t bags = out.shape(0);
  hps::PoolRequest request{};
  request.format = format;
  request.dim = out.shape(1);
  request.halves = are_halves(format_of(out.dtype()));
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

// Throws unless all numbers are those of `rows` rows.
void check_numbers(const std::optional<Keys>& numbers, std::size_t rows) {
  if (!numbers) return;
  bool fit = true;
  for (std::size_t i = 0; i < numbers->shape(0); ++i)
    fit &= static_cast<std::uint64_t>(numbers->data()[i]) < rows;
  check(fit, "numbers must be row numbers of rows");
}

// The format of an array of rows; throws unless they have `dim` values of it.
template <typename Array>
hps::RowFormat checked_format(const FormatCode& code, const Array& rows, std::size_t dim) {
  const auto format = row_format_of(code, format_of(rows.dtype()));
  check(format.has_value(), "rows must be float32, float16 or of a row format");
  check(rows.shape(1) * rows.itemsize() == hps::row_bytes(*format, dim),
        "vectors must have the dim of the rows");
  return *format;
}

void py_pool_rows(const ReadOnlyRows& rows, const std::optional<Keys>& numbers,
                  const std::optional<Keys>& offsets, const std::optional<Floats>& weights,
                  const std::optional<Floats>& divisors, Rows out,
                  const std::optional<std::string>& kernels, const FormatCode& code) {
  const std::size_t n = numbers ? numbers->shape(0) : rows.shape(0);
  const hps::RowFormat format = checked_format(code, rows, out.shape(1));
  hps::PoolRequest request = make_pool_request(n, offsets, weights, divisors, out, format);
  request.rows = static_cast<const std::uint8_t*>(rows.data());
  check_numbers(numbers, rows.shape(0));
  if (numbers) request.keys = numbers->data();
  const hps::ReadKernels& read = kernels_named(kernels);
  without_gil(n, [&] { read.pool_rows(request); });
}

void py_decode_rows(const ReadOnlyRows& rows, const std::optional<Keys>& numbers, Rows out,
                    std::uint8_t code, const std::optional<std::string>& kernels) {
  const std::size_t n = numbers ? numbers->shape(0) : rows.shape(0), dim = out.shape(1);
  check(out.shape(0) == n, "out must have one entry per row");
  check_numbers(numbers, rows.shape(0));
  const hps::DecodeRequest request{
      checked_format(code, rows, dim),       dim, static_cast<const std::uint8_t*>(rows.data()),
      numbers ? numbers->data() : nullptr,   n,   are_halves(format_of(out.dtype())),
      static_cast<std::uint8_t*>(out.data())};
  const hps::ReadKernels& read = kernels_named(kernels);
  without_gil_for_bytes(n * dim, [&] { read.decode_rows(request); });
}

void py_encode_rows(const Vectors& vectors, std::uint8_t code, Rows rows,
                    Array<std::uint8_t> storable, const std::optional<std::string>& kernels) {
  const std::size_t n = vectors.shape(0), dim = vectors.shape(1);
  check(rows.shape(0) == n && storable.shape(0) == n, "rows must have one entry per vector");
  check(dim > 0, "vectors must have values");
  const hps::EncodeRequest request{checked_format(code, rows, dim),
                                   dim,
                                   vectors.data(),
                                   n,
                                   static_cast<std::uint8_t*>(rows.data()),
                                   storable.data()};
  const hps::ReadKernels& read = kernels_named(kernels);
  without_gil_for_bytes(n * dim, [&] { read.encode_rows(request); });
}

}  // namespace

nb::object pool_bags(const RowTable& table, const Keys& keys, const std::optional<Keys>& offsets,
                     const std::optional<Floats>& weights, const std::optional<Floats>& divisors,
                     Rows out, const std::optional<SuppliedVectors>& supplied) {
  const std::size_t n = keys.shape(0), bags = out.shape(0);
  table.check_vectors(format_of(out.dtype()), out.shape(1));
  hps::PoolRequest request =
      make_pool_request(n, offsets, weights, divisors, out, table.row_format());
  request.keys = keys.data();
  if (supplied) {
    const auto& [positions, vectors] = *supplied;
    request.supplied = positions.data();
    request.n_supplied = positions.shape(0);
    check(vectors.shape(0) == request.n_supplied && vectors.shape(1) == request.dim,
          "supplied must have a vector (dim,) per position");
    request.vectors = vectors.data();
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
        nb::arg("out").noconvert(), nb::arg("kernels") = nb::none(),
        nb::arg("format") = nb::none());
  m.def("decode_rows", &py_decode_rows, nb::arg("rows").noconvert(),
        nb::arg("numbers").noconvert().none(), nb::arg("out").noconvert(), nb::arg("format"),
        nb::arg("kernels") = nb::none());
  m.def("encode_rows", &py_encode_rows, nb::arg("vectors").noconvert(), nb::arg("format"),
        nb::arg("rows").noconvert(), nb::arg("storable").noconvert(),
        nb::arg("kernels") = nb::none());
}
