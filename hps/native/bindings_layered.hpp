// The Python class LayeredTable: a mapped table, then a cache table.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "bindings_mapped.hpp"
#include "hps/layered_reader.hpp"

class LayeredTable final : public RowTable {
 public:
  LayeredTable(nb::object mapped, nb::object cache, std::uint8_t code)
      : RowTable(nb::cast<const MappedTable&>(mapped), code),
        mapped_object_(std::move(mapped)),
        cache_object_(std::move(cache)),
        mapped_(nb::cast<const MappedTable&>(mapped_object_)),
        cache_(cache_object_.is_none() ? nullptr : &nb::cast<const CacheTable&>(cache_object_)),
        reader_(mapped_.table(), cache_ == nullptr ? nullptr : &cache_->reader()) {
    check_mapped(cache_ == nullptr || cache_->has_same_rows(*this),
                 "the cache must have the mapped table's dim and dtype");
  }

  const hps::RowReader& reader() const override { return reader_; }
  std::uint64_t tombstones() const { return cache_ == nullptr ? 0 : cache_->tombstones(); }

  nb::object fetch(Keys keys, Keys missing, std::uint64_t oldest_tombstone, Rows out,
                   Array<std::uint64_t> versions, Array<std::uint8_t> source) const {
    const std::size_t m = missing.shape(0);
    std::unique_ptr<std::int64_t[]> left(new std::int64_t[m]), absent(new std::int64_t[m]);
    const hps::LeftKeys found =
        mapped_.fetch_rows(keys, missing, out, versions, source, code_, left.get(), absent.get());
    std::size_t n = found.n_overridden + found.n_absent;
    if (mapped_.is_damaged()) {
      n = m;
      for (std::size_t i = 0; i < m; ++i) {
        const std::int64_t at = left[i] = missing.data()[i];
        versions.data()[at] = source.data()[at] = 0;
      }
    } else if (n != 0) {
      std::copy_n(absent.get(), found.n_absent, left.get() + found.n_overridden);
      std::inplace_merge(left.get(), left.get() + found.n_overridden, left.get() + n);
    }
    if (n == 0) return nb::none();
    auto rest = as_numpy(std::move(left), n);
    if (cache_ == nullptr) return nb::cast(rest);
    return cache_->fetch(keys, nb::cast<Keys>(nb::cast(rest)), oldest_tombstone, out, versions,
                         source);
  }

 private:
  nb::object mapped_object_, cache_object_;
  const MappedTable& mapped_;
  const CacheTable* cache_;
  hps::LayeredReader reader_;
};
