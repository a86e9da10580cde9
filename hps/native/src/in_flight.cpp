#include "hps/in_flight.hpp"

#include <algorithm>
#include <stdexcept>

#include "hps/partition_hash.hpp"

namespace hps {

namespace {

// To leave keys to another fetch costs as much as to read some thirty of them from RocksDB. Fewer,
// unless they are an eighth of what it lacks, a fetch leaves to one other at most: the oldest, the
// first to read a key that all lack and the first to end.
constexpr std::size_t kFew = 32, kFewOfSize = 8;
// Nobody waits for a read of more keys than this and so many times its own: a lookup of few keys
// would wait for the whole of a large one.
constexpr std::size_t kEnough = 1000, kLarger = 8;
// More slots than these (10 MiB) are given back when most of them are empty.
constexpr std::size_t kFewestSlots = std::size_t{1} << 10, kSlotsKept = std::size_t{1} << 18;
constexpr std::uint32_t kNoPlace = UINT32_MAX;

FlightShare& share_of(std::vector<FlightShare>& shares, std::uint64_t flight, std::size_t ask,
                      std::size_t of) {
  // The newest first: keys in common mostly follow one another.
  for (auto each = shares.rbegin(); each != shares.rend() && each->ask == ask; ++each)
    if (each->flight == flight && each->of == of) return *each;
  shares.push_back({flight, ask, of, {}, {}});
  return shares.back();
}

}  // namespace

InFlight::InFlight() { resize(kFewestSlots); }

FlightClaim InFlight::claim(std::uint64_t number, const std::vector<FlightAsk>& asks, double now) {
  std::size_t size = 0;
  for (const FlightAsk& ask : asks) size += ask.n;
  const auto [entry, fresh] = flights_.try_emplace(number);
  if (!fresh) throw std::invalid_argument("the number of this fetch is taken");
  Flight& flight = entry->second;
  flight.number = number;
  flight.claims_before = claims_++;
  flight.own.reserve(size);
  flight.wanted.resize(asks.size());
  std::size_t slots = slots_.size();
  while (slots < 2 * (used_ + size)) slots *= 2;
  if (slots != slots_.size()) resize(slots);

  const std::size_t longest = std::max(kEnough, kLarger * size);
  const auto may_follow = [&](const Flight& other) {
    return other.landed ? now < other.until : other.reading <= longest;
  };
  std::vector<Flight*> met;
  std::vector<std::size_t> at;
  at.reserve(size);
  for (const FlightAsk& ask : asks)
    for (std::size_t i = 0; i < ask.n; ++i) {
      const std::int64_t key = ask.keys[ask.missing[i]];
      at.push_back(find(home(key, ask.table), key, ask.table));
      Flight* other = slots_[at.back()].flight;
      if (other != nullptr && may_follow(*other) && other->common++ == 0) met.push_back(other);
    }

  std::sort(met.begin(), met.end(), [](const Flight* one, const Flight* another) {
    return one->claims_before < another->claims_before;
  });
  const std::size_t few = std::min(kFew, size / kFewOfSize);
  bool follows_one_of_few = false;
  for (Flight* other : met) {
    other->followed = other->common >= few || !follows_one_of_few;
    follows_one_of_few |= other->common < few;
    other->followers += other->followed ? 1 : 0;
  }

  FlightClaim claim;
  claim.own.resize(asks.size());
  const std::size_t* from = at.data();
  for (std::size_t a = 0; a < asks.size(); ++a) {
    const FlightAsk& ask = asks[a];
    for (std::size_t i = 0; i < ask.n; ++i) {
      const std::int64_t position = ask.missing[i], key = ask.keys[position];
      Slot& slot = slots_[find(*from++, key, ask.table)];
      Flight* other = slot.flight;
      if (other != nullptr && other->followed) {
        std::vector<std::int64_t>& wanted = other->wanted[slot.ask];
        if (slot.place == kNoPlace) {
          slot.place = static_cast<std::uint32_t>(wanted.size());
          wanted.push_back(slot.position);
        }
        FlightShare& share = share_of(claim.shares, other->number, a, slot.ask);
        share.mine.push_back(position);
        share.places.push_back(slot.place);
        continue;
      }
      claim.own[a].push_back(position);
      ++flight.reading;
      if (other != nullptr && (other == &flight || may_follow(*other))) continue;
      used_ += other == nullptr ? 1 : 0;
      slot = {key,
              ask.table,
              &flight,
              static_cast<std::uint32_t>(a),
              static_cast<std::uint32_t>(position),
              kNoPlace};
      flight.own.push_back({key, ask.table});
    }
  }
  for (Flight* other : met) {
    other->common = 0;
    other->followed = false;
  }
  return claim;
}

std::vector<std::vector<std::int64_t>> InFlight::land(std::uint64_t number, double until) {
  const auto entry = flights_.find(number);
  if (entry == flights_.end()) throw std::invalid_argument("no such fetch is under way");
  Flight& flight = entry->second;
  if (flight.followers == 0) {
    forget(number);
    return {};
  }
  flight.landed = true;
  flight.until = until;
  std::vector<Name> kept;
  for (const Name& name : flight.own) {
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
    throw std::invalid_argument("nobody follows such a fetch");
  if (--entry->second.followers != 0 || !entry->second.landed) return false;
  forget(number);
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

std::size_t InFlight::find(const Name& name) const {
  return find(home(name.key, name.table), name.key, name.table);
}

void InFlight::resize(std::size_t slots) {
  std::vector<Slot> before(slots, Slot{});
  slots_.swap(before);
  for (const Slot& slot : before)
    if (slot.flight != nullptr) slots_[find({slot.key, slot.table})] = slot;
}

// Those behind it are moved up, so that no search ends at the gap.
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

void InFlight::forget(std::uint64_t number) {
  const Flight& flight = flights_.at(number);
  for (const Name& name : flight.own) {
    const std::size_t slot = find(name);
    if (slots_[slot].flight == &flight) remove(slot);
  }
  flights_.erase(number);
  if (slots_.size() > kSlotsKept && 8 * used_ < slots_.size()) {
    std::size_t slots = kSlotsKept;
    while (slots < 4 * used_) slots *= 2;
    if (slots < slots_.size()) resize(slots);
  }
}

}  // namespace hps
