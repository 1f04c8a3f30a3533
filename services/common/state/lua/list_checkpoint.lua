#!lua flags=allow-oom
-- Lists a version of a checkpoint among its owner's, or counts it anew.
-- KEYS checkpoints by creation, checkpoints by expiry, their bytes
-- ARGV member, creation (s), expiry (s) or '' when it is kept, bytes
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
if ARGV[3] == '' then
  redis.call('ZREM', KEYS[2], ARGV[1])
else
  redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
end
local before = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0')
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
redis.call('HINCRBY', KEYS[3], 'total', ARGV[4] - before)
return 1
