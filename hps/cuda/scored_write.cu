// The writes of a table with scores: insert, assign, accumulate or erase.
//
// A batch takes two launches: scored_link_kernel makes a list of the batch's positions for each
// bucket, and a thread of scored_write_kernel applies the positions of one bucket in their order.
// No two threads have the same bucket, so there are no locks. After each step the threads of a warp
// copy the rows of all 32 together. Where some rows are in host memory, a row that is written
// changes places with the lowest score on the device if its own is higher.
#include "scored_table.cuh"

constexpr int SHORT = 16;  // positions of a bucket that fit in shared memory

__global__ void __launch_bounds__(BLOCK) scored_link_kernel(const __grid_constant__ ScoredArgs a) {
  __shared__ u32 count, first;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  const u32 i = blockIdx.x * BLOCK + threadIdx.x;
  u32 bucket = 0, place = ~0u;
  if (i < a.n) {
    bucket = (u32)home_of(a, a.wanted[i]).bucket;
    const u32 former = atomicExch(a.heads + bucket, i + 1);
    a.next[i] = former;
    if (!former) place = atomicAdd(&count, 1u);
  }
  __syncthreads();
  if (threadIdx.x == 0) first = atomicAdd(a.counters + TOUCHED, count);
  __syncthreads();
  if (place != ~0u) a.touched[first + place] = bucket;
}

// -- rows

// Of a thread and step: copies `row` to `out`, and `from`, which may be `out`, to `to`; null: not
// that. `adds`: adds `from` to `to` instead.
struct Move {
  char* out;
  const char* row;
  char* to;
  const char* from;
  bool adds;

  // Returns whether there is something to do.
  __device__ __forceinline__ bool set(char* new_out, const char* new_row, char* new_to,
                                      const char* new_from, bool new_adds = false) {
    out = new_out, row = new_row, to = new_to, from = new_from, adds = new_adds;
    return new_out || new_to;
  }
};

// By T threads, with two units of each on their way.
template <int UNIT, int T>
__device__ __forceinline__ void copy_rows(const Move& m, u32 row_bytes) {
  typedef typename Unit<UNIT>::type unit;
  const u32 units = row_bytes / UNIT;
  for (u32 c = threadIdx.x % T; c < units; c += 2 * T) {
    unit former[2], moved[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if (m.out && c + k * T < units) former[k] = __ldcg((const unit*)m.row + c + k * T);
      if (m.to && c + k * T < units) moved[k] = __ldcg((const unit*)m.from + c + k * T);
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if (m.out && c + k * T < units) ((unit*)m.out)[c + k * T] = former[k];
      if (m.to && c + k * T < units) ((unit*)m.to)[c + k * T] = moved[k];
    }
  }
}

template <typename T>
__device__ __forceinline__ T sum(T a, T b) {
  return a + b;
}

struct Half {
  unsigned short bits;
};

__device__ __forceinline__ Half sum(Half a, Half b) {
  return {narrow(__fadd_rn(widen(a.bits), widen(b.bits)))};
}

// By T threads, 16 bytes at a time where the rows allow it.
template <int UNIT, int T, typename N>
__device__ __forceinline__ void add_rows(const Move& m, u32 row_bytes) {
  constexpr int BYTES = UNIT < (int)sizeof(N) ? (int)sizeof(N) : UNIT;
  struct alignas(BYTES) Wide {
    N number[BYTES / sizeof(N)];
  };
  const u32 units = row_bytes / BYTES;
  for (u32 c = threadIdx.x % T; c < units; c += 2 * T) {
    Wide mine[2], other[2];
#pragma unroll
    for (int k = 0; k < 2; k++)
      if (c + k * T < units)
        mine[k] = ((const Wide*)m.to)[c + k * T], other[k] = ((const Wide*)m.from)[c + k * T];
#pragma unroll
    for (int k = 0; k < 2; k++)
      if (c + k * T < units) {
#pragma unroll
        for (int i = 0; i < (int)(BYTES / sizeof(N)); i++)
          mine[k].number[i] = sum(mine[k].number[i], other[k].number[i]);
        ((Wide*)m.to)[c + k * T] = mine[k];
      }
  }
}

// The numbers of a type as in device_table.TYPES. Unsigned integers wrap like signed ones.
template <int TYPE>
struct Number;
template <>
struct Number<0> {
  typedef float type;
};
template <>
struct Number<1> {
  typedef double type;
};
template <>
struct Number<2> {
  typedef Half type;
};
template <>
struct Number<3> {
  typedef u8 type;
};
template <>
struct Number<4> {
  typedef unsigned short type;
};
template <>
struct Number<5> {
  typedef u32 type;
};
template <>
struct Number<6> {
  typedef u64 type;
};
constexpr int NO_TYPE = 7, ERASES = 8;  // operations that do not accumulate

