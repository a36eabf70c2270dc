-- Records of all live agents, each with the milliseconds for which its lease still runs; ids whose lease ended are
-- removed. KEYS: agents.
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = PREFIX .. 'agent:' .. id
  local record = redis.call('HGETALL', key)
  if #record == 0 then
    redis.call('SREM', KEYS[1], id)
  else
    found[#found + 1] = {id, record, redis.call('PTTL', key)}
  end
end
return found
