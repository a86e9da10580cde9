-- Functions of the scripts that compare versions: the client puts this file in front of write.lua and of
-- sweep.lua (hps/tiers/redis/layout.py).
--
-- The versions of evicted entries are kept approximately: the floors of a partition are a string that holds
-- for each bucket of its keys the highest version evicted, then the highest of all, each a u64 little-endian,
-- then one byte. A write to an absent key that is older than its floor may be older than the evicted row: it
-- is dropped. A floor expires like a tombstone of its version.

-- Lua's numbers hold 53 bits and its strings are compared by locale: so a version is compared as two halves.
local function is_older(a, b)
  local a_low, a_high = struct.unpack('<I4I4', a)
  local b_low, b_high = struct.unpack('<I4I4', b)
  return a_high < b_high or (a_high == b_high and a_low < b_low)
end

local function floor_buckets(f)
  return math.max(0, (redis.call('STRLEN', f) - 9) / 8)
end

local function floor_at(f, at)
  return redis.call('GETRANGE', f, 8 * at, 8 * at + 7)
end

local function bucket_of(key, buckets)
  local low, high = struct.unpack('<I4I4', key)
  return (low * 31337 + high * 65599) % 4294967291 % buckets  -- exact: below 2^50
end

