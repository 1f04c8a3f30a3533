#!lua flags=allow-oom
-- Marks work that is done once a day as begun, unless it is; or as failed, unless its mark is gone.
-- KEYS mark
-- ARGV why it failed ('' = it begins), for how long the mark of one that begins is kept (ms)
-- Returns 1, or 0 when nothing was marked
local marked
if ARGV[1] == '' then
  marked = redis.call('SET', KEYS[1], '', 'NX', 'PX', ARGV[2])
else
  marked = redis.call('SET', KEYS[1], ARGV[1], 'XX', 'KEEPTTL')
end
return marked and 1 or 0
