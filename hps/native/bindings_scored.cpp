// Python binding of ScoredTable.
#include <nanobind/stl/optional.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "bindings.hpp"
#include "hps/cache_read.hpp"
#include "hps/scored_table.hpp"

namespace {

using ReadOnlyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Scores = Array<const std::uint64_t>;
using Flags = Array<const bool>;

// Integers wrap around, as NumPy's.
template <typename Element>
void add_rows(std::uint8_t* to, const std::uint8_t* from, std::size_t row_bytes) {
  for (std::size_t at = 0; at < row_bytes; at += sizeof(Element)) {
    Element sum, addend;
    std::memcpy(&sum, to + at, sizeof sum);
    std::memcpy(&addend, from + at, sizeof addend);
    sum = static_cast<Element>(sum + addend);
    std::memcpy(to + at, &sum, sizeof sum);
  }
}

hps::AddRows add_for(nb::dlpack::dtype type) {
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (code == nb::dlpack::dtype_code::Float) {
    if (type.bits == 16) return add_rows<hps::Half>;
    return type.bits == 32 ? add_rows<float> : type.bits == 64 ? add_rows<double> : nullptr;
  }
  if (code != nb::dlpack::dtype_code::Int && code != nb::dlpack::dtype_code::UInt) return nullptr;
  switch (type.bits) {
    case 8:
      return add_rows<std::uint8_t>;
    case 16:
      return add_rows<std::uint16_t>;
    case 32:
      return add_rows<std::uint32_t>;
    default:
      return add_rows<std::uint64_t>;
  }
}

class ScoredTable {
 public:
  ScoredTable(std::uint64_t buckets, std::uint64_t max_buckets, const ReadOnlyRows& like)
      : dtype_(like.dtype()),
        dim_(like.shape(1)),
        table_(buckets, max_buckets, like.shape(1) * like.itemsize()) {}

  auto find(Keys keys, std::optional<Rows> rows, std::optional<Array<std::uint64_t>> scores) const {
    const std::size_t n = keys.shape(0);
    if (rows) check_rows(*rows, n);
    if (scores) check_size(*scores, n);
    std::unique_ptr<bool[]> found(new bool[n]);
    run(n, [&] {
      table_.find(keys.data(), n, rows ? static_cast<std::uint8_t*>(rows->data()) : nullptr,
                  scores ? scores->data() : nullptr, found.get());
    });
    return as_numpy(std::move(found), n);
  }

  auto find_rows(Keys keys) const {
    const std::size_t n = keys.shape(0);
    std::unique_ptr<std::int64_t[]> numbers(new std::int64_t[n]);
    run(n, [&] { table_.find_rows(keys.data(), n, numbers.get()); });
    return as_numpy(std::move(numbers), n);
  }

  nb::tuple write(unsigned operation, Keys keys, nb::object rows, std::optional<Flags> accumulate,
                  unsigned rule, std::uint64_t base, std::optional<Scores> scores,
                  bool with_evicted) {
    const std::size_t n = keys.shape(0), row_bytes = table_.row_bytes();
    if (operation > 3 || rule > 4) throw std::invalid_argument("unknown operation or score rule");
    const auto kind = static_cast<hps::ScoredWrite>(operation);
    const bool accumulates = kind == hps::ScoredWrite::kAccumulate;
    hps::ScoredBatch batch{kind,
                           keys.data(),
                           n,
                           rows_of(rows, n, kind == hps::ScoredWrite::kFindOrInsert),
                           accumulates && accumulate ? accumulate->data() : nullptr,
                           add_for(dtype_),
                           static_cast<hps::ScoreRule>(rule),
                           base,
                           scores ? scores->data() : nullptr};
    if (batch.rows == nullptr && kind != hps::ScoredWrite::kAssign)
      throw std::invalid_argument("only assignments need no rows");
    if (accumulates && (!accumulate || accumulate->shape(0) != n || batch.add == nullptr))
      throw std::invalid_argument("accumulate must have one entry per key, rows numbers");
    if (scores) check_size(*scores, n);

    std::unique_ptr<bool[]> found(new bool[n]);
    if (!with_evicted) {
      run(n, [&] { table_.write(batch, found.get(), nullptr); });
      return nb::make_tuple(as_numpy(std::move(found), n), nb::none());
    }
    Evicted to(n, row_bytes);
    run(n, [&] { table_.write(batch, found.get(), &to.rows); });
    return nb::make_tuple(as_numpy(std::move(found), n),
                          nb::make_tuple(as_numpy(std::move(to.keys), to.rows.n),
                                         as_rows(std::move(to.bytes), to.rows.n),
                                         as_numpy(std::move(to.scores), to.rows.n)));
  }

  auto erase(Keys keys, std::optional<Scores> scores) {
    const std::size_t n = keys.shape(0);
    if (scores) check_size(*scores, n);
    std::unique_ptr<bool[]> erased(new bool[n]);
    run(n, [&] { table_.erase(keys.data(), n, scores ? scores->data() : nullptr, erased.get()); });
    return as_numpy(std::move(erased), n);
  }

  nb::tuple export_slots(std::uint64_t first, std::uint64_t slots, bool with_rows) const {
    const std::uint64_t all = table_.buckets() * hps::kWays;
    const std::uint64_t n = first < all ? std::min(slots, all - first) : 0;
    Evicted to(n, with_rows ? table_.row_bytes() : 0);
    std::size_t count = 0;
    run(n, [&] {
      count = table_.export_slots(first, n, to.keys.get(), to.scores.get(),
                                  with_rows ? to.bytes.get() : nullptr);
    });
    nb::object rows = nb::none();
    if (with_rows) rows = as_rows(std::move(to.bytes), count);
    return nb::make_tuple(as_numpy(std::move(to.keys), count),
                          as_numpy(std::move(to.scores), count), rows);
  }

