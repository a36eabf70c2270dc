-- An agent publishes what it computed for a generation. KEYS: batch, roster of the generation.
local key, list = KEYS[1], KEYS[2]
if redis.call('HSET', list, 'agent:' .. req.agent, req.verdict) == 1 then redis.call('HINCRBY', list, 'verdicts', 1) end
redis.call('PEXPIRE', list, req.registration)
local count = number(redis.call('HGET', list, 'verdicts'))
if req.expected <= FEW or count >= req.expected then changed(key, 'verdict') end
return ok(count)
