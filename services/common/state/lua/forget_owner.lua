#!lua flags=allow-oom
-- Strikes an owner off the list of owners, unless it has a session, or used something on days that are kept.
-- KEYS owners, sessions of the owner, what it used on each of those days
-- ARGV owner
if redis.call('ZCARD', KEYS[2]) > 0 then return 0 end
for i = 3, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then return 0 end
end
return redis.call('SREM', KEYS[1], ARGV[1])
