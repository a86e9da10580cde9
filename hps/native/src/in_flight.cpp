#include "hps/in_flight.hpp"

#include <algorithm>
#include <stdexcept>

#include "hps/partition_hash.hpp"

namespace hps {

namespace {

// Following another fetch costs about as much as reading thirty keys from RocksDB. Of the fetches
// that share fewer keys with it than this, and less than an eighth of its misses, a fetch follows
// at most one: the oldest, which reads a key that all of them miss first, and ends first.
constexpr std::size_t kFewKeys = 32, kFewShare = 8;
// A fetch follows no read of more keys than both this number and this multiple of its misses: a
// lookup of few keys would wait for the whole of a large one.
constexpr std::size_t kAlwaysFollowed = 1000, kFollowedRatio = 8;
// A table of more slots than kShrinkFrom (10 MiB) shrinks when most of them are empty.
constexpr std::size_t kMinSlots = std::size_t{1} << 10, kShrinkFrom = std::size_t{1} << 18;
constexpr std::uint32_t kNoPlace = UINT32_MAX;

FlightShare& share_of(std::vector<FlightShare>& shares, std::uint64_t flight, std::size_t request,
                      std::size_t source_request) {
  // The newest first: shared keys are mostly adjacent.
  for (auto each = shares.rbegin(); each != shares.rend() && each->request == request; ++each)
    if (each->flight == flight && each->source_request == source_request) return *each;
  shares.push_back({flight, request, source_request, {}, {}});
  return shares.back();
}

}  // namespace

InFlight::InFlight() { resize(kMinSlots); }

FlightClaim InFlight::claim(std::uint64_t number, const std::vector<FlightRequest>& requests,
                            double now) {
  std::size_t size = 0;
  for (const FlightRequest& request : requests) size += request.n;
  const auto [entry, fresh] = flights_.try_emplace(number);
  if (!fresh) throw std::invalid_argument("this fetch number is in use");
  Flight& flight = entry->second;
  flight.number = number;
  flight.claims_before = claims_++;
  flight.own.reserve(size);
  flight.wanted.resize(requests.size());
  std::size_t slots = slots_.size();
  while (slots < 2 * (used_ + size)) slots *= 2;
  if (slots != slots_.size()) resize(slots);

  const std::size_t most_keys = std::max(kAlwaysFollowed, kFollowedRatio * size);
  const auto may_follow = [&](const Flight& other) {
    return other.landed ? now < other.until : other.reading <= most_keys;
  };
  std::vector<Flight*> candidates;
  std::vector<std::size_t> at;
  at.reserve(size);
  for (const FlightRequest& request : requests)
    for (std::size_t i = 0; i < request.n; ++i) {
      const std::int64_t key = request.keys[request.missing[i]];
      at.push_back(find(home(key, request.table), key, request.table));
      Flight* other = slots_[at.back()].flight;
      if (other != nullptr && may_follow(*other) && other->common++ == 0)
        candidates.push_back(other);
    }

  std::sort(candidates.begin(), candidates.end(), [](const Flight* one, const Flight* another) {
    return one->claims_before < another->claims_before;
  });
  const std::size_t few = std::min(kFewKeys, size / kFewShare);
  bool follows_one_of_few = false;
  for (Flight* other : candidates) {
    other->followed = other->common >= few || !follows_one_of_few;
    follows_one_of_few |= other->common < few;
    other->followers += other->followed ? 1 : 0;
  }

  FlightClaim claim;
  claim.own.resize(requests.size());
  const std::size_t* from = at.data();
  for (std::size_t a = 0; a < requests.size(); ++a) {
    const FlightRequest& request = requests[a];
    for (std::size_t i = 0; i < request.n; ++i) {
      const std::int64_t position = request.missing[i], key = request.keys[position];
      Slot& slot = slots_[find(*from++, key, request.table)];
      Flight* other = slot.flight;
      if (other != nullptr && other->followed) {
        std::vector<std::int64_t>& wanted = other->wanted[slot.request];
        if (slot.place == kNoPlace) {
          slot.place = static_cast<std::uint32_t>(wanted.size());
          wanted.push_back(slot.position);
        }
        FlightShare& share = share_of(claim.shares, other->number, a, slot.request);
        share.positions.push_back(position);
        share.places.push_back(slot.place);
        continue;
      }
      claim.own[a].push_back(position);
      ++flight.reading;
      if (other != nullptr && (other == &flight || may_follow(*other))) continue;
      used_ += other == nullptr ? 1 : 0;
      slot = {key,
              request.table,
              &flight,
              static_cast<std::uint32_t>(a),
              static_cast<std::uint32_t>(position),
              kNoPlace};
      flight.own.push_back({key, request.table});
    }
  }
  for (Flight* other : candidates) {
    other->common = 0;
    other->followed = false;
  }
  return claim;
}

std::vector<std::vector<std::int64_t>> InFlight::land(std::uint64_t number, double until) {
  const auto entry = flights_.find(number);
  if (entry == flights_.end()) throw std::invalid_argument("no such fetch is in flight");
  Flight& flight = entry->second;
  if (flight.followers == 0) {
    erase(number);
    return {};
  }
  flight.landed = true;
  flight.until = until;
  std::vector<TableKey> kept;
  for (const TableKey& name : flight.own) {
    const std::size_t slot = find(name);
    if (slots_[slot].flight != &flight) continue;
    if (slots_[slot].place == kNoPlace)
      remove(slot);
    else
      kept.push_back(name);
  }
  flight.own = std::move(kept);
  return flight.wanted;
}

bool InFlight::leave(std::uint64_t number) {
  const auto entry = flights_.find(number);
  if (entry == flights_.end() || entry->second.followers == 0)
    throw std::invalid_argument("no fetch follows this number");
  if (--entry->second.followers != 0 || !entry->second.landed) return false;
  erase(number);
  return true;
}

std::size_t InFlight::home(std::int64_t key, std::uint64_t table) const {
  const std::uint64_t apart = table * 0x9E3779B97F4A7C15ULL;
  return partition_hash(static_cast<std::uint64_t>(key) ^ apart) & (slots_.size() - 1);
}

std::size_t InFlight::find(std::size_t slot, std::int64_t key, std::uint64_t table) const {
  while (slots_[slot].flight != nullptr && (slots_[slot].key != key || slots_[slot].table != table))
    slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

std::size_t InFlight::find(const TableKey& name) const {
  return find(home(name.key, name.table), name.key, name.table);
}

void InFlight::resize(std::size_t slots) {
  std::vector<Slot> before(slots, Slot{});
  slots_.swap(before);
  for (const Slot& slot : before)
    if (slot.flight != nullptr) slots_[find({slot.key, slot.table})] = slot;
}

// Moves later entries of the probe sequence up, so that no search ends at the gap.
void InFlight::remove(std::size_t slot) {
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t next = (slot + 1) & mask; slots_[next].flight != nullptr;
       next = (next + 1) & mask) {
    const std::size_t begin = home(slots_[next].key, slots_[next].table);
    if (((next - begin) & mask) < ((next - slot) & mask)) continue;
    slots_[slot] = slots_[next];
    slot = next;
  }
  slots_[slot].flight = nullptr;
  --used_;
}

void InFlight::erase(std::uint64_t number) {
  const Flight& flight = flights_.at(number);
  for (const TableKey& name : flight.own) {
    const std::size_t slot = find(name);
    if (slots_[slot].flight == &flight) remove(slot);
  }
  flights_.erase(number);
  if (slots_.size() > kShrinkFrom && 8 * used_ < slots_.size()) {
    std::size_t slots = kShrinkFrom;
    while (slots < 4 * used_) slots *= 2;
    if (slots < slots_.size()) resize(slots);
  }
}

}  // namespace hps
