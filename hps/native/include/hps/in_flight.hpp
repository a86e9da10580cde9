// The table of single flight: the keys that fetches are reading, and which fetch reads each. NumPy
// twin: hps/native/twin_in_flight.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace hps {

// The misses of a fetch in one table: keys[missing[0..n)], each key once.
struct FlightRequest {
  std::uint64_t table;
  const std::int64_t* keys;
  const std::int64_t* missing;  // each at least 0 and below 2^32
  std::size_t n;
};

// Keys that another fetch, `flight`, reads: positions[i] is a position in the keys of request
// number `request`; its row will be at places[i] among the rows that `flight` keeps of its request
// number `source_request`.
struct FlightShare {
  std::uint64_t flight;
  std::size_t request, source_request;
  std::vector<std::int64_t> positions, places;
};

struct FlightClaim {
  std::vector<std::vector<std::int64_t>> own;  // per request, the positions that it must read
  std::vector<FlightShare> shares;
};

// Thread-safe if the caller holds `lock` during each call. Times are seconds of one clock.
class InFlight {
 public:
  InFlight();

  // Begins fetch `number`. It leaves to earlier fetches the keys that they are reading, or have
  // read and still hold at the time `now`; it must `leave` each of those fetches in the end. Throws
  // std::invalid_argument if the number is in use.
  FlightClaim claim(std::uint64_t number, const std::vector<FlightRequest>& requests, double now);

  // Ends the fetch's read. Returns, per request, the positions that other fetches wait for, in the
  // order of their places; until the time `until` further fetches may follow, as long as one is
  // copying. Returns an empty vector if no fetch follows: then the entry is erased.
  std::vector<std::vector<std::int64_t>> land(std::uint64_t number, double until);

  // Releases a fetch that the caller followed. True for the last follower after its end: then the
  // entry is erased.
  bool leave(std::uint64_t number);

  // The number of keys that can be found now.
  std::size_t size() const { return used_; }

  // Must be held during each call. Public, because the caller may have to release the GIL first.
  std::mutex lock;

 private:
  struct TableKey {
    std::int64_t key;
    std::uint64_t table;
  };
  struct Flight {
    std::uint64_t number, claims_before;
    std::vector<TableKey> own;  // the keys with a slot that points here
    std::vector<std::vector<std::int64_t>> wanted;
    std::size_t reading = 0, followers = 0;
    bool landed = false;
    double until = 0;
    // Scratch of the current claim: keys in common, and whether the claimer follows this fetch.
    std::size_t common = 0;
    bool followed = false;
  };
  // A key, the fetch that reads it, its position in that request, its place in the kept rows.
  struct Slot {
    std::int64_t key;
    std::uint64_t table;
    Flight* flight;  // null: an empty slot
    std::uint32_t request, position, place;
  };

  std::size_t home(std::int64_t key, std::uint64_t table) const;
  // The slot of the key, or the empty one where it belongs; the search starts at `slot`.
  std::size_t find(std::size_t slot, std::int64_t key, std::uint64_t table) const;
  std::size_t find(const TableKey& name) const;
  void resize(std::size_t slots);
  void remove(std::size_t slot);
  void erase(std::uint64_t number);

  std::vector<Slot> slots_;  // linear probing, at most half full
  std::size_t used_ = 0;
  std::uint64_t claims_ = 0;
  std::unordered_map<std::uint64_t, Flight> flights_;
};

}  // namespace hps