// Does the moves of a warp's threads that have one, T threads each. `order`: memory for 32.
template <int UNIT, int T, int TYPE>
__device__ __forceinline__ void move_rows(bool mine, const Move* moves, u8* order, u32 row_bytes) {
  const u32 lane = threadIdx.x & 31, work = __ballot_sync(ALL, mine);
  if (mine) order[__popc(work & (1u << lane) - 1)] = lane;
  __syncwarp();
  for (u32 i = lane / T; i < __popc(work); i += 32 / T) {
    const Move m = moves[order[i]];
    if constexpr (TYPE < NO_TYPE) {
      if (m.adds) {
        add_rows<UNIT, T, typename Number<TYPE>::type>(m, row_bytes);
        continue;
      }
    }
    copy_rows<UNIT, T>(m, row_bytes);
  }
  __syncwarp();
}

// -- a bucket

struct Bucket {
  u32 number;
  bool full;
  int added;    // occupied slots
  u32 evicted;  // rows

  __device__ __forceinline__ u64 first() const { return (u64)number * SLOTS; }
};

// A bit for each slot of the halves.
struct Slots {
  u64 low, high;

  __device__ __forceinline__ int first(bool high_first) const {
    const bool from_high = high ? high_first || !low : false;
    return from_high ? 63 + __ffsll(high) : __ffsll(low) - 1;
  }
};

// The slots whose digest is `digest`.
__device__ __forceinline__ Slots slots_with(const ScoredArgs& a, const Bucket& b, u32 digest) {
  const uint4* const digests = (const uint4*)(a.digests + b.first());
  Slots slots = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint4 loaded = digests[i];
    const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    (i < 4 ? slots.low : slots.high) |= (u64)equal_bytes(words, digest) << 16 * (i & 3);
  }
  return slots;
}

// The slot of a key, or -1.
__device__ __forceinline__ int search(const ScoredArgs& a, const Bucket& b, const Home& home,
                                      u64 key) {
  Slots same = slots_with(a, b, home.digest);
  while (same.low | same.high) {
    const int slot = same.first(home.half);
    if (a.keys[b.first() + slot] == key) return slot;
    if (slot < SLOTS / 2)
      same.low &= same.low - 1;
    else
      same.high &= same.high - 1;
  }
  return -1;
}

// The first empty slot of the home half, else of the other; -1 if there is none.
__device__ __forceinline__ int empty_slot(const ScoredArgs& a, const Bucket& b, u32 half) {
  return slots_with(a, b, 0).first(half);
}

__device__ __forceinline__ u64& floor_of(const ScoredArgs& a, const Bucket& b, u32 slot) {
  return a.floors[(u64)b.number * PARTS + slot / PART];
}

// A slot, its score, and the lowest other one of its part.
struct Lowest {
  u32 slot;
  u64 score, next;
};

// The slot with the lowest score, the first of equal ones, in the first `parts` parts, which are
// full. Parts whose floor turns out to be too low get the right one.
__device__ __forceinline__ Lowest lowest_slot(const ScoredArgs& a, const Bucket& b, u32 parts) {
  for (;;) {
    u64 floor = MOST;
    u32 part = 0;
    for (u32 i = 0; i < parts; i += 2) {
      const ulonglong2 floors = *(const ulonglong2*)&floor_of(a, b, i * PART);
      if (floors.x < floor) floor = floors.x, part = i;
      if (i + 1 < parts && floors.y < floor) floor = floors.y, part = i + 1;
    }
    Lowest found = {part * PART, MOST, MOST};
    const ulonglong2* const scores = (const ulonglong2*)(a.scores + b.first() + part * PART);
#pragma unroll
    for (u32 i = 0; i < PART / 2; i++) {
      const ulonglong2 two = scores[i];
#pragma unroll
      for (u32 k = 0; k < 2; k++) {
        const u64 score = k ? two.y : two.x;
        if (score < found.score)
          found.next = found.score, found.score = score, found.slot = part * PART + 2 * i + k;
        else if (score < found.next)
          found.next = score;
      }
    }
    if (found.score == floor) return found;
    floor_of(a, b, found.slot) = found.score;
  }
}

__device__ __forceinline__ void put(const ScoredArgs& a, const Bucket& b, u32 slot, u64 key,
                                    u64 score, u32 digest) {
  const u64 number = b.first() + slot;
  a.keys[number] = key, a.scores[number] = score, a.digests[number] = (u8)digest;
}

// -- writing

__device__ __forceinline__ u64 first_score(const ScoredArgs& a, u64 given) {
  if (a.rule == EPOCH_ADD) return a.base_score | (given & LOW);
  return a.rule == ADD || a.rule == GIVEN ? given : a.base_score;
}

