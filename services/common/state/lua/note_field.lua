#!lua flags=allow-oom
-- Notes a few bytes about what is there: how far it is, or that it goes.
-- KEYS hash
-- ARGV field, value, '1' = unless the field has one, for how long the hash is kept from now on (s, 0 = as it is)
-- Returns the value of the field
redis.call(ARGV[3] == '1' and 'HSETNX' or 'HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[4] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[4]) end
return redis.call('HGET', KEYS[1], ARGV[1])
