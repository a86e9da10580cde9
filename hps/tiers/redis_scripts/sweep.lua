-- Removes expired entries of one partition, and up to a number of the least used ones. Scans a bounded
-- number of entries.
--
-- It is appended to versions.lua, which defines is_older, floor_buckets, floor_at and bucket_of.
--
-- KEYS: the hashes of rows, of stamps; the floors, when they are kept.
-- ARGV: 1 the cursor, 2 the number of entries to scan
--       3 'v' when values begin with a version
--       4 the oldest version of a row that is not expired, u64 little-endian
--       5 the oldest version of a tombstone that is not expired (oldest_tombstone in hps/types.py)
--       6 the number of further entries to evict
--       7 the format of stamps: '' evicts any entry, 'n' a count of uses, 't' seconds as i64 little-endian
--       8 the highest stamp that is evicted; an entry without a stamp has 0.
-- Use counts of the remaining entries are halved, so that entries that were popular once can be evicted.
-- Returns the next cursor, the number removed and the number of entries in the hash.
local v, t = KEYS[1], KEYS[2]
local versioned, row, tombstone = ARGV[3] == 'v', ARGV[4], ARGV[5]
local need, kind, highest = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])

local function seconds(stamp)
  if not stamp or #stamp ~= 8 then return 0 end
  local low, high = struct.unpack('<I4i4', stamp)
  return low + high * 4294967296
end

local scanned = redis.call('HSCAN', v, ARGV[1], 'COUNT', ARGV[2])
local gone, left, values, removed = {}, {}, {}, 0
for i = 1, #scanned[2], 2 do
  local value = scanned[2][i + 1]
  -- A value of 9 bytes is a tombstone: its version and a kind, without a row.
  if versioned and #value >= 9 and is_older(value, #value == 9 and tombstone or row) then
    gone[#gone + 1] = scanned[2][i]
  else
    left[#left + 1] = scanned[2][i]
    values[scanned[2][i]] = value
  end
end

local f = KEYS[3]
local buckets = f and floor_buckets(f) or 0

local function raise_floor(at, version)
  if is_older(floor_at(f, at), version) then redis.call('SETRANGE', f, 8 * at, version) end
end

local function evict(key)
  gone[#gone + 1] = key
  local value = values[key]
  -- A floor below the oldest tombstone would have expired already.
  if buckets > 0 and #value >= 9 and not is_older(value, tombstone) then
    local version = string.sub(value, 1, 8)
    raise_floor(bucket_of(key, buckets), version)
    raise_floor(buckets, version)
  end
end

-- Lua's stack bounds what one call takes.
local function in_slices(list, work)
  for i = 1, #list, 2000 do
    local slice = {unpack(list, i, math.min(i + 1999, #list))}
    work(slice)
  end
end

if need > 0 then
  in_slices(left, function(fields)
    local stamps = kind ~= '' and redis.call('HMGET', t, unpack(fields))
    for i = 1, #fields do
      local used = 0
      if kind == 'n' then
        used = tonumber(stamps[i] or 0) or 0
      elseif kind == 't' then
        used = seconds(stamps[i])
      end
      if need > 0 and (kind == '' or used <= highest) then
        evict(fields[i])
        need = need - 1
      elseif kind == 'n' and used > 1 then
        redis.call('HSET', t, fields[i], math.floor(used / 2))
      end
    end
  end)
end

in_slices(gone, function(fields)
  removed = removed + redis.call('HDEL', v, unpack(fields))
  redis.call('HDEL', t, unpack(fields))
end)
return {scanned[1], removed, redis.call('HLEN', v)}
