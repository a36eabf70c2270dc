-- Remove a pair to which nobody belongs any more, and its batch. KEYS: pair, batch. Answers whether it was removed.
local pair_key, batch_key = KEYS[1], KEYS[2]
for _, name in ipairs(object(redis.call('HGET', pair_key, 'sides')) or {}) do
  if redis.call('EXISTS', pair_key .. ':' .. name) == 1 then return ok(false) end
end
for g = 1, number(redis.call('HGET', batch_key, 'generation')) do
  redis.call('DEL', batch_key .. ':ranks:' .. string.format('%d', g))
end
redis.call('DEL', pair_key, batch_key)
redis.call('SREM', PREFIX .. 'pairs', req.pair)
redis.call('SREM', PREFIX .. 'batches', req.pair .. '/' .. req.batch)
return ok(true)
