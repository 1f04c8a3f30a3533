#!lua flags=allow-oom
-- What an owner holds, what all hold, and what of that are results and journals, without what has expired: nothing
-- else may be done that would take it off.
-- USES held
-- KEYS held, expiring
-- ARGV owner
-- Returns {bytes, bytes, bytes, bytes}
for _ = 1, 32 do drop_expired() end
local found = redis.call('HMGET', HELD, ARGV[1], '*', '*results', '*journals')
return {tonumber(found[1] or 0), tonumber(found[2] or 0), tonumber(found[3] or 0), tonumber(found[4] or 0)}
