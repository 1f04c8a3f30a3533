#!lua flags=allow-oom
-- Deletes all of a closed model's journal but the fact that it is closed.
-- USES held
-- KEYS journal, order, pending, meta, held, expiring
-- Returns 1, or 0 when the model is open or operations wait
local meta = redis.call('HMGET', KEYS[4], 'closed', 'base_model', 'owner', 'journal_bytes')
if not meta[1] or redis.call('ZCARD', KEYS[3]) > 0 then return 0 end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[4])
redis.call('HSET', KEYS[4], 'closed', meta[1], 'base_model', meta[2] or '')
hold(meta[3] or '', -tonumber(meta[4] or 0))
count_part('*journals', -tonumber(meta[4] or 0))
return 1
