#!lua
-- Tries each command the script needs, as the user that calls it, on a key of its own that is left as it was.
--
-- KEYS   probe
-- ARGV   publish command, channel
-- Return the commands that are refused
-- Cost   one of each command

local key, missing = KEYS[1], {}

local function clean() -- by whichever of the two is allowed
    redis.pcall('DEL', key)
    redis.pcall('UNLINK', key)
end

local function try(command, ...)
    local result = redis.pcall(command, ...)
    if type(result) == 'table' and result.err then
        table.insert(missing, command)
    end
end

try('UNLINK', key)
try('EXISTS', key)
try('DEL', key)
try('TIME')
try('SET', key, 'v')
try('GET', key)
clean()
try('HSET', key, 'f', 'v')
try('HGET', key, 'f')
try('HMGET', key, 'f')
try('HGETALL', key)
try('HLEN', key)
try('HSCAN', key, '0', 'COUNT', 1)
try('HDEL', key, 'f')
clean()
try('SADD', key, 'm')
try('SCARD', key)
try('SMEMBERS', key)
try('SREM', key, 'm')
clean()
try('ZADD', key, 0, 'm')
try('ZCARD', key)
try('ZSCORE', key, 'm')
try('ZMSCORE', key, 'm')
try('ZRANGE', key, 0, 0)
try('ZLEXCOUNT', key, '-', '+')
try('ZRANGEBYLEX', key, '-', '+', 'LIMIT', 0, 1)
try('ZRANGEBYSCORE', key, '-inf', '+inf', 'LIMIT', 0, 1)
try('ZREMRANGEBYLEX', key, '[a', '(b')
try('ZREM', key, 'm')
clean()
try(ARGV[1], ARGV[2], '')
return missing
