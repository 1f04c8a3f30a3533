#!lua flags=allow-oom
-- Takes the dispatch lease of a model if nobody holds it.
-- KEYS lease, epoch, pending
-- ARGV holder, prefix of earlier starts of the same gateway, ttl (ms), '1' = only when there is work
-- Returns {'taken', epoch}, {'held', ms left} or {'idle'}
if ARGV[4] == '1' and redis.call('ZCARD', KEYS[3]) == 0 then return {'idle'} end
local holder = redis.call('GET', KEYS[1])
if holder and string.sub(holder, 1, #ARGV[2]) ~= ARGV[2] then
  return {'held', redis.call('PTTL', KEYS[1])}
end
-- Clock-based, so that an epoch is not given out twice when Redis came back without its last second.
local now = redis.call('TIME')
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or 0) + 1,
  tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return {'taken', epoch}