__device__ __forceinline__ u64 next_score(const ScoredArgs& a, u64 given, u64 former) {
  if (a.rule == ADD) return former + given < former ? MOST : former + given;
  if (a.rule == EPOCH_ADD) return a.base_score | min((former & LOW) + (given & LOW), LOW);
  return first_score(a, given);
}

// Moves a resident row from a slot in host memory to the device if its score will be high enough
// there. Returns its slot; the caller sets the score.
__device__ __forceinline__ u32 move_up(const ScoredArgs& a, const Bucket& b, const Home& home,
                                       u64 key, u32 slot, u64 score, Move& move, bool& moves) {
  int to = empty_slot(a, b, 0);
  char* const row = row_of<true>(a, b.first() + slot);
  if (to >= 0 && to < (int)a.device_slots) {
    moves = move.set(nullptr, nullptr, row_of<true>(a, b.first() + to), row);
    a.digests[b.first() + slot] = 0, floor_of(a, b, slot) = 0;
  } else {
    const Lowest lowest = lowest_slot(a, b, a.device_slots / PART);
    if (lowest.score >= score) return slot;
    to = lowest.slot;
    const u64 number = b.first() + to;
    char* const up = row_of<true>(a, number);
    moves = move.set(row, up, up, row);
    put(a, b, slot, a.keys[number], lowest.score, a.digests[number]);
    floor_of(a, b, slot) = min(floor_of(a, b, slot), lowest.score);
    floor_of(a, b, to) = min(lowest.next, score);
  }
  put(a, b, to, key, score, home.digest);
  return to;
}

// Inserts a key that the bucket does not have, if its score is high enough. `before`: a move before
// the other, with its flag. Returns whether there is a move.
template <bool HOST>
__device__ __forceinline__ bool insert(const ScoredArgs& a, Bucket& b, const Home& home, u64 key,
                                       u32 at, char* own, u64 score, Move& move, Move& before,
                                       bool& first) {
  const int empty = b.full ? -1 : empty_slot(a, b, home.half);
  b.full = empty < 0;
  if (empty >= 0) {
    b.added++;
    put(a, b, empty, key, score, home.digest);
    return move.set(nullptr, nullptr, row_of<HOST>(a, b.first() + empty), own);
  }
  Lowest lowest = lowest_slot(a, b, PARTS);
  const bool refused = score < lowest.score && a.rule != ADD;
  char* out = nullptr;  // where the row of the lowest slot goes
  if (a.evicted) {
    b.evicted++;
    out = a.evicted_rows + (size_t)at * a.row_bytes;
    a.evicted[at] = 1;
    a.evicted_keys[at] = refused ? key : a.keys[b.first() + lowest.slot];
    a.evicted_scores[at] = refused ? score : lowest.score;
  }
  if (refused) return move.set(nullptr, nullptr, out, own);
  if (HOST && a.device_slots && lowest.slot >= a.device_slots) {
    const Lowest from = lowest_slot(a, b, a.device_slots / PART);
    if (from.score < score) {
      const u64 number = b.first() + from.slot;
      char* const down = row_of<true>(a, b.first() + lowest.slot);
      first = before.set(nullptr, nullptr, out, down);
      out = down;
      put(a, b, lowest.slot, a.keys[number], from.score, a.digests[number]);
      floor_of(a, b, lowest.slot) = min(lowest.next, from.score);
      lowest = from;
    }
  }
  floor_of(a, b, lowest.slot) = min(lowest.next, score);
  put(a, b, lowest.slot, key, score, home.digest);
  char* const row = row_of<HOST>(a, b.first() + lowest.slot);
  return move.set(out, row, row, own);
}

__device__ __forceinline__ void erase(const ScoredArgs& a, Bucket& b, int slot, u32 at) {
  const u64 number = b.first() + slot;
  const bool erased = slot >= 0 && (!a.batch_scores || a.scores[number] == a.batch_scores[at]);
  a.found[at] = erased;
  if (!erased) return;
  a.digests[number] = 0, floor_of(a, b, slot) = 0;
  b.added--;
}

