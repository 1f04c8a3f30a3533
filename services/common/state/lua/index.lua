-- What a dispatcher must know of a model's journal, without the payloads.
-- KEYS journal, order, pending, meta
-- ARGV after (seq_id), most entries
-- Returns {durable, floor, closed, base model, trainer, epoch of its last move, pending count, lowest pending,
--      {seq, size, pending, ...}}
local meta = redis.call('HMGET', KEYS[4], 'durable', 'floor', 'closed', 'base_model', 'through', 'trainer', 'moved')
local lowest = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
local entries = {}
local seqs = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf', 'LIMIT', 0, ARGV[2])
for _, seq in ipairs(seqs) do
  entries[#entries + 1] = tonumber(seq)
  entries[#entries + 1] = redis.call('HSTRLEN', KEYS[1], seq)
  entries[#entries + 1] = redis.call('ZSCORE', KEYS[3], seq) and 1 or 0
end
return {
  tonumber(meta[1] or -1), math.max(tonumber(meta[2] or -1), tonumber(meta[5] or -1)), meta[3] or '', meta[4] or '',
  meta[6] or '', tonumber(meta[7] or 0), redis.call('ZCARD', KEYS[3]), tonumber(lowest or -1), entries,
}
