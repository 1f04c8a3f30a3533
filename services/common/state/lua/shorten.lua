#!lua flags=allow-oom
-- Lets results go that their client has, and what announces them.
-- USES held
-- KEYS of each: future, completions (the future again where there are none); then held, expiring
-- ARGV seconds that they may still be asked for, of each: seq_id ('' where there are no completions)
local seconds = tonumber(ARGV[1])
for i = 1, #KEYS - 2, 2 do
  local future, seq = KEYS[i], ARGV[(i + 3) / 2]
  local known = redis.call('HMGET', future, 'state', 'owner', 'counted')
  if known[1] == 'done' then
    local size, owner = redis.call('HSTRLEN', future, 'result'), known[2] or ''
    if redis.call('TTL', future) > seconds then
      redis.call('EXPIRE', future, seconds)
      count_slot(known[3] .. '/' .. owner, known[3], -size - ENTRY)
      redis.call('HSET', future, 'counted', hold_for(owner, size + ENTRY, seconds))
    end
    if seq ~= '' then
      redis.call('ZREM', KEYS[i + 1], seq .. ':finished:' .. size, seq .. ':failed:' .. size)
    end
  end
end
return redis.status_reply('OK')
