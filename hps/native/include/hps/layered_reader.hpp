// A table whose rows are in a mapped file, except those that a cache has.
#pragma once

#include "hps/mapped_table.hpp"
#include "hps/row_reader.hpp"

namespace hps {

// Asks `mapped`, then `cache` for the keys that are absent there or overridden. `cache` may be
// null. Both must outlive this object. A damaged `mapped` is not asked.
class LayeredReader final : public RowReader {
 public:
  LayeredReader(const MappedTable& mapped, const RowReader* cache)
      : mapped_(mapped), cache_(cache) {}

  bool gather(const std::int64_t* keys, std::size_t n, std::uint8_t* out) const override;
  std::size_t gather_each(const std::int64_t* keys, const std::uint32_t* places, std::size_t n,
                          const EachOutput& output) const override;
  std::size_t pool(const PoolRequest& request, std::int64_t* left) const override;
  std::size_t row_bytes() const override { return mapped_.row_bytes(); }

 private:
  bool gather_from_cache(const std::int64_t* keys, const std::uint32_t* left, std::size_t n,
                         std::uint8_t* out) const;
  std::size_t pool_again(const PoolRequest& request, std::int64_t* left, std::size_t n) const;

  const MappedTable& mapped_;
  const RowReader* cache_;
};

}  // namespace hps
