#!lua flags=allow-oom
-- Announces a service for a while, remembers what it says of its base model, and drops those of its kind that
-- were not heard of for that while. Who is drained is so for as long as it is heard of now and then.
-- KEYS records, seen, base models, drained
-- ARGV id, record, life (ms), field for what it says of its base model ('' = it has none), that,
--      field of the base model's retirement, name among the drained, for how long one of those may be silent (s)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], string.format('%.0f', now), ARGV[1])
local gone = string.format('(%.0f', now - tonumber(ARGV[3]))
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', gone)) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
redis.call('ZADD', KEYS[4], 'XX', time[1], ARGV[7])
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', string.format('(%.0f', tonumber(time[1]) - tonumber(ARGV[8])))
if ARGV[4] ~= '' then
  if redis.call('HGET', KEYS[3], ARGV[4]) ~= ARGV[5] then redis.call('HSET', KEYS[3], ARGV[4], ARGV[5]) end
  redis.call('HDEL', KEYS[3], ARGV[6])
end
return 1
