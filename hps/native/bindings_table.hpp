// The Python classes RowTable and CacheTable, for the files that bind functions of tables.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "hps/cache_table.hpp"
#include "hps/parallel.hpp"

// The keys of one piece of work for several threads: some 100 us.
constexpr std::size_t kPieceKeys = 4096;

using ReadOnlyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float>;
using Vectors = nb::ndarray<nb::ro, const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// Ascending positions of keys (m,), and the vectors (m, dim) to use for them.
using SuppliedVectors = std::pair<Keys, Vectors>;
// A row format's code; none: float32 or float16, as the dtype says.
using FormatCode = std::optional<std::uint8_t>;

// The kernels of this instruction set, or the fastest that this machine can run.
inline const hps::ReadKernels& kernels_named(const std::optional<std::string>& name) {
  for (const hps::ReadKernels* kernels : hps::runnable_kernels())
    if (!name || *name == kernels->name) return *kernels;
  throw std::invalid_argument("this machine can't run the kernels " + *name);
}

// An array by the buffer protocol, at a third of the cost of nb::ndarray.
class Buffer {
 public:
  Buffer(PyObject* array, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array, &view_, flags) == 0) return;
    PyErr_Clear();
    throw std::invalid_argument("arrays must be C-contiguous, and outs writable");
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Whether the array has `ndim` axes and the dtype of `format`, by any of its names: NumPy has two
  // integer types of 8 bytes, and arrays made here are of the other one.
  bool has(int ndim, const char* format) const {
    return view_.ndim == ndim &&
           (std::strcmp(view_.format, format) == 0 || (is_int64(view_.format) && is_int64(format)));
  }
  std::size_t size(int axis) const { return static_cast<std::size_t>(view_.shape[axis]); }
  const char* format() const { return view_.format; }
  std::uint8_t* bytes() const { return static_cast<std::uint8_t*>(view_.buf); }

 private:
  static bool is_int64(const char* format) {
    return std::strcmp(format, "q") == 0 ||
           (sizeof(long) == sizeof(long long) && std::strcmp(format, "l") == 0);
  }

  Py_buffer view_;
};

// The buffer protocol's name of a dtype; "" if it has none.
inline const char* format_of(nb::dlpack::dtype type) {
  const unsigned size = type.bits == 8 ? 0 : type.bits == 16 ? 1 : type.bits == 32 ? 2 : 3;
  if (type.lanes != 1) return "";
  constexpr bool kLong = sizeof(long) == 8;
  static constexpr const char* kFloats[] = {"", "e", "f", "d"};
  static constexpr const char* kInts[] = {"b", "h", "i", kLong ? "l" : "q"};
  static constexpr const char* kUnsigned[] = {"B", "H", "I", kLong ? "L" : "Q"};
  switch (static_cast<nb::dlpack::dtype_code>(type.code)) {
    case nb::dlpack::dtype_code::Float:
      return kFloats[size];
    case nb::dlpack::dtype_code::Int:
      return kInts[size];
    case nb::dlpack::dtype_code::UInt:
      return kUnsigned[size];
    default:
      return "";
  }
}

// The format of rows: that of `code`, or if it is none, float32 or float16 as their dtype says;
// none for rows of another dtype.
inline std::optional<hps::RowFormat> row_format_of(const FormatCode& code, const char* dtype) {
  if (code) {
    if (*code >= hps::kRowFormats) throw std::invalid_argument("no row format has this code");
    return static_cast<hps::RowFormat>(*code);
  }
  if (std::strcmp(dtype, "f") == 0) return hps::RowFormat::kFloat32;
  if (std::strcmp(dtype, "e") == 0) return hps::RowFormat::kFloat16;
  return std::nullopt;
}

// Whether vectors of the dtype are float16; throws unless they are that or float32.
inline bool are_halves(const char* dtype) {
  if (std::strcmp(dtype, "e") == 0) return true;
  if (std::strcmp(dtype, "f") == 0) return false;
  throw std::invalid_argument("vectors must be float32 or float16");
}

// What the Python classes of tables have in common: the rows' width, dtype and format, and the
// reads of the fast path.
class RowTable {
 public:
  virtual ~RowTable() = default;
  virtual const hps::RowReader& reader() const = 0;