// Applies the operation to a position of the batch. Returns whether a row is left to be moved;
// `first`: whether `before` comes before that.
template <int TYPE, bool HOST>
__device__ __forceinline__ bool apply(const ScoredArgs& a, Bucket& b, u32 at, Move& move,
                                      Move& before, bool& first) {
  char* const own = a.batch_rows + (size_t)at * a.row_bytes;
  const u64 key = a.wanted[at];
  const Home home = home_of(a, key);
  const int hit = search(a, b, home, key);
  if (TYPE == ERASES) {
    erase(a, b, hit, at);
    return false;
  }
  a.found[at] = hit >= 0;
  if (a.evicted) a.evicted[at] = 0;
  if (TYPE < NO_TYPE && (a.accumulate[at] != 0) != (hit >= 0)) return false;
  const u64 given = a.batch_scores ? a.batch_scores[at] : 1;
  if (hit < 0) {
    if (a.operation == ASSIGN) return false;
    return insert<HOST>(a, b, home, key, at, own, first_score(a, given), move, before, first);
  }
  u32 slot = hit;
  if (a.rule != KEEP) {
    const u64 former = a.scores[b.first() + slot], score = next_score(a, given, former);
    if (HOST && a.device_slots && slot >= a.device_slots)
      slot = move_up(a, b, home, key, slot, score, before, first);
    a.scores[b.first() + slot] = score;
    if (score < former && score < floor_of(a, b, slot)) floor_of(a, b, slot) = score;
  }
  char* const row = row_of<HOST>(a, b.first() + slot);
  if (TYPE < NO_TYPE) return move.set(nullptr, nullptr, row, own, true);
  if (a.operation == FIND_OR_INSERT) return move.set(nullptr, nullptr, own, row);
  return move.set(nullptr, nullptr, a.batch_rows ? row : nullptr, own);
}

// -- the positions of a bucket

// Sorts by a warp: merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, algorithm M).
__device__ __forceinline__ void sort(u32* list, u32 n) {
  const u32 top = 1u << 31 - __clz(n - 1);
  for (u32 p = top; p; p /= 2)
    for (u32 q = top, r = 0, d = p;; d = q - p, q /= 2, r = p) {
      __syncwarp();
      for (u32 i = threadIdx.x & 31; i + d < n; i += 32)
        if ((i & p) == r) {
          const u32 low = list[i], high = list[i + d];
          if (low > high) list[i] = high, list[i + d] = low;
        }
      if (q == p) break;
    }
  __syncwarp();
}

// Each thread's positions in their order: n of them in list[0], list[step], …
__device__ __forceinline__ u32* positions(const ScoredArgs& a, u32 head, u32* list, u32& n,
                                          u32& step) {
  n = 0, step = BLOCK;
  for (u32 next = head; next; next = a.next[next - 1], n++)
    if (n < SHORT) {
      u32 i = n;
      for (; i && list[(i - 1) * BLOCK] > next - 1; i--) list[i * BLOCK] = list[(i - 1) * BLOCK];
      list[i * BLOCK] = next - 1;
    }
  if (n > SHORT) {
    list = a.sorted + atomicAdd(a.counters + SORTED, n), step = 1;
    u32 i = 0;
    for (u32 next = head; next; next = a.next[next - 1]) list[i++] = next - 1;
  }
  __syncwarp();
  for (u32 many = __ballot_sync(ALL, n > SHORT); many; many &= many - 1) {
    const int lane = __ffs(many) - 1;
    sort((u32*)__shfl_sync(ALL, (u64)list, lane), __shfl_sync(ALL, n, lane));
  }
  return list;
}

template <int UNIT, int T, int TYPE, bool HOST>
__global__ void __launch_bounds__(BLOCK, 3)
    scored_write_kernel(const __grid_constant__ ScoredArgs a) {
  __shared__ u32 lists[SHORT * BLOCK];
  __shared__ Move moves[BLOCK * (1 + HOST)];
  __shared__ u8 orders[BLOCK];
  const u32 at = blockIdx.x * BLOCK + threadIdx.x, touched = a.counters[TOUCHED];
  if (blockIdx.x == 0 && threadIdx.x < COUNTERS) a.next_counters[threadIdx.x] = 0;
  if ((at & ~31u) >= touched) return;
  Bucket b = {at < touched ? a.touched[at] : 0, false, 0, 0};
  const u32 head = at < touched ? a.heads[b.number] : 0;
  u32 n, step;
  const u32* const list = positions(a, head, lists + threadIdx.x, n, step);
  if (at < touched) a.heads[b.number] = 0;
  Move *const mine = moves + threadIdx.x, *const before = mine + (HOST ? BLOCK : 0);
  const u32 warp = threadIdx.x & ~31u;
  for (u32 k = 0; __any_sync(ALL, k < n); k++) {
    bool moved = false, first = false;
    if (k < n) moved = apply<TYPE, HOST>(a, b, list[k * step], *mine, *before, first);
    if (HOST)
      move_rows<UNIT, T, NO_TYPE>(first, moves + HOST * BLOCK + warp, orders + warp, a.row_bytes);
    move_rows<UNIT, T, TYPE>(moved, moves + warp, orders + warp, a.row_bytes);
  }
  const int added = __reduce_add_sync(ALL, b.added);
  const u32 evicted = __reduce_add_sync(ALL, b.evicted);
  if (threadIdx.x & 31) return;
  if (added) atomicAdd(a.size + blockIdx.x % SHARDS, (u64)(i64)added);
  if (evicted) atomicAdd(a.counters + EVICTED + blockIdx.x % SHARDS, evicted);
}
