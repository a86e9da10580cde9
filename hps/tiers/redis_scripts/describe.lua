-- Records how a table is kept, unless that is recorded already; returns what is recorded.
--
-- KEYS: the table's hash of facts. ARGV: pairs of name and value.
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('HSET', KEYS[1], unpack(ARGV)) end
return redis.call('HGETALL', KEYS[1])
