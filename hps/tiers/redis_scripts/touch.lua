-- Records the use of entries of one partition.
--
-- KEYS: the hashes of rows, of stamps.
-- ARGV: 1 the stamp, 'n' to count uses, else the bytes to keep; then keys.
-- Returns the number of entries that exist.
local v, t, stamp = KEYS[1], KEYS[2], ARGV[1]
local n = 0
for i = 2, #ARGV do
  if redis.call('HEXISTS', v, ARGV[i]) == 1 then
    n = n + 1
    if stamp == 'n' then
      redis.call('HINCRBY', t, ARGV[i], 1)
    else
      redis.call('HSET', t, ARGV[i], stamp)
    end
  end
end
return n
