-- Records of all live agents; ids whose lease ended are removed. KEYS: agents.
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('HGETALL', PREFIX .. 'agent:' .. id)
  if #record == 0 then redis.call('SREM', KEYS[1], id) else found[#found + 1] = {id, record} end
end
return found
