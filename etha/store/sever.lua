-- Agents of a formed pair have lost each other: the pair is lost, everybody keeps the rank. KEYS: pair.
local pair_key = KEYS[1]
local P = hash(pair_key)
if P.state ~= 'formed' or number(P.epoch) ~= req.epoch then return ok(false) end
redis.call('HSET', pair_key, 'state', 'lost', 'reason', req.reason, 'error', req.text,
  'culprits', #req.culprits > 0 and json(req.culprits) or '[]')
event('lost', 'pair', req.pair, 'epoch', P.epoch, 'reason', req.reason, 'text', req.text)
keep(pair_key)
changed(pair_key, 'lost')
return ok(true)
