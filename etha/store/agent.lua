-- An agent's record and lease. KEYS: agent:ID, agents, server. req.act: publish, renew, withdraw.
-- Answers {here = does the record stand, server = id of this Redis}.
local key, agents, server = KEYS[1], KEYS[2], KEYS[3]
local here = redis.call('EXISTS', key) == 1
if req.act == 'withdraw' then
  redis.call('DEL', key)
  redis.call('SREM', agents, req.id)
  if here then event('agent_left', 'agent', req.id) end
  changed(key, 'left')
  return ok({here = false})
end
if req.act == 'publish' then
  if not here then event('agent_came', 'agent', req.id, 'host', req.name, 'device', req.record.device) end
  redis.call('DEL', key)
  for name, value in pairs(req.record) do redis.call('HSET', key, name, value) end
  redis.call('HSET', key, 'beats', '0')
  here = true
end
if here then
  redis.call('HINCRBY', key, 'beats', 1)
  redis.call('PEXPIRE', key, req.lease)
  redis.call('SADD', agents, req.id)
  keep(agents)
end
redis.call('HSETNX', server, 'id', req.server)
keep(server)
-- Whoever waits to learn whether this agent lives hears it now.
changed(key, 'beat')
return ok({here = here, server = redis.call('HGET', server, 'id')})
