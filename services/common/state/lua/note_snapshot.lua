#!lua flags=allow-oom
-- Counts a stored snapshot, once.
-- KEYS sizes, bytes by owner, used, the owner's, the model's, the owner's that are to come
-- ARGV member, owner, bytes, now (s)
redis.call('ZREM', KEYS[6], ARGV[1])
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[3] .. ' ' .. ARGV[2]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[2], ARGV[3])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
redis.call('ZADD', KEYS[4], ARGV[4], ARGV[1])
redis.call('SADD', KEYS[5], ARGV[1])
return 1
