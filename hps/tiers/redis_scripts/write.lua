-- Writes rows into one partition of a table atomically, under the version rule.
--
-- It is appended to versions.lua, which defines is_older, floor_buckets, floor_at and bucket_of.
--
-- KEYS: the hash of rows; of stamps, if there is one; the floors, if they are kept; the hash of stream
-- positions, if there are any, and with versions: it also holds the highest version ever written. A row that
-- is not older than that is written without reading the row that it replaces: that read costs more than the rest.
-- ARGV: 1 'v' when values begin with a version, 'r' when only resident rows are written, 'a' when only
--       absent ones are, 'f' when floors are kept
--       2 the version below which a tombstone is expired, u64 little-endian
--       3 the stamp of an entry used now: '' for none, 'n' to count uses, else the bytes to keep
--       4, 5 the lowest and the highest version of the values, u64 little-endian; '' if there are none
--       6 how many stream positions follow, as field, offset and the offset that must have been reached
--       then pairs of key and value.
-- Returns the number of entries after it.
local v, t, o = KEYS[1], KEYS[2], KEYS[#KEYS]
local versioned = string.find(ARGV[1], 'v', 1, true)
local resident = string.find(ARGV[1], 'r', 1, true)
local absent = string.find(ARGV[1], 'a', 1, true)
local stamp = ARGV[3]
local lowest, highest = ARGV[4], ARGV[5]
local positions = tonumber(ARGV[6])
local first = 7 + 3 * positions

local f, buckets = KEYS[stamp == '' and 2 or 3], 0
if string.find(ARGV[1], 'f', 1, true) then
  buckets = floor_buckets(f)
  if buckets > 0 and is_older(floor_at(f, buckets), ARGV[2]) then buckets = 0 end
end

local function is_below_floor(key, value)
  local floor = floor_at(f, bucket_of(key, buckets))
  return is_older(value, floor) and not is_older(floor, ARGV[2])
end

-- The highest version of rows from before it was kept is unknown: then no row counts as newer.
local mark
if versioned and highest ~= '' then
  mark = redis.call('HGET', o, 'highest')
  if not mark then
    local empty = redis.call('HLEN', v) == 0 and buckets == 0
    mark = string.rep(empty and '\0' or '\255', 8)
    if not empty then redis.call('HSET', o, 'highest', mark) end
  end
  if is_older(mark, highest) then redis.call('HSET', o, 'highest', highest) end
end

local put, from, m = {}, 1, 0
if resident or absent or (mark and is_older(lowest, mark)) then
  local read_all = resident or absent
  local fields, at, n = {}, {}, 0
  for i = first, #ARGV, 2 do
    if read_all or is_older(ARGV[i + 1], mark) then
      n = n + 1
      fields[n], at[n] = ARGV[i], i + 1
    else
      put[m + 1], put[m + 2] = ARGV[i], ARGV[i + 1]
      m = m + 2
    end
  end
  local held = n > 0 and redis.call('HMGET', v, unpack(fields))
  for i = 1, n do
    local value, old = ARGV[at[i]], held[i]
    if old and versioned and #old == 9 and is_older(old, ARGV[2]) then old = false end
    local ok = (old or not resident) and not (old and absent)
    if ok and old and versioned and #old >= 9 then ok = not is_older(value, old) end
    if ok and not old and buckets > 0 then ok = not is_below_floor(fields[i], value) end
    if ok then
      put[m + 1], put[m + 2] = fields[i], value
      m = m + 2
    end
  end
else
  put, from = ARGV, first
end

if #put > from then
  redis.call('HSET', v, unpack(put, from))
  if stamp == 'n' then
    for i = from, #put, 2 do redis.call('HINCRBY', t, put[i], 1) end
  elseif stamp ~= '' then
    local stamps, k = {}, 0
    for i = from, #put, 2 do
      stamps[k + 1], stamps[k + 2] = put[i], stamp
      k = k + 2
    end
    redis.call('HSET', t, unpack(stamps))
  end
end

for i = 1, positions do
  local field, offset, since = ARGV[4 + 3 * i], ARGV[5 + 3 * i], ARGV[6 + 3 * i]
  local old = tonumber(redis.call('HGET', o, field) or 0)
  if old >= tonumber(since) and (old < tonumber(offset) or old == 0) then
    redis.call('HSET', o, field, offset)
  end
end

return redis.call('HLEN', v)
