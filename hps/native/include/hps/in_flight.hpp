// Which keys are being read at the moment, and by which fetch: single flight's table. NumPy twin:
// hps/native/twin_in_flight.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace hps {

// What a fetch lacks of one table: keys[missing[0..n)], each key once.
struct FlightAsk {
  std::uint64_t table;
  const std::int64_t* keys;
  const std::int64_t* missing;  // each at least 0 and below 2^32
  std::size_t n;
};

// What is left to another fetch: mine[i] is a position in the keys of ask number `ask`; its row
// will be the places[i]-th of those that `flight` keeps of its own ask number `of`.
struct FlightShare {
  std::uint64_t flight;
  std::size_t ask, of;
  std::vector<std::int64_t> mine, places;
};

struct FlightClaim {
  std::vector<std::vector<std::int64_t>> own;  // per ask, the positions that are left to read
  std::vector<FlightShare> shares;
};

class InFlight {
 public:
  InFlight();

  // Begins fetch `number`, and leaves to earlier ones what they are reading, or have read and hold
  // at the time `now`. Each of those must be left in the end (`leave`). Throws
  // std::invalid_argument when the number is taken.
  FlightClaim claim(std::uint64_t number, const std::vector<FlightAsk>& asks, double now);

  // The fetch has ended. Per ask, the positions that others wait for, in the order of their places;
  // until the time `until` further ones may join them, as long as anybody copies. Nothing at all
  // when nobody waits: then it is forgotten.
  std::vector<std::vector<std::int64_t>> land(std::uint64_t number, double until);

  // One who left keys to the fetch does not need its answer any more. True for the last one after
  // its end: then it is forgotten.
  bool leave(std::uint64_t number);

  // How many keys can be found at the moment.
  std::size_t size() const { return used_; }

  // To be held over each call. It is the caller's, who may have to let go of something else first.
  std::mutex lock;

 private:
  struct Name {
    std::int64_t key;
    std::uint64_t table;
  };
  struct Flight {
    std::uint64_t number, claims_before;
    std::vector<Name> own;  // what may be found of it
    std::vector<std::vector<std::int64_t>> wanted;
    std::size_t reading = 0, followers = 0;
    bool landed = false;
    double until = 0;
    // Of the claim that is being made: keys in common, and whether they are left to this one.
    std::size_t common = 0;
    bool followed = false;
  };
  // A key and who reads it: at which position of its ask, to be kept at which place.
  struct Slot {
    std::int64_t key;
    std::uint64_t table;
    Flight* flight;  // null: an empty slot
    std::uint32_t ask, position, place;
  };

  std::size_t home(std::int64_t key, std::uint64_t table) const;
  // From `slot` on, where the key is or would be put.
  std::size_t find(std::size_t slot, std::int64_t key, std::uint64_t table) const;
  std::size_t find(const Name& name) const;
  void resize(std::size_t slots);
  void remove(std::size_t slot);
  void forget(std::uint64_t number);

  std::vector<Slot> slots_;  // linear probing, at most half full
  std::size_t used_ = 0;
  std::uint64_t claims_ = 0;
  std::unordered_map<std::uint64_t, Flight> flights_;
};

}  // namespace hps
