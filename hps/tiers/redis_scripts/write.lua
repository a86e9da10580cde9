-- Writes rows into one partition of a table, under the version rule and all at once.
--
-- KEYS: the hash of rows; of stamps, when there is one; the floors, when they are kept; the hash of stream
-- positions, when there are any.
-- ARGV: 1 'v' when values begin with a version, 'r' when only resident rows are written, 'a' when only
--       absent ones are, 'f' when floors are kept
--       2 the version below which a tombstone is forgotten, u64 little-endian
--       3 the stamp of an entry that is used now: '' for none, 'n' to count uses, else the bytes to keep
--       4 how many stream positions follow, as field, offset and the offset that must have been reached
--       then pairs of key and value.
-- Returns the number of entries after it.
local v, t, o = KEYS[1], KEYS[2], KEYS[#KEYS]
local versioned = string.find(ARGV[1], 'v', 1, true)
local resident = string.find(ARGV[1], 'r', 1, true)
local absent = string.find(ARGV[1], 'a', 1, true)
local stamp = ARGV[3]
local positions = tonumber(ARGV[4])
local first = 5 + 3 * positions

local f, buckets = KEYS[stamp == '' and 2 or 3], 0
if string.find(ARGV[1], 'f', 1, true) then
  buckets = floor_buckets(f)
  if buckets > 0 and is_older(floor_at(f, buckets), ARGV[2]) then buckets = 0 end
end

local function is_below_floor(key, value)
  local floor = floor_at(f, bucket_of(key, buckets))
  return is_older(value, floor) and not is_older(floor, ARGV[2])
end

local fields, n = {}, 0
for i = first, #ARGV, 2 do
  n = n + 1
  fields[n] = ARGV[i]
end

local put, m = {}, 0
if n > 0 and (versioned or resident or absent) then
  local held = redis.call('HMGET', v, unpack(fields))
  for i = 1, n do
    local value, old = ARGV[first + 2 * i - 1], held[i]
    if old and versioned and #old == 9 and is_older(old, ARGV[2]) then old = false end
    local ok = (old or not resident) and not (old and absent)
    if ok and old and versioned and #old >= 9 then ok = not is_older(value, old) end
    if ok and not old and buckets > 0 then ok = not is_below_floor(fields[i], value) end
    if ok then
      put[m + 1] = fields[i]
      put[m + 2] = value
      m = m + 2
    end
  end
else
  for i = first, #ARGV do
    m = m + 1
    put[m] = ARGV[i]
  end
end

if m > 0 then
  redis.call('HSET', v, unpack(put))
  if stamp == 'n' then
    for i = 1, m, 2 do redis.call('HINCRBY', t, put[i], 1) end
  elseif stamp ~= '' then
    for i = 2, m, 2 do put[i] = stamp end
    redis.call('HSET', t, unpack(put))
  end
end

for i = 1, positions do
  local field, offset, since = ARGV[2 + 3 * i], ARGV[3 + 3 * i], ARGV[4 + 3 * i]
  local old = tonumber(redis.call('HGET', o, field) or 0)
  if old >= tonumber(since) and (old < tonumber(offset) or old == 0) then
    redis.call('HSET', o, field, offset)
  end
end

return redis.call('HLEN', v)
