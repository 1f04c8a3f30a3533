#!lua flags=allow-oom
-- Notes times in sorted sets: when names were of use, or are to be looked at for something of theirs to go.
-- KEYS sorted sets
-- ARGV '' or 'NX' or 'XX', as ZADD takes them; then time (s), name, time, name, ...
for _, times in ipairs(KEYS) do
  for i = 2, #ARGV, 2 do
    if ARGV[1] == '' then
      redis.call('ZADD', times, ARGV[i], ARGV[i + 1])
    else
      redis.call('ZADD', times, ARGV[1], ARGV[i], ARGV[i + 1])
    end
  end
end
return 1
