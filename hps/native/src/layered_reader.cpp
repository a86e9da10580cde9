#include "hps/layered_reader.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace hps {
namespace {

constexpr std::size_t kPieceKeys = 4096;

// Vectors for some of a request's keys: positions, ascending, and the vectors one after the other.
struct Supply {
  std::vector<std::int64_t> positions;
  std::vector<float> vectors;

  void add(std::int64_t position, const float* vector, std::size_t dim) {
    positions.push_back(position);
    vectors.insert(vectors.end(), vector, vector + dim);
  }
};

// The vectors that the request supplies, and those of `left` that `vectors` has (`sources` is not
// 0).
Supply merged(const PoolRequest& request, const std::int64_t* left, std::size_t n,
              const float* vectors, const std::uint8_t* sources) {
  Supply supply;
  std::size_t own = 0;
  const std::size_t dim = request.dim;
  for (std::size_t i = 0; i <= n; ++i) {
    for (; own < request.n_supplied && (i == n || request.supplied[own] < left[i]); ++own)
      supply.add(request.supplied[own], request.vectors + own * dim, dim);
    if (i < n && sources[i] != 0) supply.add(left[i], vectors + i * dim, dim);
  }
  return supply;
}

}  // namespace

bool LayeredReader::gather(const std::int64_t* keys, std::size_t n, std::uint8_t* out) const {
  if (mapped_.is_damaged()) return cache_ != nullptr && cache_->gather(keys, n, out);
  if (cache_ == nullptr) return mapped_.gather(keys, n, out);
  std::uint32_t left[kPieceKeys];
  for (std::size_t at = 0; at < n; at += kPieceKeys) {
    const std::size_t m = std::min(kPieceKeys, n - at);
    std::uint8_t* to = out + at * row_bytes();
    const std::size_t unanswered = mapped_.gather_known(keys + at, m, to, left);
    if (unanswered != 0 && !gather_from_cache(keys + at, left, unanswered, to)) return false;
  }
  return true;
}

// Gathers keys[left[0..n)] to the rows left[i] of `out`.
__attribute__((noinline)) bool LayeredReader::gather_from_cache(const std::int64_t* keys,
                                                                const std::uint32_t* left,
                                                                std::size_t n,
                                                                std::uint8_t* out) const {
  std::int64_t wanted[kPieceKeys];
  std::uint8_t sources[kPieceKeys];
  for (std::size_t i = 0; i < n; ++i) wanted[i] = keys[left[i]];
  return cache_->gather_each(wanted, left, n, {out, row_bytes(), sources, 1, 0}) == 0;
}

std::size_t LayeredReader::gather_each(const std::int64_t* keys, const std::uint32_t* places,
                                       std::size_t n, const EachOutput& output) const {
  const std::size_t unanswered = mapped_.gather_each(keys, places, n, output);
  if (unanswered == 0 || cache_ == nullptr) return unanswered;
  std::int64_t wanted[kPieceKeys];
  std::uint32_t to[kPieceKeys];
  std::size_t left = 0, found = 0;
  const auto ask = [&] {
    found += left - cache_->gather_each(wanted, to, left, output);
    left = 0;
  };
  for (std::size_t i = 0; i < n; ++i) {
    if (output.sources[places[i]] != output.absent) continue;
    wanted[left] = keys[i];
    to[left++] = places[i];
    if (left == kPieceKeys) ask();
  }
  ask();
  return unanswered - found;
}

std::size_t LayeredReader::pool(const PoolRequest& request, std::int64_t* left) const {
  if (cache_ != nullptr && mapped_.is_damaged()) return cache_->pool(request, left);
  const std::size_t unanswered = mapped_.pool(request, left);
  if (unanswered == 0 || cache_ == nullptr) return unanswered;
  return pool_again(request, left, unanswered);
}

// Pools the bags of the keys left[0..n) again, with the rows that the cache has of these.
std::size_t LayeredReader::pool_again(const PoolRequest& request, std::int64_t* left,
                                      std::size_t n) const {
  const std::size_t bytes = row_bytes();
  std::vector<std::int64_t> wanted(n);
  std::vector<std::uint32_t> places(n);
  std::vector<std::uint8_t> rows(n * bytes), sources(n);
  for (std::size_t i = 0; i < n; ++i) {
    wanted[i] = request.keys[left[i]];
    places[i] = static_cast<std::uint32_t>(i);
  }
  if (cache_->gather_each(wanted.data(), places.data(), n,
                          {rows.data(), bytes, sources.data(), 1, 0}) == n)
    return n;
  std::vector<float> vectors(n * request.dim);
  runnable_kernels().front()->decode_rows({request.format, request.dim, rows.data(), nullptr, n,
                                           false, reinterpret_cast<std::uint8_t*>(vectors.data())});
  const Supply supply = merged(request, left, n, vectors.data(), sources.data());
  std::vector<std::int64_t> again;
  std::size_t bag = request.first, at = 0;
  for (std::size_t i = 0; i < n;) {
    while (request.begin_of(bag + 1) <= left[i]) ++bag;
    const std::int64_t begin = request.begin_of(bag), end = request.begin_of(bag + 1);
    while (i < n && left[i] < end) ++i;
    while (at < supply.positions.size() && supply.positions[at] < begin) ++at;
    PoolRequest part = request;
    part.first = bag;
    part.last = bag + 1;
    part.supplied = supply.positions.data() + at;
    part.vectors = supply.vectors.data() + at * request.dim;
    part.n_supplied = 0;
    for (; at < supply.positions.size() && supply.positions[at] < end; ++at) ++part.n_supplied;
    const std::size_t known = again.size();
    again.resize(known + static_cast<std::size_t>(end - begin));
    again.resize(known + mapped_.pool(part, again.data() + known));
  }
  std::copy(again.begin(), again.end(), left);
  return again.size();
}

}  // namespace hps
