-- One page of an owner's checkpoints, newest first, without those that have expired.
-- KEYS checkpoints by creation, checkpoints by expiry, their bytes
-- ARGV now (s), offset, limit
-- Returns {count of all, {member, ...}}
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1])
for _, member in ipairs(expired) do
  redis.call('ZREM', KEYS[1], member)
  redis.call('ZREM', KEYS[2], member)
  local bytes = redis.call('HGET', KEYS[3], member)
  if bytes then
    redis.call('HDEL', KEYS[3], member)
    redis.call('HINCRBY', KEYS[3], 'total', -tonumber(bytes))
    if redis.call('HLEN', KEYS[3]) == 1 then redis.call('DEL', KEYS[3]) end
  end
end
local last = tonumber(ARGV[2]) + tonumber(ARGV[3]) - 1
local members = {}
if last >= tonumber(ARGV[2]) then members = redis.call('ZREVRANGE', KEYS[1], ARGV[2], last) end
return {redis.call('ZCARD', KEYS[1]), members}
