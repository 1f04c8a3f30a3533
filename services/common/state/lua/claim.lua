#!lua flags=allow-oom
-- Claims an id for a process, or keeps its claim.
-- KEYS claim
-- ARGV the process, ttl (ms), a process that is known to be gone ('' = none)
-- Returns '' when the id is the process's, else the one that has it
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] and holder ~= ARGV[3] then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