  bool gather(Keys keys, Rows out) const {
    const std::size_t n = keys.shape(0);
    check_rows(out, n);
    bool all = false;
    without_gil(
        n, [&] { all = reader().gather(keys.data(), n, static_cast<std::uint8_t*>(out.data())); });
    return all;
  }

  std::size_t threads() const { return threads_; }
  void set_threads(std::size_t threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    threads_ = threads;
  }

  template <typename Array>
  void check_rows(const Array& rows, std::size_t n) const {
    if (rows.dtype() != dtype_ || rows.shape(1) != dim_)
      throw std::invalid_argument("rows must have the table's dtype and dim");
    if (rows.shape(0) != n) throw std::invalid_argument("rows must have one entry per key");
  }

  // Whether `out` gets the rows as they are stored, and not their values in float32 or float16.
  // Throws std::invalid_argument unless `keys` and `out` fit the table. The GIL must be held.
  bool is_stored(const Buffer& keys, const Buffer& out) const {
    if (!keys.has(1, kInt64)) throw std::invalid_argument("keys must be int64 (n,)");
    if (out.has(2, format_.c_str()) && out.size(1) == dim_ && out.size(0) == keys.size(0))
      return true;
    if (!out.has(2, out.format()) || out.size(0) != keys.size(0))
      throw std::invalid_argument("out must be (n, dim) of the table's dtype");
    check_vectors(out.format(), out.size(1));
    return false;
  }
  // Throws std::invalid_argument unless the values of the rows fit vectors of `dim` float32 or
  // float16.
  void check_vectors(const char* dtype, std::size_t dim) const {
    are_halves(dtype);
    if (!row_format_) throw std::invalid_argument("rows of this dtype have no row format");
    if (reader().row_bytes() != hps::row_bytes(*row_format_, dim))
      throw std::invalid_argument("vectors must have the dim of the table's rows");
  }
  // After check_vectors.
  hps::RowFormat row_format() const { return *row_format_; }
  bool is_format(const char* format) const { return format_ == format; }
  bool has_same_rows(const RowTable& other) const {
    return dtype_ == other.dtype_ && dim_ == other.dim_ && row_format_ == other.row_format_;
  }
  std::size_t dim() const { return dim_; }

  static constexpr const char* kInt64 = sizeof(long) == 8 ? "l" : "q";

 protected:
  RowTable(const ReadOnlyRows& like, std::uint8_t code, const FormatCode& format)
      : dtype_(like.dtype()),
        dim_(like.shape(1)),
        code_(code),
        format_(format_of(like.dtype())),
        row_format_(row_format_of(format, format_.c_str())) {}

  RowTable(const RowTable& like, std::uint8_t code)
      : dtype_(like.dtype_),
        dim_(like.dim_),
        code_(code),
        format_(like.format_),
        row_format_(like.row_format_) {}

  nb::dlpack::dtype dtype_;
  std::size_t dim_;
  std::uint8_t code_;
  std::string format_;
  std::optional<hps::RowFormat> row_format_;
  std::size_t threads_ = 1;
};

class CacheTable final : public RowTable {
 public:
  CacheTable(std::uint64_t capacity, const ReadOnlyRows& like, hps::Eviction eviction,
             std::uint8_t code, const hps::ReadKernels& kernels, const hps::MemoryKind& kind,
             const FormatCode& format)
      : RowTable(like, code, format) {
    const std::size_t row_bytes = like.shape(1) * like.itemsize();
    const WithoutGil released;  // mapping gigabytes, and freeing them, takes milliseconds
    table_.emplace(capacity, row_bytes, eviction, kernels, kind);
  }

  CacheTable(int file, const ReadOnlyRows& like, std::uint8_t code, const hps::ReadKernels& kernels,
             const FormatCode& format)
      : RowTable(like, code, format) {
    const std::size_t row_bytes = like.shape(1) * like.itemsize();
    const WithoutGil released;
    table_.emplace(row_bytes, kernels, file);
  }

  ~CacheTable() override {
    const WithoutGil released;
    table_.reset();
  }

  const hps::RowReader& reader() const override { return *table_; }

