#!lua flags=allow-oom
-- Notes the contract of a release that gets along with the one that is noted, if it is newer.
-- KEYS contract
-- ARGV contract of this release, oldest contract that it gets along with
-- Returns the contract and the oldest one of what is in Redis.
local noted = redis.call('HMGET', KEYS[1], 'contract', 'oldest')
if not noted[1] then
  redis.call('HSET', KEYS[1], 'contract', ARGV[1], 'oldest', ARGV[2])
  return {ARGV[1], ARGV[2]}
end
local fits = tonumber(ARGV[1]) >= tonumber(noted[2]) and tonumber(noted[1]) >= tonumber(ARGV[2])
if fits and tonumber(ARGV[1]) > tonumber(noted[1]) then
  redis.call('HSET', KEYS[1], 'contract', ARGV[1], 'oldest', ARGV[2])
end
return noted
