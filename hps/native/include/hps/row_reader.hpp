// A table whose rows are read by key: in the CPU cache, or in a mapped file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hps/cache_read.hpp"

namespace hps {

// The reads of ReadKernels. Any number of threads may call them.
class RowReader {
 public:
  virtual ~RowReader() = default;
  virtual bool gather(const std::int64_t* keys, std::size_t n, std::uint8_t* out) const = 0;
  virtual std::size_t gather_each(const std::int64_t* keys, const std::uint32_t* places,
                                  std::size_t n, const EachOutput& output) const = 0;
  virtual std::size_t pool(const PoolRequest& request, std::int64_t* left) const = 0;
  virtual std::size_t row_bytes() const = 0;
};

}  // namespace hps
