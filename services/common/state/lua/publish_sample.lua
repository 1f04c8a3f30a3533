-- Resolves the future of a sample, once, and puts it on the list that its client's poller reads.
-- KEYS future, completions
-- ARGV result, ttl (s), request id, done channel, seq_id, 'finished' or 'failed',
--      '1' = also when there is no future (it was lost with the last second of a Redis)
-- Returns {outcome, gateway that dispatched it}; outcome 1 resolved, 0 it was before, -1 no such future
local known = redis.call('HMGET', KEYS[1], 'state', 'gateway')
if known[1] == 'done' then return {0, ''} end
if not known[1] and ARGV[7] ~= '1' then return {-1, ''} end
redis.call('HSET', KEYS[1], 'state', 'done', 'result', ARGV[1])
redis.call('HDEL', KEYS[1], 'request', 'reason')
redis.call('EXPIRE', KEYS[1], ARGV[2])

-- The cursor is clock-based, so that none is given twice when Redis came back without its last second.
local now = redis.call('TIME')
local at = tonumber(now[1]) * 1000000 + tonumber(now[2])
local newest = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
if newest and tonumber(newest) >= at then at = tonumber(newest) + 1 end
redis.call('ZADD', KEYS[2], string.format('%.0f', at), ARGV[5] .. ':' .. ARGV[6] .. ':' .. #ARGV[1])
-- A completion lives as long as the result that it announces.
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', at - tonumber(ARGV[2]) * 1000000))
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[4], ARGV[3])
return {1, known[2] or ''}
