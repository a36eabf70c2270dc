-- A member of an epoch compares a value and sets it, as torch's stores do. KEYS: the epoch's values.
local found = redis.call('HGET', KEYS[1], req.name)
if (found or '=') == req.expected then
  redis.call('HSET', KEYS[1], req.name, req.desired)
  redis.call('PEXPIRE', KEYS[1], req.registration)
  changed(KEYS[1], 'set')
  return ok(req.desired)
end
return ok(found or req.expected)