  nb::object rows() const {
    auto [memory, count] = table_.rows();
    void* data = memory->data();
    auto* held = new std::shared_ptr<hps::Memory>(std::move(memory));
    nb::capsule owner(
        held, [](void* p) noexcept { delete static_cast<std::shared_ptr<hps::Memory>*>(p); });
    const std::size_t shape[] = {count, dim_};
    return nb::cast(nb::ndarray<nb::numpy, nb::ndim<2>>(data, 2, shape, owner, nullptr, dtype_));
  }

  void clear() {
    const WithoutGil released;
    table_.clear();
  }
  void reserve(std::uint64_t buckets) {
    const WithoutGil released;
    table_.reserve(buckets);
  }
  void set_max_buckets(std::uint64_t max_buckets) {
    const WithoutGil released;
    table_.set_max_buckets(max_buckets);
  }
  std::uint64_t size() const { return table_.size(); }
  std::uint64_t buckets() const { return table_.buckets(); }
  std::uint64_t max_buckets() const { return table_.max_buckets(); }

 private:
  // Arrays with space for n rows; memory that is never written takes none.
  struct Evicted {
    Evicted(std::size_t n, std::size_t row_bytes)
        : keys(new std::int64_t[n]),
          scores(new std::uint64_t[n]),
          bytes(new std::uint8_t[n * row_bytes]),
          rows{keys.get(), scores.get(), bytes.get(), 0} {}

    std::unique_ptr<std::int64_t[]> keys;
    std::unique_ptr<std::uint64_t[]> scores;
    std::unique_ptr<std::uint8_t[]> bytes;
    hps::EvictedRows rows;
  };

  // A call may wait for a thread that is alone in the table; that must not hold up the interpreter.
  template <typename Work>
  void run(std::size_t n, Work work) const {
    const std::size_t as_keys = n * (1 + table_.row_bytes() / 512);
    without_gil(table_.is_closed() ? kReleaseGilFrom : as_keys, work);
  }

  template <typename Array>
  void check_rows(const Array& rows, std::size_t n) const {
    if (rows.dtype() != dtype_ || rows.shape(1) != dim_ || rows.shape(0) != n)
      throw std::invalid_argument("rows must have the table's dtype and dim, and one per key");
  }

  template <typename Array>
  static void check_size(const Array& array, std::size_t n) {
    if (array.shape(0) != n) throw std::invalid_argument("scores must have one entry per key");
  }

  std::uint8_t* rows_of(nb::object rows, std::size_t n, bool written) const {
    if (rows.is_none()) return nullptr;
    Rows mutable_rows;
    ReadOnlyRows const_rows;
    if (written && nb::try_cast(rows, mutable_rows, false)) {
      check_rows(mutable_rows, n);
      return static_cast<std::uint8_t*>(mutable_rows.data());
    }
    if (written || !nb::try_cast(rows, const_rows, false))
      throw std::invalid_argument("rows must be a C-contiguous array of two axes");
    check_rows(const_rows, n);
    return static_cast<std::uint8_t*>(const_cast<void*>(const_rows.data()));
  }

  nb::object as_rows(std::unique_ptr<std::uint8_t[]> data, std::size_t n) const {
    void* raw = data.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<std::uint8_t*>(p); });
    const std::size_t shape[] = {n, dim_};
    return nb::cast(nb::ndarray<nb::numpy, nb::ndim<2>>(raw, 2, shape, owner, nullptr, dtype_));
  }

  const nb::dlpack::dtype dtype_;
  const std::size_t dim_;
  hps::ScoredTable table_;
};

}  // namespace

void bind_scored(nb::module_& m) {
  nb::class_<ScoredTable>(m, "ScoredTable")
      .def(nb::init<std::uint64_t, std::uint64_t, const ReadOnlyRows&>(), nb::arg("buckets"),
           nb::arg("max_buckets"), nb::arg("like").noconvert())
      .def_static("bytes_for", &hps::ScoredTable::bytes_for, nb::arg("buckets"),
                  nb::arg("row_bytes"))
      .def("find", &ScoredTable::find, nb::arg("keys").noconvert(),
           nb::arg("rows").noconvert().none(), nb::arg("scores").noconvert().none())
      .def("find_rows", &ScoredTable::find_rows, nb::arg("keys").noconvert())
      .def("write", &ScoredTable::write, nb::arg("operation"), nb::arg("keys").noconvert(),
           nb::arg("rows").none(), nb::arg("accumulate").noconvert().none(), nb::arg("rule"),
           nb::arg("base"), nb::arg("scores").noconvert().none(), nb::arg("with_evicted"))
      .def("erase", &ScoredTable::erase, nb::arg("keys").noconvert(),
           nb::arg("scores").noconvert().none())
      .def("export", &ScoredTable::export_slots, nb::arg("first"), nb::arg("slots"),
           nb::arg("with_rows"))
      .def("clear", &ScoredTable::clear)
      .def("reserve", &ScoredTable::reserve, nb::arg("buckets"))
      .def("set_max_buckets", &ScoredTable::set_max_buckets, nb::arg("max_buckets"))
      .def_prop_ro("rows", &ScoredTable::rows)
      .def_prop_ro("size", &ScoredTable::size)
      .def_prop_ro("buckets", &ScoredTable::buckets)
      .def_prop_ro("max_buckets", &ScoredTable::max_buckets);
}
