#!lua flags=allow-oom
-- Moves a version forward, never back.
-- KEYS version
-- ARGV version
if tonumber(redis.call('GET', KEYS[1]) or -1) < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return 1
