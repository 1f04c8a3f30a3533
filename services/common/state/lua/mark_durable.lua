#!lua flags=allow-oom
-- Moves the pointer to the newest durable snapshot forward and trims the journal up to it.
-- USES held
-- KEYS journal, order, pending, meta, epoch, held, expiring
-- ARGV seq, epoch, location
-- Returns 1 when the pointer names this snapshot, 0 when a newer one is named, -1 for a stale epoch
if tonumber(redis.call('GET', KEYS[5]) or 0) ~= tonumber(ARGV[2]) then return -1 end
local seq = tonumber(ARGV[1])
if seq < tonumber(redis.call('HGET', KEYS[4], 'durable') or -1) then return 0 end
redis.call('HSET', KEYS[4], 'durable', ARGV[1], 'location', ARGV[3])
local freed = 0
for _, covered in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', seq)) do
  -- An operation whose result is not published yet leaves when it is.
  if not redis.call('ZSCORE', KEYS[3], covered) then
    freed = freed + redis.call('HSTRLEN', KEYS[1], covered)
    redis.call('HDEL', KEYS[1], covered)
    redis.call('ZREM', KEYS[2], covered)
  end
end
redis.call('HDEL', KEYS[4], 'half_full')
if freed > 0 then
  redis.call('HINCRBY', KEYS[4], 'journal_bytes', -freed)
  count_part('*journals', -freed)
  hold(redis.call('HGET', KEYS[4], 'owner') or '', -freed)
end
return 1
