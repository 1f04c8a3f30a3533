-- Takes a snapshot out of the count.
-- KEYS sizes, bytes by owner, used, the owner's, the model's
-- ARGV member
local found = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('SREM', KEYS[5], ARGV[1])
if not found then return 0 end
local bytes, owner = string.match(found, '^(%d+) (.*)$')
redis.call('HDEL', KEYS[1], ARGV[1])
if redis.call('HINCRBY', KEYS[2], owner, '-' .. bytes) <= 0 then redis.call('HDEL', KEYS[2], owner) end
return 1
