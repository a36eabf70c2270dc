-- One rank registers a batch. KEYS: batch. The roster of a generation is KEYS[1]:ranks:GENERATION.
local key, who = KEYS[1], req.side .. '/' .. string.format('%d', req.rank)
local B = hash(key)
local generation = math.max(number(B.generation), req.known_generation)
local function roster(g) return key .. ':ranks:' .. string.format('%d', g) end

-- The same call once more, because its answer was lost.
for g = generation, math.max(1, generation - 1), -1 do
  if redis.call('HGET', roster(g), 'token:' .. who) == req.token then return ok({generation = g}) end
end
-- A Redis that has lost its data may count a pair's epochs anew, and get back a batch of an earlier life of the pair.
local formed = number(redis.call('HGET', PREFIX .. 'pair:' .. req.pair, 'epoch'))
if req.epoch < number(B.epoch) and req.epoch ~= formed then
  return refuse('peer_lost', 'pair ' .. req.pair .. ' is at epoch ' .. B.epoch .. ', ' .. req.side .. ' rank '
    .. string.format('%d', req.rank) .. ' registers batch ' .. req.batch .. ' at epoch '
    .. string.format('%d', req.epoch) .. ': call init_pair again', {reason = 'relaunched'})
end
-- Who knows that a registration is over opens the next one, even if a Redis that has lost its data counts it anew.
local open = B.state == 'registering' and number(B.epoch) == req.epoch and number(B.generation) == generation
  and generation > req.over
generation = math.max(generation, req.over)
if not open then
  -- In a later epoch nobody goes on with what was registered in an earlier one.
  if number(B.epoch) ~= req.epoch then redis.call('DEL', roster(generation), roster(generation - 1)) end
  generation = generation + 1
  redis.call('HSET', key, 'state', 'registering', 'generation', string.format('%d', generation),
    'epoch', string.format('%d', req.epoch), 'last_error', '')
  redis.call('HSETNX', key, 'seq', '0')
  redis.call('SADD', PREFIX .. 'batches', req.pair .. '/' .. req.batch)
  event('registering', 'pair', req.pair, 'batch', req.batch, 'epoch', req.epoch, 'generation', generation)
end
local list = roster(generation)
if redis.call('HSET', list, who, req.record) == 1 then redis.call('HINCRBY', list, 'entries', 1) end
redis.call('HSET', list, 'token:' .. who, req.token)
redis.call('PEXPIRE', list, req.registration)
local state, entries = 'registering', number(redis.call('HGET', list, 'entries'))
if entries >= req.expected then
  state = 'registered'
  redis.call('HSET', key, 'state', state)
  redis.call('DEL', roster(generation - 1))  -- every rank has come here, so none reads that one any more
  event('registered', 'pair', req.pair, 'batch', req.batch, 'epoch', req.epoch, 'generation', generation)
end
keep(PREFIX .. 'batches')
keep(key)
if not open or req.expected <= FEW or state == 'registered' then changed(key, state) end
return ok({generation = generation})
