-- Records a table's metadata unless it is recorded already; returns the whole hash.
--
-- KEYS: the table's metadata hash. ARGV: pairs of name and value.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then redis.call('HSET', KEYS[1], unpack(ARGV)) end
return redis.call('HGETALL', KEYS[1])
