-- Takes a version of a checkpoint out of its owner's, and its bytes out of their sum.
-- KEYS checkpoints by creation, checkpoints by expiry, their bytes
-- ARGV member
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
local bytes = redis.call('HGET', KEYS[3], ARGV[1])
if bytes then
  redis.call('HDEL', KEYS[3], ARGV[1])
  redis.call('HINCRBY', KEYS[3], 'total', -tonumber(bytes))
  if redis.call('HLEN', KEYS[3]) == 1 then redis.call('DEL', KEYS[3]) end
end
return 1
