#!lua flags=allow-oom
-- Resolves the future of a sample, once, takes it off its gateway's list, and puts it on the one that its client's
-- poller reads.
-- USES held
-- USES use
-- KEYS future, pending samples of the sampling session, completions, what the owner used today, samples of a gateway, held,
--      expiring
-- ARGV result, ttl (s), request id, done channel, seq_id, 'finished' or 'failed',
--      '1' = also when there is no future (it was lost with the last second of a Redis),
--      the gateway of KEYS, base model, how long what was used is kept (s), session, run, then what was used
-- Returns {outcome, another gateway that dispatches it}; outcome 1 resolved, 0 it was before, -1 no such future
local known = redis.call('HMGET', KEYS[1], 'state', 'gateway', 'owner', 'held')
if known[1] == 'done' then return {0, ''} end
if not known[1] and ARGV[7] ~= '1' then return {-1, ''} end
local owner, ttl = known[3] or '', tonumber(ARGV[2])
hold(owner, -tonumber(known[4] or 0))
redis.call('HDEL', KEYS[1], 'request', 'reason', 'held')
redis.call('SREM', KEYS[2], ARGV[5])
resolve(KEYS[1], owner, ARGV[1], ttl)

-- The cursor is clock-based, so that none is given twice when Redis came back without its last second.
local now = redis.call('TIME')
local at = tonumber(now[1]) * 1000000 + tonumber(now[2])
local newest = redis.call('ZSCORE', KEYS[3], 'newest')
if newest and tonumber(newest) >= at then at = tonumber(newest) + 1 end
local cursor = string.format('%.0f', at)
redis.call('ZADD', KEYS[3], cursor, ARGV[5] .. ':' .. ARGV[6] .. ':' .. #ARGV[1], cursor, 'newest')
-- A completion lives as long as the result that it announces.
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', at - ttl * 1000000))
redis.call('EXPIRE', KEYS[3], ttl)
count_use(KEYS[4], ARGV[10], ARGV[9], ARGV[11], ARGV[12], 13)
redis.call('SREM', KEYS[5], ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[3])
return {1, known[2] ~= ARGV[8] and known[2] or ''}
