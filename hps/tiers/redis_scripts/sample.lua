-- The stamps of some entries of one partition, drawn at random; '' if there is none.
--
-- KEYS: the hashes of rows, of stamps. ARGV: how many.
local fields = redis.call('HRANDFIELD', KEYS[1], ARGV[1])
if #fields == 0 then return {} end
local stamps = redis.call('HMGET', KEYS[2], unpack(fields))
for i = 1, #fields do stamps[i] = stamps[i] or '' end
return stamps
