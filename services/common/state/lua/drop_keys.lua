#!lua flags=allow-oom
-- Ends API keys, whatever they are by now.
-- KEYS records, when they were used, version
-- ARGV new version, ids
for place = 2, #ARGV do
  redis.call('HDEL', KEYS[1], ARGV[place])
  redis.call('HDEL', KEYS[2], ARGV[place])
end
redis.call('SET', KEYS[3], ARGV[1])
return 1