  nb::object fetch(Keys keys, Keys missing, std::uint64_t oldest_tombstone, Rows out,
                   Array<std::uint64_t> versions, Array<std::uint8_t> source) const {
    const std::size_t n = keys.shape(0), m = missing.shape(0);
    check_rows(out, n);
    if (versions.shape(0) != n || source.shape(0) != n)
      throw std::invalid_argument("versions and source must have one entry per key");
    for (std::size_t i = 0; i < m; ++i)
      if (static_cast<std::uint64_t>(missing.data()[i]) >= n)
        throw std::invalid_argument("missing must hold positions of keys");

    const hps::FetchOutput output{static_cast<std::uint8_t*>(out.data()), versions.data(),
                                  source.data(), code_};
    std::unique_ptr<std::int64_t[]> left(new std::int64_t[m]);
    std::size_t unanswered = 0;
    without_gil(m, [&] {
      unanswered =
          fetch_by_pieces(keys.data(), missing.data(), m, oldest_tombstone, output, left.get());
    });
    if (unanswered == 0) return nb::none();
    return nb::cast(as_numpy(std::move(left), unanswered));
  }

  void write(Keys keys, std::optional<ReadOnlyRows> rows, Array<const std::uint64_t> versions,
             std::uint64_t oldest_tombstone, bool resident_only) {
    const std::size_t n = keys.shape(0);
    if (versions.shape(0) != n) throw std::invalid_argument("versions must have one entry per key");
    if (rows) check_rows(*rows, n);
    const std::uint8_t* from = rows ? static_cast<const std::uint8_t*>(rows->data()) : nullptr;
    // May wait for another writer, which must not happen with the GIL held.
    const WithoutGil released;
    table_->write({keys.data(), versions.data(), from, n, oldest_tombstone, resident_only});
  }

  void evict(Keys keys) {
    const WithoutGil released;
    table_->evict(keys.data(), keys.shape(0));
  }

  std::size_t expire(std::uint64_t oldest, std::uint64_t first, std::uint64_t n) {
    const WithoutGil released;
    return table_->expire(oldest, first, n);
  }

  nb::object top_k(std::size_t n) const {
    std::vector<hps::HotKey> hot;
    {
      const WithoutGil released;
      hot = table_->top_k(n);
    }
    std::unique_ptr<std::int64_t[]> keys(new std::int64_t[hot.size()]);
    std::unique_ptr<std::uint8_t[]> scores(new std::uint8_t[hot.size()]);
    for (std::size_t i = 0; i < hot.size(); ++i) {
      keys[i] = hot[i].key;
      scores[i] = hot[i].score;
    }
    return nb::make_tuple(as_numpy(std::move(keys), hot.size()),
                          as_numpy(std::move(scores), hot.size()));
  }

  std::uint64_t rows() const { return table_->counts().rows; }
  std::uint64_t tombstones() const { return table_->counts().tombstones; }
  std::uint64_t evictions() const { return table_->counts().evictions; }
  std::uint64_t capacity() const { return table_->header().capacity; }
  std::uint64_t buckets() const { return table_->header().buckets; }
  std::uint64_t bytes() const { return table_->bytes(); }

  bool repair() { return table_->repair(); }

  const hps::CacheTable& table() const { return *table_; }

 private:
  std::size_t fetch_by_pieces(const std::int64_t* keys, const std::int64_t* missing, std::size_t m,
                              std::uint64_t oldest_tombstone, const hps::FetchOutput& output,
                              std::int64_t* left) const {
    if (threads_ == 1 || m < 2 * kPieceKeys)
      return table_->fetch(keys, missing, m, oldest_tombstone, output, left);
    const std::size_t pieces = (m + kPieceKeys - 1) / kPieceKeys;
    std::vector<std::size_t> counts(pieces);
    hps::parallel_for(pieces, threads_, [&](std::size_t piece) {
      const std::size_t at = piece * kPieceKeys, n = std::min(kPieceKeys, m - at);
      counts[piece] = table_->fetch(keys, missing + at, n, oldest_tombstone, output, left + at);
    });
    std::size_t total = 0;
    for (std::size_t piece = 0; piece < pieces; ++piece) {
      std::memmove(left + total, left + piece * kPieceKeys, counts[piece] * sizeof *left);
      total += counts[piece];
    }
    return total;
  }

  std::optional<hps::CacheTable> table_;
};

// pool_bags of Python's tables, see twin_cache.py. Returns the positions of keys without a row,
// None if there are none.
nb::object pool_bags(const RowTable& table, const Keys& keys, const std::optional<Keys>& offsets,
                     const std::optional<Floats>& weights, const std::optional<Floats>& divisors,
                     Rows out, const std::optional<SuppliedVectors>& supplied);
