#!lua flags=allow-oom
-- Resolves the future of an operation, once, for the holder of the current epoch.
-- USES held
-- USES use
-- KEYS future, journal, order, pending, meta, epoch, waiting of all owners, what the owner used today,
--      held, expiring
-- ARGV seq, epoch, result, ttl (s), '1' when a replay may pass the operation over,
--      result of all later operations ('' = the model stays open), request id, done channel,
--      how long what was used is kept (s), session, run, then what was used
-- Returns 1 published, 0 not pending, -1 stale epoch
if tonumber(redis.call('GET', KEYS[6]) or 0) ~= tonumber(ARGV[2]) then return -1 end
local known = redis.call('HMGET', KEYS[1], 'state', 'owner')
if known[1] ~= 'pending' then return 0 end

local seq, owner = tonumber(ARGV[1]), known[2] or ''
local size = redis.call('HSTRLEN', KEYS[2], ARGV[1])
hold(owner, -ENTRY)
resolve(KEYS[1], owner, ARGV[3], tonumber(ARGV[4]))
redis.call('ZREM', KEYS[4], ARGV[1])
if redis.call('HINCRBY', KEYS[7], owner, -1) <= 0 then redis.call('HDEL', KEYS[7], owner) end

local meta = redis.call('HMGET', KEYS[5], 'durable', 'floor', 'through')
local durable, passed = seq <= tonumber(meta[1] or -1), ARGV[5] == '1'
if durable or passed then
  -- A creation that failed leaves its entry: it says that there is something to take down.
  if durable or (seq > 0 and seq <= math.max(tonumber(meta[2] or -1), tonumber(meta[3] or -1))) then
    redis.call('HDEL', KEYS[2], ARGV[1])
    redis.call('ZREM', KEYS[3], ARGV[1])
  else
    redis.call('HSET', KEYS[2], ARGV[1], '')
  end
end
if size > 0 then
  redis.call('HINCRBY', KEYS[5], 'pending_bytes', -size)
  if durable or passed then
    redis.call('HINCRBY', KEYS[5], 'journal_bytes', -size)
    count_part('*journals', -size)
    hold(owner, -size)
  end
end
-- The model goes on: what it was tried in vain for is no more.
redis.call('HDEL', KEYS[5], 'vain_ms', 'refused_ms')
if ARGV[6] ~= '' then redis.call('HSET', KEYS[5], 'closed', ARGV[6]) end
count_use(KEYS[8], ARGV[9], redis.call('HGET', KEYS[5], 'base_model') or '', ARGV[10], ARGV[11], 12)
redis.call('PUBLISH', ARGV[8], ARGV[7])
return 1
